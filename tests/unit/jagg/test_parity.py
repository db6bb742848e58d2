from dataclasses import replace

import pytest
import torch

from jagg.errors import ParityError
from jagg.parity import check_parity, parity
from jagg.toy import toy_policy


def test_a_fresh_rollout_passes(policy, draw):
    assert check_parity(policy, draw(policy, micro_batch=3), clip=1e-4) == 0


def test_another_forward_is_measured_and_refused(policy, draw):
    drawn = draw(policy)
    with torch.no_grad():
        next(iter(policy.trainable().values())).add_(1e-3)
    measured = parity(policy, drawn)
    assert measured > 1e-6
    with pytest.raises(ParityError, match=r"1e-06"):
        check_parity(policy, drawn, clip=1.0)


def test_log_probs_of_every_trained_step_count(policy, draw):
    drawn = draw(policy)
    for step in range(drawn.trained_steps):
        log_probs = drawn.log_probs.clone()
        log_probs[step, 2] += 0.25
        assert parity(policy, replace(drawn, log_probs=log_probs)) == pytest.approx(0.25, abs=1e-5)


def test_only_the_first_micro_batch_is_scored(policy, draw):
    drawn = draw(policy, micro_batch=4)
    log_probs = drawn.log_probs.clone()
    log_probs[0, 6] += 0.25
    assert parity(policy, replace(drawn, log_probs=log_probs)) < 1e-6


def test_lower_precision_is_held_to_a_tenth_of_the_clip(draw):
    policy = toy_policy(seed=1, dtype=torch.bfloat16)
    drawn = draw(policy)
    shifted = replace(drawn, log_probs=drawn.log_probs + 5e-4)
    assert check_parity(policy, shifted, clip=1e-2) == pytest.approx(5e-4, rel=0.01)
    with pytest.raises(ParityError, match="clip range"):
        check_parity(policy, shifted, clip=1e-3)


def test_nan_is_refused(policy, draw):
    drawn = draw(policy)
    with pytest.raises(ParityError, match="nan"):
        check_parity(policy, replace(drawn, log_probs=drawn.log_probs * float("nan")), clip=1.0)


def test_dropout_left_on_is_caught(policy, draw):
    policy.family.transformer = torch.nn.Sequential(
        *policy.family.transformer, torch.nn.Dropout(0.1)
    )
    drawn = draw(policy)
    with pytest.raises(ParityError, match="dropout"):
        check_parity(policy, drawn, clip=1e-4)
