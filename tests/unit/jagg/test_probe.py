import pytest
import torch

from jagg.probe import probe
from jagg.randomness import generator_factory
from jagg.update import GrpoConfig, JaggConfig


def run(policy, drawn, reward, *, window=4, **config):
    return probe(
        policy,
        drawn,
        reward(drawn),
        config=GrpoConfig(**config),
        jagg=JaggConfig(window=window),
        generator=generator_factory(0),
    )


def test_window_of_two_is_exact(policy, draw, reward):
    values = run(policy, draw(policy), reward, window=2)
    assert values["jagg/cosine"] == pytest.approx(1, abs=1e-9)
    assert values["jagg/rel_error"] < 1e-6
    assert values["jagg/cosine_equalised"] == pytest.approx(1, abs=1e-9)


def test_wide_windows_differ_by_the_error_that_the_cosine_tells(policy, draw, reward):
    values = run(policy, draw(policy, micro_batch=4), reward, window=9)
    assert 0.3 < values["jagg/cosine"] < 0.9999
    assert values["jagg/rel_error"] > 0.01
    assert values["jagg/cosine_equalised"] != values["jagg/cosine"]
    assert set(values) == {
        "jagg/cosine",
        "jagg/rel_error",
        "jagg/cosine_equalised",
        "jagg/rel_error_equalised",
    }


def test_weights_version_and_gradients_stay_as_they_are(policy, draw, reward):
    policy.keep_reference()
    for parameter in policy.trainable().values():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    run(policy, draw(policy), reward, kl_weight=0.1)
    assert policy.version == 0
    for name, parameter in policy.trainable().items():
        assert torch.equal(parameter, before[name])
        assert torch.equal(parameter.grad, torch.full_like(parameter, 3.0))
