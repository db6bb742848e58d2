"""The GRPO update: rewards of a rollout in, one or more optimizer steps out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from jagg.advantages import Normalise, group_advantages, shuffled_advantages
from jagg.ema import Ema
from jagg.errors import JaggError, NonFiniteError, StaleRolloutError
from jagg.gradients import (
    Backward,
    ExactGradient,
    GradientEstimator,
    JaggGradient,
    NodePlan,
    Objective,
    Tally,
    accumulate,
    forwards_needed,
    node_velocities,
)
from jagg.losses import KL_FORMS, KlForm, clip_from_nats
from jagg.policy import Policy
from jagg.randomness import GeneratorFactory
from jagg.rollout import OnStep, device_of
from jagg.transitions import Transition
from jagg.values import Reward, Rollout, UpdateStats

LOWER_PRECISION = (torch.bfloat16, torch.float16)
FULL_PRECISION_GUARD = 1e-4
"""Largest |v_stored - v| between a joint and a separate forward in float32; measured deviations are about 1e-6."""
LOWER_PRECISION_GUARD = 0.1
"""The same in half precision, where velocities of size 1 to 4 round by up to 0.016 per operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig:
    """How rewards become advantages, and advantages become steps."""

    normalise: Normalise = "global_std"
    """Scale of the centred rewards: std of the group, std of all samples, or none."""
    advantage_epsilon: float = 1e-4
    """Added to the standard deviation."""
    advantage_clamp: float = 5.0
    """Bound of |advantage| after scaling."""
    advantage_control: Literal["none", "shuffle"] = "none"
    """`shuffle` permutes advantages inside each prompt group: a control run that must not learn."""
    clip_nats: float = 6.6
    """Clip range of Flow-SDE and Dance-SDE in nats of the whole sample; divided by the latent size D for use. 6.6 is the
    1e-4 of the literature at D = 65,536."""
    clip_native: float = 1e-4
    """Clip range of CPS, in its own unit (mean squared residual): its ratio is not a likelihood ratio, so nats do not apply."""
    kl_weight: float = 0.0
    """Weight beta of the KL term to the reference weights; 0 makes no reference forwards."""
    kl_form: KlForm = "exact"
    """`exact` Gaussian KL, `flow_grpo` (divided by std_dev² without |dt|), or `x` (plain mean square of means)."""
    inner_epochs: int = 1
    """How often the rollout is gone through; only the very first optimizer step is on-policy."""
    accumulation: int = 0
    """Micro-batches per optimizer step; 0 = all micro-batches of the rollout."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm; 0 = never."""
    max_nan_fraction: float = 0.5
    """Largest share of samples without a finite reward; above it the update refuses."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            JaggError: a value is outside its range.
        """
        for name in ("advantage_clamp", "clip_nats", "clip_native"):
            if not getattr(self, name) > 0:
                msg = f"GrpoConfig: `{name}` is {getattr(self, name)}, expected a number above 0."
                raise JaggError(msg)
        for name in ("advantage_epsilon", "kl_weight", "max_grad_norm", "accumulation"):
            if not getattr(self, name) >= 0:
                msg = f"GrpoConfig: `{name}` is {getattr(self, name)}, expected 0 or more."
                raise JaggError(msg)
        if self.inner_epochs < 1:
            msg = f"GrpoConfig: `inner_epochs` is {self.inner_epochs}, expected 1 or more."
            raise JaggError(msg)
        if not 0 <= self.max_nan_fraction <= 1:
            msg = f"GrpoConfig: `max_nan_fraction` is {self.max_nan_fraction}, expected a share between 0 and 1."
            raise JaggError(msg)
        _check_choice("kl_form", self.kl_form, KL_FORMS)
        _check_choice("advantage_control", self.advantage_control, ("none", "shuffle"))

    def clip(self, transition: Transition, elements: int) -> float:
        """The clip range of the ratio in units of the mean log-prob, for latents of `elements` elements."""
        return (
            self.clip_native
            if transition.kind == "cps"
            else clip_from_nats(self.clip_nats, elements)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JaggConfig:
    """How the gradient is estimated."""

    estimator: Literal["exact", "windows"] = "windows"
    """`exact`: a backward pass per trained step; `windows`: two per window (JAGG)."""
    window: int = 4
    """Consecutive trained steps per window; 2 or less is exact."""
    jagg_frac: float = 1.0
    """Share of windows that are aggregated, those with the most parallel velocities first; the others are exact."""
    node_chunk: int = 0
    """Steps that share one forward and backward in `windows`; 0 = all. Less saves memory and costs speed."""
    guard_tolerance: float = 0.0
    """Largest |v_stored - v_recomputed| at which the rollout's velocities are trusted; 0 = by precision (1e-4 in float32,
    0.1 below)."""

    def __post_init__(self) -> None:
        """Check the choice and ranges.

        Raises:
            JaggError: an unknown estimator, or a value outside its range.
        """
        _check_choice("estimator", self.estimator, ("exact", "windows"))
        JaggGradient(window=self.window, jagg_frac=self.jagg_frac, node_chunk=self.node_chunk)
        if not self.guard_tolerance >= 0:
            msg = f"JaggConfig: `guard_tolerance` is {self.guard_tolerance}, expected 0 or more."
            raise JaggError(msg)

    def build(self) -> GradientEstimator:
        """The estimator; the exact one always forwards step by step."""
        if self.estimator == "exact":
            return ExactGradient()
        return JaggGradient(
            window=self.window, jagg_frac=self.jagg_frac, node_chunk=self.node_chunk
        )


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        msg = f"`{name}` is {value!r}. Choices are {', '.join(choices)}."
        raise JaggError(msg)


def lower_precision(policy: Policy) -> bool:
    """Whether forwards compute below float32: by the executor's autocast, by one around this call, or by stored weights."""
    if policy.compute_dtype in LOWER_PRECISION or torch.is_autocast_enabled(device_of(policy).type):
        return True
    return any(p.dtype in LOWER_PRECISION for p in policy.module.parameters())


def torch_backward(velocity: Tensor, gradient: Tensor) -> None:
    """The default `Backward`: torch's own."""
    torch.autograd.backward(velocity, gradient)


class _Progress:
    """Counts forwards and tells `on_step`."""

    def __init__(self, on_step: OnStep | None) -> None:
        self.done = 0
        self.total = 0
        self._on_step = on_step

    def forward(self) -> None:
        self.done += 1
        if self._on_step is not None:
            self._on_step(self.done, max(self.done, self.total))


def reference_velocities(
    policy: Policy, objective: Objective, on_forward: Callable[[], None]
) -> Tensor:
    """Velocities of the reference weights at every trained step; shape (T, N, *latent)."""
    result = torch.empty_like(objective.rollout.velocities)
    with torch.no_grad(), policy.weights("reference"):
        for start, stop in objective.rollout.micro_batches:
            for step in range(objective.rollout.trained_steps):
                result[step, start:stop] = node_velocities(policy, objective, [step], start, stop)[
                    0
                ]
                on_forward()
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """What the rewards say, ready for the loss. Shape: values and weights (N,), on the rollout's device."""

    values: Tensor
    weights: Tensor
    all_zero: bool
    nan_fraction: float
    zero_fraction: float


def advantages_of(
    rollout: Rollout, reward: Reward, *, config: GrpoConfig, generator: GeneratorFactory
) -> Advantages:
    """Advantages of a reward, with weight 0 for samples that have none.

    Raises:
        StaleRolloutError: the reward belongs to another rollout.
        NonFiniteError: no reward is finite, or more than `max_nan_fraction` are not.
    """
    reward.check_belongs_to(rollout)
    totals = reward.total().detach().cpu()
    missing = int((~totals.isfinite()).sum())
    if missing == len(totals) or missing > config.max_nan_fraction * len(totals):
        msg = (
            f"Optimizer: {missing} of {len(totals)} samples have no finite reward, expected at most "
            f"{config.max_nan_fraction:.0%} (`max_nan_fraction`).{_reason(reward)}"
        )
        raise NonFiniteError(msg)
    group = rollout.prompts.group()
    values = group_advantages(
        totals,
        group,
        normalise=config.normalise,
        epsilon=config.advantage_epsilon,
        clamp=config.advantage_clamp,
    )
    scored = totals.isfinite()
    if config.advantage_control == "shuffle":
        generators = {p: generator("shuffle", (p,)) for p in range(len(rollout.prompts.prompts))}
        values[scored] = shuffled_advantages(values[scored], group[scored], generators)
    device = rollout.latents.device
    zeros = int((values == 0).sum())
    return Advantages(
        values=values.to(device=device, dtype=rollout.log_probs.dtype),
        weights=scored.to(device=device, dtype=rollout.log_probs.dtype),
        all_zero=zeros == len(totals),
        nan_fraction=missing / len(totals),
        zero_fraction=zeros / len(totals),
    )


def _reason(reward: Reward) -> str:
    """Why the first sample without a reward has none, as its scorer noted it; a sentence with a space before it, or nothing."""
    for component in reward.components:
        for sample, note in enumerate(component.notes):
            if note and component.weight != 0 and not component.values[sample].isfinite():
                return f" The first one, by {component.name}: {note}."
    return " The scorers gave no reason."


def objective_of(rollout: Rollout, advantages: Advantages, *, config: GrpoConfig) -> Objective:
    """The loss of an update that takes one optimizer step over the whole rollout, without reference velocities."""
    return Objective(
        rollout=rollout,
        advantages=advantages.values,
        weights=advantages.weights,
        clip=config.clip(rollout.transition, rollout.latents[0, 0].numel()),
        kl_weight=config.kl_weight,
        kl_form=config.kl_form,
        reference=None,
        samples=len(rollout),
    )


def grpo_update(
    policy: Policy,
    rollout: Rollout,
    reward: Reward,
    *,
    config: GrpoConfig,
    jagg: JaggConfig,
    optimizer: torch.optim.Optimizer,
    generator: GeneratorFactory,
    on_step: OnStep | None,
    backward: Backward | None = None,
    reduce: Callable[[Sequence[Tensor]], None] | None = None,
    ema: Ema | None = None,
) -> UpdateStats:
    """Train the policy on one rollout; its version rises by one per optimizer step.

    Micro-batches follow the rollout's. The first optimizer step is on-policy: signals come from the stored velocities,
    and if the nodes' own velocities deviate from those by more than the guard allows, the step is done again with real
    forwards and reported as `jagg/fallback`. If every advantage is 0 and there is no KL term, no optimizer step is taken
    at all (momentum would move the weights), and `update/skipped` is 1. `backward` and `reduce` are the executor's:
    `reduce` gets the gradients once per optimizer step, before clipping, and sums or averages them in place. `generator`
    is asked for ("shuffle", (prompt,)) by the shuffle control alone.

    Raises:
        StaleRolloutError: the weights are not those of the rollout, or the reward scores another rollout.
        NonFiniteError: too many rewards or any gradient are not finite; the weights are as before.
    """
    if policy.version != rollout.policy_version:
        msg = (
            f"Optimizer: the rollout was drawn at policy version {rollout.policy_version}, but the policy is at "
            f"{policy.version}. Sample anew after every update."
        )
        raise StaleRolloutError(msg)
    advantages = advantages_of(rollout, reward, config=config, generator=generator)
    objective = objective_of(rollout, advantages, config=config)
    estimator = jagg.build()
    plan = estimator.plan(rollout)
    run = _Update(
        policy=policy,
        plan=plan,
        node_chunk=estimator.node_chunk,
        config=config,
        tolerance=jagg.guard_tolerance
        or (LOWER_PRECISION_GUARD if lower_precision(policy) else FULL_PRECISION_GUARD),
        optimizer=optimizer,
        backward=backward or torch_backward,
        reduce=reduce,
        ema=ema,
        progress=_Progress(on_step),
        tally=Tally(rollout.latents.device),
    )
    if not advantages.all_zero or config.kl_weight > 0 or reduce is not None:
        try:
            run.train(objective)
        finally:
            # A cancelled or refused update leaves no half-made gradient behind.
            optimizer.zero_grad(set_to_none=True)
    return UpdateStats(values={**run.statistics(), **_advantage_statistics(advantages)})


def _advantage_statistics(advantages: Advantages) -> dict[str, float]:
    return {
        "advantage/zero_fraction": advantages.zero_fraction,
        "reward/nan_fraction": advantages.nan_fraction,
    }


@dataclass(kw_only=True, slots=True)
class _Update:
    """The state of one `grpo_update`."""

    policy: Policy
    plan: NodePlan
    node_chunk: int
    config: GrpoConfig
    tolerance: float
    optimizer: torch.optim.Optimizer
    backward: Backward
    reduce: Callable[[Sequence[Tensor]], None] | None
    ema: Ema | None
    progress: _Progress
    tally: Tally
    steps: int = 0
    fallbacks: int = 0
    norm: float = 0.0

    def train(self, objective: Objective) -> None:
        """All optimizer steps."""
        spans = objective.rollout.micro_batches
        size = self.config.accumulation or len(spans)
        groups = [
            spans[i : i + size] for i in range(0, len(spans), size)
        ] * self.config.inner_epochs
        on_policy = forwards_needed(self.plan, self.node_chunk, on_policy=True)
        off_policy = forwards_needed(self.plan, self.node_chunk, on_policy=False)
        self.progress.total = sum(len(group) * off_policy for group in groups) - len(groups[0]) * (
            off_policy - on_policy
        )
        if self.config.kl_weight > 0:
            self.progress.total += len(spans) * objective.rollout.trained_steps
            reference = reference_velocities(self.policy, objective, self.progress.forward)
            objective = _with(objective, reference=reference)
        for group in groups:
            samples = sum(stop - start for start, stop in group)
            self._optimizer_step(_with(objective, samples=samples), group)

    def _optimizer_step(self, objective: Objective, group: Sequence[tuple[int, int]]) -> None:
        trainable = self.policy.trainable()
        fresh = self.policy.version == objective.rollout.policy_version
        tally = self._gradient(objective, group, on_policy=fresh)
        # The guard is read once per optimizer step: asking at every node would make the device wait.
        if fresh and not float(tally.velocity_error) <= self.tolerance:
            self.fallbacks += 1
            error = tally.velocity_error
            tally = self._gradient(objective, group, on_policy=False)
            tally.velocity_error = error
        self._merge(tally)
        gradients = [p.grad for p in trainable.values() if p.grad is not None]
        if self.reduce is not None:
            self.reduce(gradients)
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if not math.isfinite(norm):
            msg = (
                f"Optimizer: the gradient norm is {norm}, expected a finite number; the weights were left as they were. "
                "Lower the learning rate, or check rewards and precision."
            )
            raise NonFiniteError(msg)
        self.norm = max(self.norm, norm)
        if norm == 0:
            return
        if 0 < self.config.max_grad_norm < norm:
            for gradient in gradients:
                gradient.mul_(self.config.max_grad_norm / norm)
        self.optimizer.step()
        self.policy.version += 1
        self.steps += 1
        if self.ema is not None:
            self.ema.update(self.policy)

    def _gradient(
        self, objective: Objective, group: Sequence[tuple[int, int]], *, on_policy: bool
    ) -> Tally:
        self.optimizer.zero_grad(set_to_none=True)
        tally = Tally(objective.rollout.latents.device)
        for span in group:
            accumulate(
                self.policy,
                objective,
                self.plan,
                span=span,
                node_chunk=self.node_chunk,
                on_policy=on_policy,
                backward=self.backward,
                tally=tally,
                on_forward=self.progress.forward,
            )
        return tally

    def _merge(self, tally: Tally) -> None:
        total = self.tally
        total.policy = total.policy + tally.policy
        total.kl = total.kl + tally.kl
        total.clipped = total.clipped + tally.clipped
        total.scored = total.scored + tally.scored
        total.max_log_ratio = torch.maximum(total.max_log_ratio, tally.max_log_ratio)
        total.see_velocity_error(tally.velocity_error)
        total.node_forwards += tally.node_forwards

    def statistics(self) -> dict[str, float]:
        """The metrics of the update; means are over samples and steps that take part."""
        tally = self.tally
        scored = max(float(tally.scored), 1.0)
        return {
            "loss/policy": float(tally.policy) / scored,
            "ratio/max_abs_log": float(tally.max_log_ratio),
            "clip/fraction": float(tally.clipped) / scored,
            "kl": float(tally.kl) / scored,
            "grad/norm": self.norm,
            "jagg/fraction": self.plan.fraction,
            "jagg/nodes": float(len(self.plan.nodes)),
            "jagg/velocity_error": float(tally.velocity_error),
            "jagg/fallback": float(self.fallbacks),
            "update/forwards": float(self.progress.done),
            "update/optimizer_steps": float(self.steps),
            "update/skipped": float(self.steps == 0),
        }


def _with(
    objective: Objective, *, reference: Tensor | None = None, samples: int | None = None
) -> Objective:
    return replace(
        objective,
        reference=objective.reference if reference is None else reference,
        samples=objective.samples if samples is None else samples,
    )
