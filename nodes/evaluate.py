"""Evaluation on fixed prompts and fixed noise, so that only the weights differ between two points of a curve."""

from typing import Annotated, Any, Literal, NamedTuple

from torch import Tensor

from app.graph import Field, Node, Params, RunContext, params
from jagg.errors import JaggError
from jagg.policy import Policy
from jagg.randomness import generator
from jagg.rollout import sample_ode
from jagg.schedule import sigma_schedule
from jagg.values import PromptBatch, Samples, Scorer, ScoreRequest, UpdateStats
from nodes.backends import sheets
from nodes.backends.scoring import score_each


@params
class EvaluateParams(Params):
    """When and how to evaluate."""

    every: Annotated[
        int,
        Field(
            minimum=1,
            maximum=1_000_000,
            tooltip="Evaluate on multiples of this tick and on the last one; without `baseline` on tick 1 too.",
        ),
    ] = 50
    baseline: Annotated[bool, Field(tooltip="Also evaluate at tick 0, before training.")] = True
    images_per_prompt: Annotated[
        int, Field(minimum=1, maximum=64, tooltip="Noise seeds per prompt.")
    ] = 2
    steps: Annotated[int, Field(minimum=1, maximum=1000, tooltip="Denoising steps (Euler).")] = 16
    shift: Annotated[
        float,
        Field(minimum=0.01, maximum=100.0, step=0.1, tooltip="Timestep shift of the schedule."),
    ] = 3.0
    guidance_scale: Annotated[
        float,
        Field(minimum=0.0, maximum=50.0, step=0.1, tooltip="Classifier-free guidance; 1 is none."),
    ] = 1.0
    weights: Annotated[
        Literal["raw", "ema"],
        Field(tooltip="The weights as trained, or their running average."),
    ] = "raw"
    micro_batch: Annotated[
        int, Field(minimum=1, maximum=65536, advanced=True, tooltip="Samples per forward.")
    ] = 64
    noise_seed: Annotated[
        int,
        Field(
            minimum=0,
            maximum=2**31 - 1,
            advanced=True,
            tooltip="Seed of the noise; the same at every evaluation and for every run seed.",
        ),
    ] = 0
    shown: Annotated[
        int,
        Field(minimum=1, maximum=256, advanced=True, tooltip="Prompts shown in the sample sheet."),
    ] = 32


class Evaluate(Node[EvaluateParams]):
    """Samples fixed prompts from fixed noise and reports the mean of up to three scorers."""

    type = "Evaluate"
    version = 1
    title = "Evaluate"
    category = "evaluation"
    description = (
        "Draws the same prompts from the same noise each time, without noise in the steps, and reports what the scorers say. "
        "Use prompts and a scorer that training does not see."
    )
    aliases = ("validation", "hold-out", "benchmark")
    output = True

    class Outputs(NamedTuple):
        """The images, and the means by scorer."""

        samples: Samples
        stats: UpdateStats

    def open(self, ctx: RunContext) -> None:  # noqa: ARG002
        """Start without a picture to compare with."""
        self._before: Tensor | None = None
        self._before_marks: Tensor | None = None

    def state(self) -> dict[str, Any]:
        """The first evaluation's pictures, so that a resumed run compares with the same."""
        return {"before": self._before, "before_marks": self._before_marks}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._before, self._before_marks = state["before"], state["before_marks"]

    def run(
        self,
        ctx: RunContext,
        *,
        policy: Policy,
        prompts: PromptBatch,
        scorer: Scorer,
        scorer_2: Scorer | None = None,
        scorer_3: Scorer | None = None,
    ) -> Outputs:
        """Sample, score, report `eval/<scorer>/mean` and the scorer's parts, and write the sample sheets.

        Raises:
            JaggError: two scorers have one name, so that their metrics could not be told apart.
        """
        settings = self.params
        judges = [judge for judge in (scorer, scorer_2, scorer_3) if judge is not None]
        names = [judge.name for judge in judges]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            msg = f"Evaluate: scorer {', '.join(twice)} is linked twice. Link each scorer once; put a second one on a card of its own."
            raise JaggError(msg)
        batch = PromptBatch(
            prompts=prompts.prompts,
            group_size=settings.images_per_prompt,
            metadata=prompts.metadata,
            negative_prompt=prompts.negative_prompt,
        )
        # Before training there is no average yet; it would be the weights as they are.
        untrained = ctx.tick == 0 and policy.ema is None
        with policy.weights("raw" if untrained else settings.weights):
            samples = sample_ode(
                policy,
                batch,
                id=f"{ctx.node}:{ctx.tick}",
                sigmas=sigma_schedule(settings.steps, shift=settings.shift),
                guidance_scale=settings.guidance_scale,
                micro_batch=settings.micro_batch,
                generator=lambda name, index: generator(
                    settings.noise_seed, "evaluate", name, *index
                ),
                on_step=ctx.progress,
            )
        request = ScoreRequest(
            images=samples.images, prompts=batch.sample_prompts(), metadata=batch.sample_metadata()
        )
        values: dict[str, float] = {}
        marks: Tensor | None = None
        for judge in judges:
            result = score_each(judge, request)
            marks = result.values
            values[f"eval/{judge.name}/mean"] = float(result.values.nanmean())
            values[f"eval/{judge.name}/not_scored"] = float(result.values.isnan().float().mean())
            for name, part in result.parts.items():
                values[f"eval/{judge.name}/{name}"] = float(part.nanmean())
            ctx.check_cancelled()
        for name, value in values.items():
            ctx.metric(name, value)
        self._write_sheets(ctx, samples, marks)
        return self.Outputs(samples=samples, stats=UpdateStats(values=values))

    def _write_sheets(self, ctx: RunContext, samples: Samples, marks: Tensor | None) -> None:
        """Write this evaluation's grid, and beside the first one's from the second on; framed by the last scorer."""
        count, size = self.params.shown, samples.prompts.group_size
        shown = samples.images[::size][:count].detach().cpu()
        shown_marks = None if marks is None else marks[::size][:count].detach().cpu()
        captions = samples.prompts.prompts[:count]
        now = sheets.grid(shown, captions, _floats(shown_marks))
        sheets.save_sheet(
            now,
            ctx.artefact(f"samples/tick-{ctx.tick:06d}/{sheets.file_name(ctx.node)}-evaluate.png"),
            ctx.metadata(),
        )
        if self._before is None:
            self._before, self._before_marks = shown, shown_marks
            return
        before = sheets.grid(self._before, captions, _floats(self._before_marks))
        both = sheets.side_by_side(before, now, ("before", f"after tick {ctx.tick}"))
        sheets.save_sheet(both, ctx.artefact("samples/before_after.png"), ctx.metadata())


def _floats(marks: Tensor | None) -> list[float] | None:
    return None if marks is None else [float(m) for m in marks]
