"""Pictures of what a tick drew."""

from typing import Annotated

from app.graph import Field, Node, Params, RunContext, params
from jagg.values import Reward, Rollout
from nodes.backends import sheets


@params
class PreviewImagesParams(Params):
    """How often, and how many."""

    every: Annotated[
        int,
        Field(
            minimum=1,
            maximum=1_000_000,
            tooltip="Write sheets on tick 1, on multiples of this and on the last tick.",
        ),
    ] = 10
    groups: Annotated[int, Field(minimum=1, maximum=1024, tooltip="Prompt groups to show.")] = 2


class PreviewImages(Node[PreviewImagesParams]):
    """Writes one sheet per prompt group: its images side by side, with their rewards."""

    type = "PreviewImages"
    version = 1
    title = "Preview Images"
    category = "evaluation"
    description = "Shows the images of a rollout by prompt group; link a reward to label them."
    aliases = ("gallery", "samples", "save image")
    output = True

    def run(self, ctx: RunContext, *, rollout: Rollout, reward: Reward | None = None) -> None:
        """Decode and write the first groups.

        Raises:
            StaleRolloutError: the reward scores another rollout.
        """
        if reward is not None:
            reward.check_belongs_to(rollout)
        size = rollout.prompts.group_size
        values = None if reward is None else reward.total().tolist()
        for p, prompt in enumerate(rollout.prompts.prompts[: self.params.groups]):
            own = None if values is None else values[p * size : (p + 1) * size]
            sheet = sheets.group_sheet(rollout.images(p), own, prompt)
            sheets.save_sheet(
                sheet,
                ctx.artefact(
                    f"samples/tick-{ctx.tick:06d}/{sheets.file_name(ctx.node)}-{p:03d}.png"
                ),
                ctx.metadata(),
            )
