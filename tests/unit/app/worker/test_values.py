from pathlib import Path

import pytest
import torch

from app.worker.state import copy_state, state_bytes
from app.worker.values import UnportableValueError, decode_value, encode_value
from jagg.state import load_state, save_state
from jagg.values import PromptBatch, Reward, RewardComponent, Samples, Scorer, UpdateStats


def test_values_of_links_survive_a_checkpoint(tmp_path: Path) -> None:
    batch = PromptBatch(prompts=("a", "b"), group_size=2, metadata=({"n": 1}, {"n": (2, None)}))
    samples = Samples(
        id="9:3",
        prompts=batch,
        latents=torch.randn(4, 2),
        images=torch.rand(4, 3, 2, 2),
        policy_version=3,
    )
    reward = Reward(
        rollout_id="r",
        components=(
            RewardComponent(
                name="x", weight=1.0, values=torch.tensor([0.5, float("nan")]), raw=torch.zeros(2)
            ),
        ),
    )
    stats = UpdateStats(values={"loss": 0.1, "odd": float("nan")})
    save_state(tmp_path / "v", {"values": encode_value((samples, reward, stats))})
    again, reward_again, stats_again = decode_value(load_state(tmp_path / "v")["values"])
    assert again.prompts == batch
    assert torch.equal(again.images, samples.images)
    assert again.policy_version == 3
    assert torch.equal(reward_again.total(), reward.total()) or torch.isnan(reward_again.total()[1])
    assert stats_again.values["loss"] == 0.1
    assert stats_again.values["odd"] != stats_again.values["odd"]


def test_functions_and_live_objects_are_refused() -> None:
    for value in (
        lambda: 0,
        Scorer(name="s", version=1, score=lambda _: None),
        torch.nn.Linear(1, 1),
    ):  # type: ignore[arg-type, return-value]
        with pytest.raises(UnportableValueError, match="cannot be kept"):
            encode_value(value)


@pytest.mark.parametrize(
    "name", ["os:system", "jagg.values:Callable", "subprocess:Popen", "jagg.policy:Any"]
)
def test_a_checkpoint_cannot_name_any_class(name: str) -> None:
    with pytest.raises(UnportableValueError, match="unknown class"):
        decode_value({"__kind__": "dataclass", "class": name, "fields": {}})


def test_a_copy_of_the_state_is_out_of_reach() -> None:
    state = {"a": [torch.ones(3), (1, torch.zeros(2, dtype=torch.float64))], "b": "x"}
    copied = copy_state(state)
    state["a"][0].add_(1)  # type: ignore[index, union-attr]
    assert copied["a"][0].tolist() == [1.0, 1.0, 1.0]
    assert isinstance(copied["a"][1], tuple)
    assert state_bytes(state) == 3 * 4 + 2 * 8
