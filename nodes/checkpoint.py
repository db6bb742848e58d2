"""Saving weights where other programs can use them."""

import hashlib
from typing import Annotated, Literal, NamedTuple

from app.graph import Field, Node, Params, RunContext, params
from jagg.policy import Policy
from jagg.values import Checkpoint
from nodes.backends.families import save_policy


@params
class CheckpointSaverParams(Params):
    """Cadence and retention of run checkpoints and exported weights."""

    every: Annotated[
        int,
        Field(
            minimum=1,
            maximum=1_000_000,
            tooltip="Save the run on multiples of this tick and on the last one; the weights are exported then and on tick 1.",
        ),
    ] = 50
    keep: Annotated[
        int,
        Field(minimum=1, maximum=1000, tooltip="How many of the newest checkpoints stay on disk."),
    ] = 3
    weights: Annotated[
        Literal["raw", "ema"], Field(tooltip="Which weights the exported file holds.")
    ] = "raw"
    name: Annotated[
        str, Field(tooltip="File name of the exported weights, without folder and extension.")
    ] = "policy"

    def __post_init__(self) -> None:
        """Keep the exported file inside its folder."""
        if (
            not self.name
            or not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum()
            or ".." in self.name
        ):
            msg = f"`name` is {self.name!r}, expected letters, digits, '-', '_' and '.' only; the run's export folder is fixed."
            raise ValueError(msg)


class CheckpointSaver(Node[CheckpointSaverParams]):
    """Exports the policy's weights as safetensors, and sets how often the run itself is saved."""

    type = "CheckpointSaver"
    version = 1
    title = "Checkpoint Saver"
    category = "checkpoints"
    description = (
        "Writes export/<name>.safetensors; the run's resumable checkpoints follow the same cadence."
    )
    aliases = ("save", "export", "weights")
    output = True
    sets_checkpoint_cadence = True

    class Outputs(NamedTuple):
        """A handle of the file, not the weights."""

        checkpoint: Checkpoint

    def run(self, ctx: RunContext, *, policy: Policy) -> Outputs:
        """Write the file aside and rename it, so that a reader never sees half of it."""
        relative = f"export/{self.params.name}.safetensors"
        path = ctx.artefact(relative)
        aside = path.with_name(path.name + ".partial")
        weights = policy.ema if self.params.weights == "ema" else None
        if self.params.weights == "ema":
            with policy.weights("ema"):  # words the error where no average is kept
                pass
        told = {"tick": str(ctx.tick), "policy_version": str(policy.version), **ctx.metadata()}
        save_policy(policy, aside, weights, told)
        digest = hashlib.sha256(aside.read_bytes()).hexdigest()
        aside.replace(path)
        return self.Outputs(
            checkpoint=Checkpoint(
                path=relative, tick=ctx.tick, policy_version=policy.version, digest=digest
            )
        )
