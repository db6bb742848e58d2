"""Scorers, and the cards that turn a scorer's verdict on a rollout into a reward."""

import logging
from dataclasses import replace
from typing import Annotated, NamedTuple

import torch

from app.graph import Field, Node, NoParams, Params, RunContext, default_of, params
from jagg.errors import JaggError, ShapeError, StaleRolloutError
from jagg.values import Reward, RewardComponent, Rollout, Scorer, ScoreRequest
from nodes.backends import redness, shape_check, shape_margin
from nodes.backends.scoring import score_each
from nodes.backends.shape_margin import ShapeMargin

_log = logging.getLogger(__name__)


@params
class ShapeMarginScorerParams(Params):
    """What the reward pays and fines."""

    colour_margin: Annotated[
        bool,
        Field(
            advanced=True,
            tooltip="Pay the geometric mean of the shape's and the colour's margin, not the shape's alone.",
        ),
    ] = default_of(ShapeMargin, "colour_margin")
    texture_weight: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=100.0,
            step=0.1,
            tooltip="Fine for paint outside the prompted colours.",
        ),
    ] = default_of(ShapeMargin, "texture_weight")


class ScorerOutputs(NamedTuple):
    """The scorer."""

    scorer: Scorer


class ShapeMarginScorer(Node[ShapeMarginScorerParams]):
    """Scores by rendering: is the prompted shape the best fit, well drawn, clean, and in its colours?"""

    type = "ShapeMarginScorer"
    version = 1
    title = "Shape Margin Scorer"
    category = "rewards"
    description = (
        "Fits rendered templates of every shape to the picture: pays the margin of the prompted one, its fit, and fines texture. "
        "Meant for training; report Shape Check beside it."
    )
    aliases = ("reward", "verifier", "shapes")
    Outputs = ScorerOutputs

    def run(self, ctx: RunContext) -> ScorerOutputs:  # noqa: ARG002  the context is part of every card's method
        """Build the scorer."""
        settings = ShapeMargin(
            colour_margin=self.params.colour_margin, texture_weight=self.params.texture_weight
        )
        return ScorerOutputs(scorer=shape_margin.scorer(settings))


class ShapeCheckScorer(Node[NoParams]):
    """Checks shape, colour, background, place and size with small networks trained apart from the reward."""

    type = "ShapeCheckScorer"
    version = 1
    title = "Shape Check Scorer"
    category = "rewards"
    description = (
        "Independent hold-out scorer: segments the picture, classifies each shape by a small CNN (and, reported beside it, by its contour), "
        "and calls it right only if everything is right."
    )
    aliases = ("evaluator", "hold-out", "classifier", "shapes")
    Outputs = ScorerOutputs

    def run(self, ctx: RunContext) -> ScorerOutputs:  # noqa: ARG002
        """Load the scorer's weights."""
        return ScorerOutputs(scorer=shape_check.scorer())


class RednessScorer(Node[NoParams]):
    """Pays for red pictures, whatever the prompt: a reward made to be hacked."""

    type = "RednessScorer"
    version = 1
    title = "Redness Scorer"
    category = "rewards"
    description = "R - (G + B)/2 averaged over the picture. Ignores the prompt on purpose: watch the hold-out scorer fall."
    aliases = ("red", "colour", "hacking")
    Outputs = ScorerOutputs

    def run(self, ctx: RunContext) -> ScorerOutputs:  # noqa: ARG002
        """Build the scorer."""
        return ScorerOutputs(scorer=redness.scorer())


@params
class ScoreParams(Params):
    """How much this scorer counts where several are mixed."""

    weight: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=1000.0,
            step=0.1,
            tooltip="Weight in a Reward Mix; 0 reports the scorer without training on it.",
        ),
    ] = 1.0


