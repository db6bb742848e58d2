"""Toy nodes: small classes that have every feature of the SDK, with values of their own."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pytest

from app.graph import (
    Changes,
    Field,
    Graph,
    GraphNode,
    Link,
    NeedsEvery,
    Node,
    Params,
    Registry,
    RunContext,
    Ticks,
    params,
)


class Policy:
    pass


class PromptBatch:
    pass


class Rollout:
    pass


class Reward:
    pass


@params
class PromptsParams(Params):
    iterations: Annotated[int, Field(minimum=1)] = 100
    seed: Annotated[int, Field(minimum=0)] = 0
    text: Annotated[str, Field(multiline=True, tooltip="One per line.")] = ""


class Prompts(Node[PromptsParams]):
    type = "Prompts"
    title = "Prompt Source"
    category = "prompts"
    description = "Gives prompts."

    class Outputs(NamedTuple):
        prompts: Annotated[PromptBatch, Ticks()]
        held_out: PromptBatch

    def run(self, ctx: RunContext) -> Outputs:
        return self.Outputs(PromptBatch(), PromptBatch())


@params
class LoaderParams(Params):
    train: Literal["full", "match", "lora"] = "full"


class Loader(Node[LoaderParams]):
    type = "Loader"
    title = "DiT Loader"
    category = "models"
    description = "Gives a policy."
    cacheable = False

    class Outputs(NamedTuple):
        policy: Policy

    def run(self, ctx: RunContext) -> Outputs:
        return self.Outputs(Policy())


def _rename_count(values: dict[str, Any]) -> dict[str, Any]:
    return {("steps" if name == "count" else name): value for name, value in values.items()}


@params
class SamplerParams(Params):
    steps: Annotated[int, Field(minimum=1, maximum=200, unit="steps")] = 8
    shift: Annotated[float, Field(minimum=0.0, step=0.1, live=True)] = 1.0
    noise_stop: int = 4
    shared: bool = False

    def __post_init__(self) -> None:
        if self.noise_stop > self.steps:
            msg = f"`noise_stop` = {self.noise_stop} is above `steps` = {self.steps}"
            raise ValueError(msg)


class Sampler(Node[SamplerParams]):
    type = "Sampler"
    version = 2
    title = "Sampler"
    category = "sampling"
    description = "Gives a rollout."
    aliases = ("rollout",)
    migrations: ClassVar = {1: _rename_count}

    class Outputs(NamedTuple):
        rollout: Rollout

    def run(self, ctx: RunContext, *, policy: Policy, prompts: PromptBatch) -> Outputs:
        return self.Outputs(Rollout())


@params
class ScoreParams(Params):
    every: Annotated[int, Field(minimum=1)] = 1


class Score(Node[ScoreParams]):
    type = "Score"
    title = "Score"
    category = "rewards"
    description = "Gives a reward."

    class Outputs(NamedTuple):
        reward: Reward
        mean: float

    def run(self, ctx: RunContext, *, rollout: Rollout) -> Outputs:
        return self.Outputs(Reward(), 0.0)


class Mix(Node):
    type = "Mix"
    title = "Mix"
    category = "rewards"
    description = "Joins rewards."

    class Outputs(NamedTuple):
        reward: Reward

    def run(self, ctx: RunContext, *, reward_1: Reward, reward_2: Reward | None = None) -> Outputs:
        return self.Outputs(reward_1)


@params
class OptimizerParams(Params):
    learning_rate: Annotated[float, Field(minimum=0.0)] = 6e-4


class Optimizer(Node[OptimizerParams]):
    type = "Optimizer"
    title = "Optimizer"
    category = "training"
    description = "Changes the policy."
    output = True

    class Outputs(NamedTuple):
        policy: Policy
        count: int

    def run(
        self,
        ctx: RunContext,
        *,
        policy: Annotated[Policy, Changes()],
        rollout: Rollout,
        reward: Annotated[Reward, NeedsEvery()],
    ) -> Outputs:
        return self.Outputs(policy, 1)


@params
class EvaluateParams(Params):
    every: Annotated[int, Field(minimum=1)] = 10
    baseline: bool = False


class Evaluate(Node[EvaluateParams]):
    type = "Evaluate"
    title = "Evaluate"
    category = "evaluation"
    description = "Looks at a policy."
    output = True

    class Outputs(NamedTuple):
        score: float

    def run(self, ctx: RunContext, *, policy: Policy, prompts: PromptBatch) -> Outputs:
        return self.Outputs(0.0)


@params
class NoteParams(Params):
    label: str = "loss"
    scale: float = 1.0


class Note(Node[NoteParams]):
    type = "Note Down"
    title = "Note Down"
    category = "evaluation"
    description = "Writes a number down."
    output = True

    def run(self, ctx: RunContext, *, value: float) -> None:
        return None


ALL = (Prompts, Loader, Sampler, Score, Mix, Optimizer, Evaluate, Note)


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    for cls in ALL:
        registry.add(cls)
    return registry


@pytest.fixture
def make() -> Callable[..., Graph]:
    """Graph from `id=("Type", {input: value or "id.slot" or Link})`."""

    def make(**nodes: tuple[str, Mapping[str, Any]]) -> Graph:
        return Graph(
            nodes={
                key.lstrip("n"): GraphNode(
                    id=key.lstrip("n"),
                    type=type_,
                    inputs={
                        name: Link(value[1:].split(".")[0], int(value.split(".")[1]))
                        if isinstance(value, str) and value.startswith("@")
                        else value
                        for name, value in inputs.items()
                    },
                )
                for key, (type_, inputs) in nodes.items()
            }
        )

    return make


@pytest.fixture
def training(make: Callable[..., Graph]) -> Graph:
    """The quick start in toys: 1 prompts, 2 loader, 3 sampler, 4 score, 5 optimizer, 6 evaluate."""
    return make(
        n1=("Prompts", {"iterations": 20, "seed": 3}),
        n2=("Loader", {}),
        n3=("Sampler", {"policy": "@2.0", "prompts": "@1.0"}),
        n4=("Score", {"rollout": "@3.0"}),
        n5=("Optimizer", {"policy": "@2.0", "rollout": "@3.0", "reward": "@4.0"}),
        n6=("Evaluate", {"policy": "@5.0", "prompts": "@1.1", "baseline": True}),
    )
