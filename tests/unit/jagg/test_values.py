import dataclasses

import pytest
import torch

from jagg.errors import ShapeError, StaleRolloutError
from jagg.values import PromptBatch, Reward, RewardComponent

NAN = float("nan")


def component(values, weight=1.0, name="a"):
    values = torch.tensor(values)
    return RewardComponent(name=name, weight=weight, values=values, raw=values)


def test_samples_of_a_batch_are_grouped_by_prompt_index():
    batch = PromptBatch(prompts=("a", "b"), group_size=3, metadata=({"n": 1}, {"n": 2}))
    assert len(batch) == 6
    assert batch.group().tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.sample_prompts() == ("a", "a", "a", "b", "b", "b")
    assert [entry["n"] for entry in batch.sample_metadata()] == [1, 1, 1, 2, 2, 2]


def test_t8_prompts_that_differ_only_at_the_end_or_not_at_all_stay_distinct_groups():
    long = "word " * 400
    batch = PromptBatch(prompts=(long + "cat", long + "dog", long + "dog"), group_size=2)
    assert batch.group().tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"prompts": ()}, "prompts"),
        ({"prompts": ("a",), "group_size": 0}, "group_size"),
        ({"prompts": ("a",), "metadata": ({}, {})}, "metadata"),
    ],
)
def test_bad_batches_are_named(arguments, name):
    with pytest.raises(ShapeError, match=name):
        PromptBatch(**arguments)


def test_total_is_the_weighted_mean_in_float64():
    reward = Reward(rollout_id="r", components=(component([1.0, 2.0], 3.0), component([5.0, 6.0])))
    assert reward.total().tolist() == [2.0, 3.0]
    assert reward.total().dtype == torch.float64


def test_a_missing_verdict_is_nan_unless_its_weight_is_zero():
    both = (component([1.0, NAN], 1.0), component([NAN, NAN], 0.0, "b"))
    total = Reward(rollout_id="r", components=both).total()
    assert total[0] == 1.0
    assert total[1].isnan()


def test_a_reward_knows_its_rollout(policy, draw):
    drawn = draw(policy)
    Reward(rollout_id="drawn", components=(component([0.0] * 8),)).check_belongs_to(drawn)
    with pytest.raises(StaleRolloutError, match="other"):
        Reward(rollout_id="other", components=(component([0.0] * 8),)).check_belongs_to(drawn)
    with pytest.raises(ShapeError, match=r"\(7,\).*\(8,\).*P=2, G=4"):
        Reward(rollout_id="drawn", components=(component([0.0] * 7),)).check_belongs_to(drawn)


def test_values_are_frozen(policy, draw):
    with pytest.raises(dataclasses.FrozenInstanceError):
        draw(policy).id = "x"
