import pytest
import torch

from jagg.errors import JaggError
from jagg.optimizers import (
    adamw,
    learning_rate,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)
from jagg.toy import toy_policy


def make(policy, lr=0.1):
    return adamw(policy, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-8)


def step(policy, optimizer, seed):
    source = torch.Generator()
    source.manual_seed(seed)
    for parameter in policy.trainable().values():
        parameter.grad = torch.randn(parameter.shape, generator=source)
    optimizer.step()


def test_settings_reach_torch(policy):
    group = adamw(policy, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-6).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (
        0.1,
        (0.8, 0.9),
        0.2,
        1e-6,
    )
    assert len(group["params"]) == 4


def test_only_trainable_weights_are_optimised(policy):
    next(iter(policy.trainable().values())).requires_grad_(False)
    assert len(make(policy).param_groups[0]["params"]) == 3
    for parameter in policy.module.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(JaggError, match="trainable"):
        make(policy)


def test_state_by_name_goes_on_bit_for_bit():
    through, first = toy_policy(), toy_policy()
    one, two = make(through), make(first)
    for seed in range(6):
        step(through, one, seed)
    for seed in range(3):
        step(first, two, seed)
    resumed = toy_policy()
    with torch.no_grad():
        for name, parameter in resumed.trainable().items():
            parameter.copy_(first.trainable()[name])
    state = optimizer_state(first, two)
    assert set(state) == set(first.trainable())
    three = make(resumed)
    load_optimizer_state(resumed, three, state)
    step(first, two, 99)  # the state is a copy: later steps of its source do not reach it
    for seed in range(3, 6):
        step(resumed, three, seed)
    assert all(torch.equal(p, through.trainable()[n]) for n, p in resumed.trainable().items())


def test_a_fresh_optimizer_has_an_empty_state(policy):
    optimizer = make(policy)
    assert optimizer_state(policy, optimizer) == {}
    load_optimizer_state(policy, optimizer, {})


def test_unknown_names_are_refused(policy):
    with pytest.raises(JaggError, match=r"transformer\.9"):
        load_optimizer_state(policy, make(policy), {"transformer.9": {}})


def rate(tick, decay="linear", warmup=5, total=100, final=0.1):
    return learning_rate(
        tick, lr=6e-4, warmup=warmup, total=total, decay=decay, final_fraction=final
    )


def test_rates_of_the_quick_start_recipe():
    assert [rate(t) for t in (1, 5, 100, 250)] == pytest.approx([1.2e-4, 6e-4, 6e-5, 6e-5])
    assert rate(5 + 19) == pytest.approx(6e-4 * (1 - 0.9 * 0.2))


def test_other_decays():
    assert [rate(t, "constant") for t in (2, 5, 100)] == pytest.approx([2.4e-4, 6e-4, 6e-4])
    assert [rate(t, "cosine", warmup=0) for t in (0, 50, 100)] == pytest.approx(
        [6e-4, 3.3e-4, 6e-5]
    )
    assert rate(3, warmup=10, total=5) == pytest.approx(1.8e-4)
    assert rate(10, warmup=10, total=10) == pytest.approx(6e-5)
    with pytest.raises(JaggError, match="cosine"):
        rate(1, "exponential")


def test_rates_are_set_on_every_group(policy):
    optimizer = make(policy)
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
