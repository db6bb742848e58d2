"""Pretraining of the embedded policy: drawn shapes with captions, and flow matching on them."""

from typing import Annotated, Any, NamedTuple

import torch

from app.graph import (
    Changes,
    Field,
    NeedsEvery,
    Node,
    Params,
    RunContext,
    Ticks,
    default_of,
    doc_of,
    params,
)
from jagg.optimizers import load_optimizer_state, optimizer_state
from jagg.policy import Policy
from jagg.values import UpdateStats
from nodes.backends.pretraining import (
    FlowMatchingConfig,
    ShapeData,
    TrainingBatch,
    draw_batch,
    pretraining_optimizer,
    train_step,
)


@params
class ShapeDatasetParams(Params):
    """How many pictures, and how truthful their captions are."""

    iterations: Annotated[int, Field(minimum=1, maximum=1_000_000, tooltip="Ticks of the run.")] = (
        1000
    )
    seed: Annotated[
        int, Field(minimum=0, maximum=2**63 - 1, tooltip="Seed of pictures and captions.")
    ] = 0
    batch: Annotated[int, Field(minimum=1, maximum=65536, tooltip="Pictures per tick.")] = (
        default_of(ShapeData, "batch")
    )
    size_px: Annotated[
        int,
        Field(
            minimum=8,
            maximum=256,
            unit="pixels",
            tooltip="Side of a picture; must be the policy's.",
        ),
    ] = 24
    empty_caption: Annotated[
        float,
        Field(minimum=0.0, maximum=1.0, step=0.05, tooltip=doc_of(ShapeData, "empty_caption")),
    ] = default_of(ShapeData, "empty_caption")
    wrong_shape: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=1.0,
            step=0.05,
            tooltip="Probability that a shape word is replaced by another one, anew each time.",
        ),
    ] = default_of(ShapeData, "wrong_shape")
    wrong_colour: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=1.0,
            step=0.05,
            tooltip="Probability that a colour word is replaced by another one, anew each time.",
        ),
    ] = default_of(ShapeData, "wrong_colour")


class ShapeDataset(Node[ShapeDatasetParams]):
    """Draws a fresh batch of captioned shapes each tick; no picture comes twice."""

    type = "ShapeDataset"
    version = 1
    title = "Shape Dataset"
    category = "pretraining"
    description = "Draws captioned pictures of coloured shapes. Captions can be made wrong on purpose, for a base that needs GRPO."
    aliases = ("data", "pictures", "captions")

    class Outputs(NamedTuple):
        """A fresh batch each tick."""

        batch: Annotated[TrainingBatch, Ticks()]

    def run(self, ctx: RunContext) -> Outputs:
        """The batch of this tick; it depends on the widgets and the tick alone."""
        settings = self.params
        data = ShapeData(
            batch=settings.batch,
            empty_caption=settings.empty_caption,
            wrong_shape=settings.wrong_shape,
            wrong_colour=settings.wrong_colour,
        )
        return self.Outputs(
            batch=draw_batch(data, size_px=settings.size_px, seed=settings.seed, tick=ctx.tick)
        )


@params
class FlowMatchingTrainerParams(Params):
    """AdamW with warm-up and linear decay, and the running average that is exported."""

    learning_rate: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=1.0,
            step=1e-4,
            live=True,
            tooltip="AdamW's rate after the warm-up.",
        ),
    ] = 1.5e-3
    warmup: Annotated[
        int,
        Field(
            minimum=1, maximum=1_000_000, unit="ticks", tooltip="Ticks over which the rate rises."
        ),
    ] = default_of(FlowMatchingConfig, "warmup")
    decay_start: Annotated[
        float,
        Field(
            minimum=0.0, maximum=0.999, step=0.05, tooltip=doc_of(FlowMatchingConfig, "decay_start")
        ),
    ] = default_of(FlowMatchingConfig, "decay_start")
    final_fraction: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=1.0,
            step=0.01,
            tooltip="Share of the rate that is left at the end.",
        ),
    ] = default_of(FlowMatchingConfig, "final_fraction")
    ema_decay: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=0.999999,
            step=0.001,
            tooltip="Decay of the running average of the weights.",
        ),
    ] = default_of(FlowMatchingConfig, "ema_decay")
    micro_batch: Annotated[
        int,
        Field(
            minimum=1,
            maximum=65536,
            advanced=True,
            tooltip=doc_of(FlowMatchingConfig, "micro_batch"),
        ),
    ] = default_of(FlowMatchingConfig, "micro_batch")
    noise_seed: Annotated[
        int,
        Field(
            minimum=0, maximum=2**31 - 1, advanced=True, tooltip="Seed of noise and noise levels."
        ),
    ] = 0


class FlowMatchingTrainer(Node[FlowMatchingTrainerParams]):
    """Trains a policy to turn noise into pictures (flow matching)."""

    type = "FlowMatchingTrainer"
    version = 1
    title = "Flow-Matching Trainer"
    category = "pretraining"
    description = (
        "One AdamW step per tick on the flow-matching loss; keeps a running average of the weights."
    )
    aliases = ("pretrain", "supervised", "train")
    output = True

    class Outputs(NamedTuple):
        """The same policy, changed, and the loss."""

        policy: Policy
        stats: UpdateStats

    def open(self, ctx: RunContext) -> None:  # noqa: ARG002  the context is part of the method
        """Start without an optimizer: it is made for the first policy that arrives."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._restored: dict[str, Any] = {}

    def run(
        self,
        ctx: RunContext,
        *,
        policy: Annotated[Policy, Changes()],
        batch: Annotated[TrainingBatch, NeedsEvery()],
    ) -> Outputs:
        """One optimizer step.

        Raises:
            ShapeError: the pictures are not of the policy's size.
        """
        settings = self.params
        config = FlowMatchingConfig(
            steps=ctx.total_ticks,
            lr=settings.learning_rate,
            warmup=settings.warmup,
            decay_start=settings.decay_start,
            final_fraction=settings.final_fraction,
            ema_decay=settings.ema_decay,
            micro_batch=settings.micro_batch,
        )
        if self._optimizer is None:
            self._policy, self._optimizer = policy, pretraining_optimizer(policy, config)
            load_optimizer_state(policy, self._optimizer, self._restored)
        loss = train_step(
            policy, self._optimizer, batch, config, seed=settings.noise_seed, tick=ctx.tick
        )
        ctx.metric("loss/flow_matching", loss)
        ctx.progress(1, 1)
        return self.Outputs(policy=policy, stats=UpdateStats(values={"loss/flow_matching": loss}))

    def state(self) -> dict[str, Any]:
        """Moments and step counts by parameter name."""
        if self._optimizer is None:
            return {"optimizer": self._restored}
        return {"optimizer": optimizer_state(self._policy, self._optimizer)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Keep the state until the policy arrives."""
        self._restored = state["optimizer"]
