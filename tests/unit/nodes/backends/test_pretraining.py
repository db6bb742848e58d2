import pytest
import torch

from jagg.errors import NonFiniteError
from jagg.policy import Policy
from nodes.backends.pretraining import (
    FlowMatchingConfig,
    ShapeData,
    draw_batch,
    pretraining_optimizer,
    train_step,
)
from nodes.backends.shapes import parse_prompt
from nodes.backends.tiny_dit import TinyDiT, TinyDiTConfig

SMALL = TinyDiTConfig(size_px=8, layers=1, heads=2, head_width=8, text_width=16, text_layers=1)
DATA = ShapeData(batch=16)
CONFIG = FlowMatchingConfig(steps=40, lr=3e-3, warmup=4)


def _train(steps, micro_batch=64, seed=0):
    policy = Policy(family=TinyDiT.build(SMALL, seed=0))
    config = FlowMatchingConfig(steps=40, lr=3e-3, warmup=4, micro_batch=micro_batch)
    optimizer = pretraining_optimizer(policy, config)
    losses = [
        train_step(
            policy,
            optimizer,
            draw_batch(DATA, size_px=8, seed=seed, tick=t),
            config,
            seed=seed,
            tick=t,
        )
        for t in range(1, steps + 1)
    ]
    return policy, losses


def test_a_batch_depends_on_seed_and_tick_alone():
    first, again = (draw_batch(DATA, size_px=8, seed=0, tick=3) for _ in range(2))
    assert torch.equal(first.latents, again.latents)
    assert first.captions == again.captions
    assert first.latents.shape == (16, 3, 8, 8)
    assert first.latents.abs().max() <= 1
    for other in (
        draw_batch(DATA, size_px=8, seed=1, tick=3),
        draw_batch(DATA, size_px=8, seed=0, tick=4),
    ):
        assert not torch.equal(first.latents, other.latents)


def test_some_captions_are_empty_and_the_rest_are_of_the_grammar():
    captions = draw_batch(ShapeData(batch=400), size_px=8, seed=0, tick=1).captions
    assert 20 < captions.count("") < 60
    assert all(parse_prompt(c) for c in captions if c)


def test_training_lowers_the_loss_and_repeats_bit_for_bit():
    policy, losses = _train(40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert policy.version == 40
    _, again = _train(6)
    assert again == losses[:6]
    assert _train(6, seed=1)[1] != losses[:6]


def test_a_gradient_that_is_not_finite_is_refused_and_weights_left_alone():
    policy, _ = _train(1)
    config = FlowMatchingConfig(steps=40, lr=3e-3, warmup=4)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    average = {name: tensor.clone() for name, tensor in policy.ema.items()}
    batch = draw_batch(DATA, size_px=8, seed=0, tick=2)
    batch.latents[0, 0, 0, 0] = float("inf")
    optimizer = pretraining_optimizer(policy, config)
    with pytest.raises(NonFiniteError, match="gradient norm is nan at tick 2"):
        train_step(policy, optimizer, batch, config, seed=0, tick=2)
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable().items())
    assert all(torch.equal(tensor, average[name]) for name, tensor in policy.ema.items())
    assert policy.version == 1


def test_micro_batches_change_rounding_alone():
    assert _train(3, micro_batch=5)[1] == pytest.approx(_train(3)[1], rel=1e-4)


def test_the_average_lags_behind_the_weights():
    policy, _ = _train(3)
    assert policy.ema is not None
    assert policy.ema.keys() == policy.trainable().keys()
    start = TinyDiT.build(SMALL, seed=0).transformer.get_parameter("proj_out.weight")
    name = "transformer.proj_out.weight"
    moved = (policy.trainable()[name] - start).norm()
    assert 0 < (policy.ema[name] - start).norm() < moved


def test_the_learning_rate_rises_stays_and_falls():
    rates = [
        FlowMatchingConfig(steps=100, lr=1.0, warmup=10).learning_rate(t)
        for t in (1, 10, 50, 75, 100)
    ]
    assert rates == pytest.approx([0.1, 1, 1, 0.51, 0.02])
