"""The DiT loader: what learns, what is refused, and what a checkpoint holds."""

import pytest
import torch

from jagg.errors import JaggError
from nodes.policy import DiTLoader, DiTLoaderParams


def _load(context, **params):
    node = DiTLoader(DiTLoaderParams(**{"model": "embedded/random", **params}))
    return node, node.run(context("2")).policy


def test_full_training_leaves_the_text_encoder_alone(context):
    _, policy = _load(context)
    names = set(policy.trainable())
    assert names
    assert all(name.startswith("transformer.") for name in names)
    _, both = _load(context, train_text_encoder=True)
    assert any(name.startswith("text_encoder.") for name in both.trainable())


def test_patterns_choose_by_search_and_one_without_a_match_is_refused(context):
    _, policy = _load(context, train="match", train_patterns="context_embedder\nadd_[qkv]_proj")
    assert all("context_embedder" in n or "add_" in n for n in policy.trainable())
    assert any(".add_k_proj." in n for n in policy.trainable())
    with pytest.raises(JaggError, match=r"'proj_uot' matches no parameter.*proj_out"):
        _load(context, train="match", train_patterns="context_embedder\nproj_uot")
    with pytest.raises(ValueError, match="`train_patterns` is empty"):
        DiTLoaderParams(train="match", train_patterns=" \n ")
    with pytest.raises(ValueError, match="no regular expression"):
        DiTLoaderParams(train="match", train_patterns="(")
    with pytest.raises(JaggError, match="match the text encoder alone"):
        _load(context, train="match", train_patterns="^text_encoder")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("embedded/nosy", r"shipped are embedded/noisy.*Did you mean embedded/noisy\?"),
        ("notes.safetensors", "is no safetensors file"),
    ],
)
def test_unknown_models_are_named(context, tmp_path, model, message):
    (tmp_path / "models" / "notes.safetensors").write_text("hello")
    with pytest.raises(ValueError, match=message):
        _load(context, model=model)


def test_a_missing_model_lists_what_is_there(context, tmp_path):
    (tmp_path / "models" / "mine.safetensors").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"mine\.safetensors"):
        _load(context, model="mien.safetensors")


def test_state_goes_back_bit_for_bit_into_the_same_object_only(context):
    node, policy = _load(context, train="match", train_patterns="proj_out")
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    policy.version, policy.plan = 7, {"steps": [1, 2]}
    saved = {name: p.detach().clone() for name, p in policy.trainable().items()}
    state = node.state()
    other_node, other = _load(context, train="match", train_patterns="proj_out")
    other_node.load_state(state)
    assert other.version == 7
    assert other.plan == {"steps": [1, 2]}
    assert all(torch.equal(p, saved[name]) for name, p in other.trainable().items())
    narrower, _ = _load(context, train="match", train_patterns="proj_out.weight")
    with pytest.raises(JaggError, match=r"unexpected: transformer\.proj_out\.bias"):
        narrower.load_state(state)


def test_restored_average_and_reference_lie_beside_the_weights(context):
    """A checkpoint is read on the CPU, whatever device the policy is on."""
    node, policy = _load(context, train="match", train_patterns="proj_out")
    policy.keep_reference()
    policy.ema = {name: p.detach().clone() for name, p in policy.trainable().items()}
    state = node.state()
    other_node, other = _load(context, train="match", train_patterns="proj_out")
    other.module.to("meta")
    other_node.load_state(state)
    assert all(tensor.is_meta for tensor in other.ema.values())
    assert all(tensor.is_meta for tensor in other.reference.values())
    fresh, untouched = _load(context, train="match", train_patterns="proj_out")
    fresh.load_state({**state, "ema": None, "reference": None})
    assert untouched.ema is None
    assert untouched.reference is None


def test_random_weights_depend_on_their_seed_alone(context):
    torch.rand(3)
    a, b, c = (_load(context, init_seed=seed)[1] for seed in (0, 0, 1))
    first, second, third = (
        torch.cat([p.flatten() for p in x.trainable().values()]) for x in (a, b, c)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