class Score(Node[ScoreParams]):
    """Scores every image of a rollout."""

    type = "Score"
    version = 1
    title = "Score"
    category = "rewards"
    description = "Decodes a rollout group by group and lets a scorer judge each image."
    aliases = ("reward model", "judge")

    class Outputs(NamedTuple):
        """One reward component."""

        reward: Reward

    def run(self, ctx: RunContext, *, scorer: Scorer, rollout: Rollout) -> Outputs:
        """Score group by group; a sample that cannot be scored is NaN."""
        prompts, size = rollout.prompts, rollout.prompts.group_size
        texts, metadata = prompts.sample_prompts(), prompts.sample_metadata()
        results = []
        for p in range(len(prompts.prompts)):
            chosen = slice(p * size, (p + 1) * size)
            results.append(
                score_each(
                    scorer,
                    ScoreRequest(
                        images=rollout.images(p), prompts=texts[chosen], metadata=metadata[chosen]
                    ),
                )
            )
            ctx.progress(p + 1, len(prompts.prompts))
        unscored = torch.full((size,), torch.nan)
        component = RewardComponent(
            name=scorer.name,
            weight=self.params.weight,
            values=torch.cat([r.values for r in results]),
            raw=torch.cat([r.raw for r in results]),
            parts={
                name: torch.cat([r.parts.get(name, unscored) for r in results])
                for name in sorted({name for r in results for name in r.parts})
            },
            notes=tuple(note for r in results for note in r.notes or [""] * size)
            if any(r.notes for r in results)
            else (),
        )
        blank = component.values.isnan()
        if blank.any():
            first = int(blank.nonzero()[0])
            reason = component.notes[first] if component.notes else "the scorer gave no reason"
            _log.warning(
                "Score (%s) at tick %d: %d of %d samples not scored by %s; the first: %s.",
                ctx.node,
                ctx.tick,
                int(blank.sum()),
                len(blank),
                scorer.name,
                reason,
            )
        ctx.metric(f"reward/{scorer.name}/mean", float(component.values.nanmean()))
        for name, part in component.parts.items():
            ctx.metric(f"reward/{scorer.name}/{name}", float(part.nanmean()))
        return self.Outputs(reward=Reward(rollout_id=rollout.id, components=(component,)))


@params
class RewardMixParams(Params):
    """Weights of the inputs, multiplied with those that the Score cards give."""

    weight_1: Annotated[
        float, Field(minimum=0.0, maximum=1000.0, step=0.1, tooltip="Weight of `reward_1`.")
    ] = 1.0
    weight_2: Annotated[
        float, Field(minimum=0.0, maximum=1000.0, step=0.1, tooltip="Weight of `reward_2`.")
    ] = 1.0
    weight_3: Annotated[
        float, Field(minimum=0.0, maximum=1000.0, step=0.1, tooltip="Weight of `reward_3`.")
    ] = 1.0
    weight_4: Annotated[
        float, Field(minimum=0.0, maximum=1000.0, step=0.1, tooltip="Weight of `reward_4`.")
    ] = 1.0


class RewardMix(Node[RewardMixParams]):
    """Joins rewards of the same rollout into one; the optimizer takes their weighted mean."""

    type = "RewardMix"
    version = 1
    title = "Reward Mix"
    category = "rewards"
    description = (
        "Joins up to four rewards of one rollout. The optimizer trains on sum(w·r) / sum(w)."
    )
    aliases = ("aggregate", "combine", "weighted")

    class Outputs(NamedTuple):
        """The joined reward."""

        reward: Reward

    def run(
        self,
        ctx: RunContext,  # noqa: ARG002
        *,
        reward_1: Reward,
        reward_2: Reward | None = None,
        reward_3: Reward | None = None,
        reward_4: Reward | None = None,
    ) -> Outputs:
        """Join the components, refusing rewards of different rollouts and two of one name.

        Raises:
            StaleRolloutError: the rewards score different rollouts.
            JaggError: two components have the same name, or every weight is 0.
        """
        settings = self.params
        inputs = (
            (reward_1, settings.weight_1),
            (reward_2, settings.weight_2),
            (reward_3, settings.weight_3),
            (reward_4, settings.weight_4),
        )
        components: list[RewardComponent] = []
        for number, (reward, weight) in enumerate(inputs, start=1):
            if reward is None:
                continue
            if reward.rollout_id != reward_1.rollout_id:
                msg = (
                    f"Reward Mix: `reward_{number}` scores rollout {reward.rollout_id!r}, `reward_1` scores "
                    f"{reward_1.rollout_id!r}. Link only rewards of one sampler."
                )
                raise StaleRolloutError(msg)
            if len(reward) != len(reward_1):
                msg = f"Reward Mix: `reward_{number}` has {len(reward)} values, `reward_1` has {len(reward_1)}."
                raise ShapeError(msg)
            components.extend(replace(c, weight=c.weight * weight) for c in reward.components)
        names = [c.name for c in components]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            msg = f"Reward Mix: {', '.join(twice)} is given twice. Link each scorer's reward once and set its weight instead."
            raise JaggError(msg)
        if not any(c.weight for c in components):
            msg = "Reward Mix: every weight is 0, so there is nothing to train on. Give at least one reward a weight above 0."
            raise JaggError(msg)
        return self.Outputs(
            reward=Reward(rollout_id=reward_1.rollout_id, components=tuple(components))
        )
