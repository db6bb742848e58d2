"""Prompt sources: what a tick draws images for."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch

from app.graph import Field, Node, Params, RunContext, Ticks, params
from jagg.randomness import generator
from jagg.values import PromptBatch
from nodes.backends.prompt_files import PromptFileError, read_prompts
from nodes.backends.shapes import composition_split, held_out_scenes, training_scenes

Entry = tuple[Mapping[str, Any], str]
"""Metadata and prompt."""


@params
class ShapePromptsParams(Params):
    """How many shape captions a tick trains on, and which compositions are kept from training."""

    iterations: Annotated[int, Field(minimum=1, maximum=1_000_000, tooltip="Ticks of the run.")] = (
        100
    )
    seed: Annotated[
        int, Field(minimum=0, maximum=2**63 - 1, tooltip="Seed of every random draw of the run.")
    ] = 0
    prompts_per_tick: Annotated[
        int, Field(minimum=1, maximum=4096, tooltip="Prompts P of one tick.")
    ] = 8
    group_size: Annotated[
        int, Field(minimum=1, maximum=1024, tooltip="Images G of each prompt.")
    ] = 12
    held_out_count: Annotated[
        int,
        Field(
            minimum=1,
            maximum=2000,
            tooltip="Evaluation prompts; each names a colour and shape pair never trained on.",
        ),
    ] = 64
    split_seed: Annotated[
        int,
        Field(
            minimum=0,
            maximum=2**31 - 1,
            advanced=True,
            tooltip="Which compositions are held out, and the evaluation prompts.",
        ),
    ] = 0


class ShapePrompts(Node[ShapePromptsParams]):
    """Draws fresh shape captions each tick and keeps a fixed set of unseen compositions for evaluation."""

    type = "ShapePrompts"
    version = 1
    title = "Shape Prompts"
    category = "prompts"
    description = (
        "Captions of coloured shapes from a small grammar, fresh each tick. Some pairs of colour and shape never occur in "
        "`prompts`; every caption of `held_out` has one."
    )
    aliases = ("prompt source", "captions", "dataset")

    class Outputs(NamedTuple):
        """Captions to train on, fresh each tick, and captions to evaluate on, always the same."""

        prompts: Annotated[PromptBatch, Ticks()]
        held_out: PromptBatch

    def open(self, ctx: RunContext) -> None:  # noqa: ARG002  the context is part of the method
        """Draw what stays the same at every tick: the split, and the captions to evaluate on."""
        settings = self.params
        self._split = composition_split(settings.split_seed)
        unseen = held_out_scenes(settings.held_out_count, self._split, settings.split_seed)
        self._held_out = PromptBatch(
            prompts=tuple(scene.prompt() for scene in unseen),
            metadata=tuple(scene.to_metadata() for scene in unseen),
        )

    def run(self, ctx: RunContext) -> Outputs:
        """Draw this tick's captions; they depend on the run's seed and the tick alone."""
        settings = self.params
        drawn = training_scenes(settings.prompts_per_tick, self._split, ctx.generator("prompts"))
        return self.Outputs(
            prompts=PromptBatch(
                prompts=tuple(scene.prompt() for scene in drawn),
                group_size=settings.group_size,
                metadata=tuple(scene.to_metadata() for scene in drawn),
            ),
            held_out=self._held_out,
        )


@params
class PromptListParams(Params):
    """Prompts typed into the card, or read from a file of the input folder."""

    iterations: Annotated[int, Field(minimum=1, maximum=1_000_000, tooltip="Ticks of the run.")] = (
        100
    )
    seed: Annotated[
        int, Field(minimum=0, maximum=2**63 - 1, tooltip="Seed of every random draw of the run.")
    ] = 0
    text: Annotated[
        str, Field(multiline=True, tooltip="One prompt per line; empty lines are skipped.")
    ] = ""
    file: Annotated[
        str,
        Field(
            tooltip="A .txt (one prompt per line) or .jsonl (objects with a `prompt`) file of the input folder; its prompts follow those of `text`."
        ),
    ] = ""
    prompts_per_tick: Annotated[
        int, Field(minimum=1, maximum=4096, tooltip="Prompts P of one tick.")
    ] = 8
    group_size: Annotated[
        int, Field(minimum=1, maximum=1024, tooltip="Images G of each prompt.")
    ] = 12
    order: Annotated[
        Literal["shuffled", "sequential"],
        Field(
            tooltip="Shuffled anew each time round the list, or as written.",
        ),
    ] = "shuffled"
    negative_prompt: Annotated[
        str, Field(advanced=True, tooltip="The unconditional branch of guidance.")
    ] = ""


class PromptList(Node[PromptListParams]):
    """Goes through a list of prompts, a few each tick."""

    type = "PromptList"
    version = 1
    title = "Prompt List"
    category = "prompts"
    description = (
        "Prompts from the card or from a .txt or .jsonl file, a few each tick, round and round."
    )
    aliases = ("prompt source", "text", "file", "jsonl")

    class Outputs(NamedTuple):
        """This tick's prompts, and all of them once."""

        prompts: Annotated[PromptBatch, Ticks()]
        all_prompts: PromptBatch

    def open(self, ctx: RunContext) -> None:
        """Read the list.

        Raises:
            PromptFileError: the file cannot be read, or there is no prompt at all.
        """
        self._entries: list[Entry] = [
            ({}, line.strip()) for line in self.params.text.splitlines() if line.strip()
        ]
        if self.params.file:
            path = ctx.resolve("input", self.params.file)
            self._entries += [(entry.metadata, entry.prompt) for entry in read_prompts(path)]
        if not self._entries:
            msg = "Prompt List: there is no prompt. Type some into `text`, one per line, or name a file in `file`."
            raise PromptFileError(msg)

    def run(self, ctx: RunContext) -> Outputs:
        """This tick's prompts: a window that moves round the list, which is shuffled anew for each round."""
        settings = self.params
        first = (max(ctx.tick, 1) - 1) * settings.prompts_per_tick
        chosen = [
            self._entry(position) for position in range(first, first + settings.prompts_per_tick)
        ]
        return self.Outputs(
            prompts=self._batch(chosen, settings.group_size),
            all_prompts=self._batch(self._entries, 1),
        )

    def _entry(self, position: int) -> Entry:
        """The entry at a position of the endless list of rounds."""
        turn, place = divmod(position, len(self._entries))
        if self.params.order == "shuffled":
            random = generator(self.params.seed, "Prompt List", "round", turn)
            place = int(torch.randperm(len(self._entries), generator=random)[place])
        return self._entries[place]

    def _batch(self, entries: list[Entry], group_size: int) -> PromptBatch:
        return PromptBatch(
            prompts=tuple(prompt for _, prompt in entries),
            metadata=tuple(metadata for metadata, _ in entries),
            group_size=group_size,
            negative_prompt=self.params.negative_prompt,
        )
