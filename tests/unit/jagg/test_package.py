import doctest

import pytest

import jagg
import jagg.transitions
import jagg.values

# Design section 7: what users and their scripts rely on.
CONTRACT = [
    "Policy",
    "Rollout",
    "Reward",
    "flow_sde_step",
    "dance_sde_step",
    "cps_step",
    "rollout",
    "group_advantages",
    "ExactGradient",
    "JaggGradient",
    "GrpoConfig",
    "JaggConfig",
    "grpo_update",
    "Ema",
    "save_state",
    "load_state",
]


@pytest.mark.parametrize("name", CONTRACT)
def test_contract_names_are_exported(name):
    assert name in jagg.__all__
    assert getattr(jagg, name) is not None


def test_every_exported_name_exists():
    assert len(set(jagg.__all__)) == len(jagg.__all__)
    assert all(hasattr(jagg, name) for name in jagg.__all__)


def test_the_notebook_example_learns():
    assert doctest.testmod(jagg).failed == 0


@pytest.mark.parametrize("module", [jagg.transitions, jagg.values], ids=lambda m: m.__name__)
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0
