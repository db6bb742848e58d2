"""Nodes that learn a vector in milliseconds: everything that a training graph has, at toy size."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from app.graph import Changes, Field, Node, Params, RunContext, Ticks, params
from jagg.values import UpdateStats

SIZE = 64


@dataclass(kw_only=True)
class ToyWeights:
    """The value that training changes."""

    weights: Tensor
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class ToyBatch:
    """What a tick trains on."""

    target: Tensor


@dataclass(frozen=True, kw_only=True)
class ToyRollout:
    """A noisy look at the weights."""

    batch: ToyBatch
    noise: Tensor


@params
class ToyPromptsParams(Params):
    """Clock."""

    iterations: Annotated[int, Field(minimum=1)] = 6
    seed: Annotated[int, Field(minimum=0)] = 0


class ToyPrompts(Node[ToyPromptsParams]):
    """Source with a cursor."""

    type = "ToyPrompts"
    title = "Toy Prompts"
    category = "prompts"
    description = "Targets, fresh each tick, and one that stays."

    class Outputs(NamedTuple):
        """Fresh and fixed."""

        batch: Annotated[ToyBatch, Ticks()]
        held_out: ToyBatch

    def open(self, ctx: RunContext) -> None:
        self.cursor = 0

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]

    def run(self, ctx: RunContext) -> Outputs:
        self.cursor += 1
        noise = torch.randn(SIZE, generator=ctx.generator("target"))
        fixed = torch.ones(SIZE)
        return self.Outputs(
            batch=ToyBatch(target=fixed + 0.1 * noise + 0.001 * self.cursor),
            held_out=ToyBatch(target=fixed),
        )


@params
class ToyLoaderParams(Params):
    """Start."""

    scale: Annotated[float, Field(minimum=0.0)] = 1.0


class ToyLoader(Node[ToyLoaderParams]):
    """Makes the weights."""

    type = "ToyLoader"
    title = "Toy Loader"
    category = "models"
    description = "Weights to train."

    class Outputs(NamedTuple):
        """The weights."""

        policy: ToyWeights

    def run(self, ctx: RunContext) -> Outputs:
        drawn = torch.randn(SIZE, generator=ctx.generator("weights")) * self.params.scale
        self.policy = ToyWeights(weights=drawn.requires_grad_())
        return self.Outputs(policy=self.policy)

    def state(self) -> dict[str, Any]:
        return {"weights": self.policy.weights.detach(), "version": self.policy.version}

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.policy.weights.copy_(state["weights"])
        self.policy.version = state["version"]


@params
class ToySamplerParams(Params):
    """How to be stopped: at tick `hold_at` the node waits while a file `hold` is in the current directory."""

    hold_at: Annotated[int, Field(minimum=0)] = 0
    deaf: bool = False
    fail_at: Annotated[int, Field(minimum=0)] = 0


class ToySampler(Node[ToySamplerParams]):
    """Draws noise, and waits in the middle of a tick if asked to."""

    type = "ToySampler"
    title = "Toy Sampler"
    category = "sampling"
    description = "A rollout."

    class Outputs(NamedTuple):
        """The rollout."""

        rollout: ToyRollout

    def run(self, ctx: RunContext, *, policy: ToyWeights, batch: ToyBatch) -> Outputs:
        ctx.progress(1, 2)
        while ctx.tick == self.params.hold_at and Path("hold").exists():
            time.sleep(0.02)
            if not self.params.deaf:
                ctx.progress(1, 2)
        ctx.progress(2, 2)
        if self.params.fail_at and ctx.tick == self.params.fail_at:
            msg = "the toy broke"
            raise ValueError(msg)
        noise = torch.randn(SIZE, generator=ctx.generator("noise", (0, 1)))
        ctx.preview(noise.sigmoid().reshape(1, 1, 8, 8))
        return self.Outputs(rollout=ToyRollout(batch=batch, noise=noise))


@params
class ToyTrainerParams(Params):
    """Step size."""

    rate: Annotated[float, Field(minimum=0.0, live=True)] = 0.05


class ToyTrainer(Node[ToyTrainerParams]):
    """AdamW with an average of the weights."""

    type = "ToyTrainer"
    title = "Toy Trainer"
    category = "training"
    description = "One step per tick."

    class Outputs(NamedTuple):
        """The same weights, and numbers."""

        policy: ToyWeights
        stats: UpdateStats

    def open(self, ctx: RunContext) -> None:
        self.optimizer: torch.optim.AdamW | None = None
        self.average: Tensor | None = None
        self.loaded: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {} if self.loaded is None else self.loaded
        moments = next(iter(self.optimizer.state.values()))
        return {"moments": dict(moments), "average": self.average}

    def load_state(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def run(
        self, ctx: RunContext, *, policy: Annotated[ToyWeights, Changes()], rollout: ToyRollout
    ) -> Outputs:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([policy.weights], lr=self.params.rate)
            self.average = policy.weights.detach().clone()
            if self.loaded is not None:
                self.optimizer.state[policy.weights].update(self.loaded["moments"])
                self.average = self.loaded["average"]
        for group in self.optimizer.param_groups:
            group["lr"] = self.params.rate * (1 - (ctx.tick - 1) / ctx.total_ticks)
        self.optimizer.zero_grad()
        error = policy.weights + 0.01 * rollout.noise - rollout.batch.target
        ctx.backward(error, 2 * error.detach())
        self.optimizer.step()
        policy.version += 1
        self.average = self.average * 0.9 + policy.weights.detach() * 0.1
        loss = float(error.detach().square().mean())
        ctx.metric("loss/policy", loss)
        ctx.metric("reward/mean", -loss)
        return self.Outputs(policy=policy, stats=UpdateStats(values={"loss": loss}))


@params
class ToyEvaluateParams(Params):
    """When."""

    every: Annotated[int, Field(minimum=1)] = 3
    baseline: bool = True


class ToyEvaluate(Node[ToyEvaluateParams]):
    """Distance to the fixed target."""

    type = "ToyEvaluate"
    title = "Toy Evaluate"
    category = "evaluation"
    description = "A measure."
    output = True

    class Outputs(NamedTuple):
        """Numbers."""

        stats: UpdateStats

    def run(self, ctx: RunContext, *, policy: ToyWeights, prompts: ToyBatch) -> Outputs:
        value = float((policy.weights.detach() - prompts.target).square().mean())
        ctx.metric("eval/toy/mean", -value)
        return self.Outputs(stats=UpdateStats(values={"distance": value, "tick": float(ctx.tick)}))


class ToyRepeat(Node):
    """Reports at every tick what it last read."""

    type = "ToyRepeat"
    title = "Toy Repeat"
    category = "evaluation"
    description = "The last value."
    output = True

    def run(self, ctx: RunContext, *, stats: UpdateStats) -> None:
        ctx.metric("repeat/distance", stats.values["distance"])
        ctx.metric("repeat/tick", stats.values["tick"])


@params
class ToySaverParams(Params):
    """Cadence."""

    every: Annotated[int, Field(minimum=1)] = 2
    keep: Annotated[int, Field(minimum=1)] = 100


class ToySaver(Node[ToySaverParams]):
    """Exports the weights as text."""

    type = "ToySaver"
    title = "Toy Saver"
    category = "checkpoints"
    description = "A file."
    output = True
    sets_checkpoint_cadence = True

    def run(self, ctx: RunContext, *, policy: ToyWeights) -> None:
        ctx.artefact("export/weights.txt").write_text(repr(policy.weights.tolist()))
