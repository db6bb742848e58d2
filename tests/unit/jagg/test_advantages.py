"""Acceptance row T8 of the algorithms reference."""

import pytest
import torch

from jagg.advantages import group_advantages, normalised_rewards, shuffled_advantages
from jagg.errors import JaggError, ShapeError
from jagg.randomness import generator

GROUP = torch.arange(4).repeat_interleave(6)
NAN = float("nan")


def rewards(seed=0):
    return torch.randn(24, generator=generator(seed, "rewards"), dtype=torch.float64)


def advantages(values, group=GROUP, *, normalise="group_std", epsilon=1e-4, clamp=5.0):
    return group_advantages(values, group, normalise=normalise, epsilon=epsilon, clamp=clamp)


@pytest.mark.parametrize("normalise", ["group_std", "global_std", "none"])
def test_t8_groups_sum_to_zero_before_the_clamp(normalise):
    result = normalised_rewards(rewards(), GROUP, normalise=normalise, epsilon=1e-4)
    for key in range(4):
        assert abs(float(result[key == GROUP].sum())) < 1e-9


def test_t8_group_std_is_one():
    result = normalised_rewards(rewards(), GROUP, normalise="group_std", epsilon=0.0)
    for key in range(4):
        assert float(result[key == GROUP].std(correction=0)) == pytest.approx(1.0, abs=1e-12)


def test_known_values_by_group_std_global_std_and_none():
    values, group = torch.tensor([1.0, 3.0, 10.0, 20.0]), torch.tensor([0, 0, 1, 1])
    assert advantages(values, group).tolist() == pytest.approx(
        [-1 / 1.0001, 1 / 1.0001, -5 / 5.0001, 5 / 5.0001]
    )
    std = 7.433034  # population standard deviation of 1, 3, 10, 20
    assert advantages(values, group, normalise="global_std", epsilon=0.0).tolist() == pytest.approx(
        [-1 / std, 1 / std, -5 / std, 5 / std]
    )
    assert advantages(values, group, normalise="none").tolist() == [-1.0, 1.0, -5.0, 5.0]


@pytest.mark.parametrize("normalise", ["group_std", "global_std", "none"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6])
def test_t8_a_constant_group_is_exactly_zero(normalise, value):
    values = rewards()
    values[GROUP == 1] = value
    result = advantages(values, normalise=normalise)
    assert torch.equal(result[GROUP == 1], torch.zeros(6))
    assert bool(result.isfinite().all())


def test_t8_a_constant_group_whose_mean_rounds_is_exactly_zero():
    values = torch.full((7,), 0.1, dtype=torch.float64)
    result = advantages(values, torch.zeros(7, dtype=torch.int64), epsilon=0.0)
    assert torch.equal(result, torch.zeros(7))


def test_t8_a_group_of_one_is_zero():
    assert advantages(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1]))[0] == 0


@pytest.mark.parametrize("normalise", ["group_std", "global_std", "none"])
def test_t8_invariant_to_shift(normalise):
    assert torch.allclose(
        advantages(rewards() + 5, normalise=normalise), advantages(rewards(), normalise=normalise)
    )


@pytest.mark.parametrize("normalise", ["group_std", "global_std"])
def test_t8_invariant_to_scale(normalise):
    scaled = advantages(rewards() * 37, normalise=normalise, epsilon=0.0)
    assert torch.allclose(
        scaled, advantages(rewards(), normalise=normalise, epsilon=0.0), atol=1e-6
    )


@pytest.mark.parametrize("normalise", ["group_std", "global_std", "none"])
def test_t8_invariant_to_the_order_of_samples(normalise):
    order = torch.randperm(24, generator=generator(1, "order"))
    permuted = advantages(rewards()[order], GROUP[order], normalise=normalise)
    assert torch.allclose(permuted, advantages(rewards(), normalise=normalise)[order], atol=1e-6)


def test_clamp_bounds_and_can_be_off():
    values = torch.tensor([0.0] * 99 + [1.0])
    group = torch.zeros(100, dtype=torch.int64)
    assert float(advantages(values, group, clamp=5.0).max()) == 5.0
    assert float(advantages(values, group, clamp=None).max()) == pytest.approx(9.94, abs=0.01)


def test_nan_members_get_zero_and_do_not_count():
    values = torch.tensor([NAN, 1.0, 3.0, float("inf")])
    result = advantages(values, torch.zeros(4, dtype=torch.int64), epsilon=0.0)
    assert result.tolist() == [0.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize(("finite", "kept"), [(1, False), (2, False), (3, True), (6, True)])
def test_a_group_with_too_few_rewards_is_left_out(finite, kept):
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    values[finite:] = NAN
    result = advantages(values, torch.zeros(6, dtype=torch.int64), normalise="none", clamp=None)
    assert bool((result != 0).any()) is kept


def test_result_is_float32_and_input_is_unchanged():
    values = rewards()
    before = values.clone()
    assert advantages(values).dtype == torch.float32
    assert torch.equal(values, before)


def test_shuffle_permutes_inside_groups_only():
    values = torch.arange(24.0)
    shuffled = shuffled_advantages(values, GROUP, {p: generator(0, p) for p in range(4)})
    assert not torch.equal(shuffled, values)
    for key in range(4):
        assert sorted(shuffled[key == GROUP].tolist()) == values[key == GROUP].tolist()


def test_errors_name_the_argument():
    with pytest.raises(ShapeError, match=r"\(24,\).*\(3,\)"):
        advantages(rewards(), torch.zeros(3))
    with pytest.raises(JaggError, match="clamp"):
        advantages(rewards(), clamp=0.0)
    with pytest.raises(JaggError, match="global_std"):
        advantages(rewards(), normalise="std")
