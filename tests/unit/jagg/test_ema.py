import pytest
import torch

from jagg.ema import Ema
from jagg.errors import JaggError
from jagg.toy import toy_policy


def shift(policy, amount):
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(amount)


def test_average_follows_the_written_decay(policy):
    name = "transformer.0.bias"
    ema = Ema(policy, decay=0.25)
    start = policy.trainable()[name].detach().clone()
    assert torch.equal(policy.ema[name], start)
    shift(policy, 1.0)
    ema.update(policy)  # decay (1 + 0)/(10 + 0) = .1
    assert torch.allclose(policy.ema[name], start + 0.9, atol=1e-6)
    ema.update(policy)  # (1 + 1)/(10 + 1) = 2/11
    assert torch.allclose(policy.ema[name], start + 1 - 0.1 * 2 / 11, atol=1e-6)
    ema.update(policy)  # (1 + 2)/(10 + 2) = .25
    ema.update(policy)  # 4/13 is above the bound of .25
    assert torch.allclose(policy.ema[name], start + 1 - 0.1 * 2 / 11 * 0.25**2, atol=1e-6)


def test_weights_are_lent_without_touching_the_raw_ones(policy):
    ema = Ema(policy, decay=0.9)
    x, sigma = torch.zeros(2, 1, 4, 4), torch.full((2,), 0.5)
    conditioning = policy.encode(["a", "b"])
    before = policy.velocity(x, sigma, conditioning)
    shift(policy, 0.5)
    ema_before = policy.ema
    with policy.weights("ema"):
        assert torch.equal(policy.velocity(x, sigma, conditioning), before)
    assert not torch.equal(policy.velocity(x, sigma, conditioning), before)
    ema.update(policy)
    assert policy.ema is not ema_before
    with policy.weights("raw"):
        assert not torch.equal(policy.velocity(x, sigma, conditioning), before)


def test_small_steps_do_not_vanish_in_bfloat16():
    policy = toy_policy(dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.fill_(1.0)
    ema = Ema(policy, decay=0.999)
    ema.updates = 10**6
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.fill_(2.0)
    for _ in range(700):
        ema.update(policy)
    assert policy.ema["transformer.0.bias"].dtype == torch.bfloat16
    # 2 - .999^700 = 1.504; an average kept in bfloat16 would stay at 1.
    assert float(policy.ema["transformer.0.bias"][0]) == pytest.approx(1.504, abs=0.01)


def test_state_goes_on_bit_for_bit(policy):
    ema = Ema(policy, decay=0.9)
    shift(policy, 0.3)
    ema.update(policy)
    state = ema.state()
    shift(policy, 0.7)
    ema.update(policy)
    expected = policy.ema
    fresh = Ema(policy, decay=0.9)
    fresh.load_state(policy, state)
    fresh.update(policy)
    assert fresh.updates == 2
    assert all(torch.equal(policy.ema[name], tensor) for name, tensor in expected.items())


def test_a_state_of_other_weights_is_refused(policy):
    state = Ema(policy, decay=0.9).state()
    state["average"].pop("transformer.0.bias")
    with pytest.raises(JaggError, match=r"transformer\.0\.bias"):
        Ema(policy, decay=0.9).load_state(policy, state)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_decay_has_a_range(policy, decay):
    with pytest.raises(JaggError, match="decay"):
        Ema(policy, decay=decay)
