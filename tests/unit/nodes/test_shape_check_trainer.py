"""The card that trains the independent scorer: it is the shipped training, step by step, and it resumes."""

import copy

import pytest
import torch

from nodes.backends.shape_classifiers import ClassifierTraining, load, train
from nodes.shape_check import ShapeCheckTrainer, ShapeCheckTrainerParams


def _node(context):
    node = ShapeCheckTrainer(ShapeCheckTrainerParams(iterations=4, batch=8, test_drawings=8))
    node.open(context("1", 0, total_ticks=4))
    return node


@pytest.mark.slow
def test_ticks_equal_the_training_function_and_the_last_one_writes_the_weights(context, tmp_path):
    node = _node(context)
    for tick in (1, 2):
        node.run(context("1", tick, total_ticks=4))
    saved = copy.deepcopy(node.state())
    for tick in (3, 4):
        node.run(context("1", tick, total_ticks=4))
    expected = train(0, ClassifierTraining(steps=4, batch=8)).state_dict()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in node.state()["weights"].items()
    )
    written = load(tmp_path / "run/export/shape_check.safetensors").state_dict()
    assert all(
        torch.equal(tensor, expected[name].half().float()) for name, tensor in written.items()
    )

    again = _node(context)
    again.load_state(saved)
    for tick in (3, 4):
        again.run(context("1", tick, total_ticks=4))
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in again.state()["weights"].items()
    )
