"""Training of the independent scorer's classifiers."""

from typing import Annotated, Any, NamedTuple

import torch
from torch import nn

from app.graph import Field, Node, Params, RunContext, Ticks, default_of, doc_of, params
from jagg.values import UpdateStats
from nodes.backends.shape_classifiers import (
    ClassifierTraining,
    ShapeClassifiers,
    accuracy,
    save,
    start,
    train_step,
)


@params
class ShapeCheckTrainerParams(Params):
    """How long and how fast the classifiers learn."""

    iterations: Annotated[
        int,
        Field(
            minimum=1,
            maximum=1_000_000,
            tooltip="Training steps; the rate falls to zero over them.",
        ),
    ] = default_of(ClassifierTraining, "steps")
    seed: Annotated[
        int, Field(minimum=0, maximum=2**63 - 1, tooltip="Seed of weights and drawings.")
    ] = 0
    batch: Annotated[
        int, Field(minimum=1, maximum=4096, tooltip=doc_of(ClassifierTraining, "batch"))
    ] = default_of(ClassifierTraining, "batch")
    learning_rate: Annotated[
        float, Field(minimum=0.0, maximum=1.0, tooltip=doc_of(ClassifierTraining, "lr"))
    ] = default_of(ClassifierTraining, "lr")
    weight_decay: Annotated[
        float, Field(minimum=0.0, maximum=10.0, advanced=True, tooltip="AdamW's weight decay.")
    ] = default_of(ClassifierTraining, "weight_decay")
    label_smoothing: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=0.9,
            advanced=True,
            tooltip="Share of the target spread over the other shapes.",
        ),
    ] = default_of(ClassifierTraining, "label_smoothing")
    test_drawings: Annotated[
        int,
        Field(
            minimum=1,
            maximum=100_000,
            advanced=True,
            tooltip="Drawings of the test after the last tick.",
        ),
    ] = 1000


class ShapeCheckTrainer(Node[ShapeCheckTrainerParams]):
    """Teaches the Shape Check's classifiers on distorted drawings that it makes itself."""

    type = "ShapeCheckTrainer"
    version = 1
    title = "Shape Check Trainer"
    category = "pretraining"
    description = (
        "Trains the two shape classifiers of the Shape Check scorer on distorted drawings, fresh each tick, "
        "and writes export/shape_check.safetensors."
    )
    aliases = ("scorer", "classifier", "train")
    output = True

    class Outputs(NamedTuple):
        """Losses and accuracies of the tick's drawings."""

        stats: Annotated[UpdateStats, Ticks()]

    def open(self, ctx: RunContext) -> None:  # noqa: ARG002  the context is part of the method
        """Start with untrained classifiers."""
        settings = self.params
        self._training = ClassifierTraining(
            steps=settings.iterations,
            batch=settings.batch,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            label_smoothing=settings.label_smoothing,
        )
        self._classifiers: ShapeClassifiers
        self._optimizer: torch.optim.AdamW
        self._classifiers, self._optimizer = start(settings.seed, self._training)

    def run(self, ctx: RunContext) -> Outputs:
        """One step; on the last tick, test on drawings that training never saw and write the weights."""
        told = train_step(
            self._classifiers,
            self._optimizer,
            seed=self.params.seed,
            tick=ctx.tick - 1,
            training=self._training,
        )
        for name, value in told.items():
            judge, _, kind = name.partition("_")
            ctx.metric(f"{kind}/{judge}", value)
        if ctx.tick == ctx.total_ticks:
            tested = accuracy(
                self._classifiers, count=self.params.test_drawings, seed=self.params.seed
            )
            for name, value in tested.items():
                ctx.metric(f"eval/{name}_accuracy/mean", value)
            facts = {
                "seed": str(self.params.seed),
                "steps": str(ctx.tick),
                "batch": str(self.params.batch),
                **{f"accuracy_{name}": f"{value:.3f}" for name, value in tested.items()},
                **ctx.metadata(),
            }
            save(self._classifiers, ctx.artefact("export/shape_check.safetensors"), facts)
        return self.Outputs(stats=UpdateStats(values=told))

    def state(self) -> dict[str, Any]:
        """Weights, and AdamW's moments by parameter name."""
        moments = {
            name: {key: value.detach().clone() for key, value in self._optimizer.state[p].items()}
            for name, p in self._named()
            if p in self._optimizer.state
        }
        return {"weights": self._classifiers.state_dict(), "moments": moments}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._classifiers.load_state_dict(state["weights"])
        for name, p in self._named():
            if name in state["moments"]:
                self._optimizer.state[p] = {
                    key: value.detach().clone() for key, value in state["moments"][name].items()
                }

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._classifiers.named_parameters())
