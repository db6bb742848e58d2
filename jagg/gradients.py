"""Gradient estimators: exact, or with the Jacobians of a window interpolated between its two ends (JAGG).

All upstream signals g_i = dL/dv_i are kept and exact; only Jacobians are approximated. With node steps kappa_m and
weights w_im the gradient is sum over m of J_{kappa_m}^T · sum over i of w_im·g_i. A step that is a node has a unit row,
so that "every step a node" is the exact gradient, by the same code. Source: arXiv 2607.17572 (abstract) and the
project's own reconstruction of it; weights are linear in sigma, never in the step index.

Axes: T trained steps, K nodes, N samples of one micro-batch; `*latent` is the shape of one sample's latent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from jagg.errors import JaggError
from jagg.losses import KlForm, Signal, StepTerms, log_ratio, upstream_signal
from jagg.policy import Policy
from jagg.rollout import slice_conditioning
from jagg.transitions import StepCoefficients
from jagg.values import Conditioning, Rollout

Backward = Callable[[Tensor, Tensor], None]
"""(velocity, gradient) of equal shape: adds the gradient of the scalar (velocity · gradient).sum() to the parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """Which steps get a backward pass, and how every step's signal is spread over them."""

    nodes: tuple[int, ...]
    """Node steps, ascending, counted from the first trained step."""
    rows: tuple[tuple[tuple[int, float], ...], ...]
    """For every trained step, its (node number, weight) pairs; a node's own row is ((m, 1.0),)."""
    fraction: float = 0.0
    """Share of the windows of 3 or more steps whose interior is interpolated."""

    @property
    def interior(self) -> tuple[int, ...]:
        """Steps without a backward pass of their own."""
        nodes = set(self.nodes)
        return tuple(step for step in range(len(self.rows)) if step not in nodes)

    def weight_matrix(self) -> Tensor:
        """The weights as a matrix; shape (T, K), float64."""
        result = torch.zeros(len(self.rows), len(self.nodes), dtype=torch.float64)
        for step, row in enumerate(self.rows):
            for node, weight in row:
                result[step, node] = weight
        return result


def windows_of(steps: int, window: int) -> list[tuple[int, int]]:
    """First and last step of each run of `window` consecutive steps; the last run may be shorter."""
    return [(first, min(first + window, steps) - 1) for first in range(0, steps, window)]


def window_plan(sigmas: Sequence[float], window: int, aggregated: Sequence[bool]) -> NodePlan:
    """The plan of one node at each end of an aggregated window and one at every other step.

    `sigmas` are the levels fed to the model at the T trained steps; `aggregated` holds one flag per window of
    `windows_of`. Windows of one or two steps are exact either way.
    """
    spans = windows_of(len(sigmas), window)
    nodes: list[int] = []
    wide = chosen = 0
    for (first, last), flag in zip(spans, aggregated, strict=True):
        wide += last - first > 1
        chosen += flag and last - first > 1
        nodes.extend((first, last) if flag and last - first > 1 else range(first, last + 1))
    number = {step: m for m, step in enumerate(nodes)}
    rows: list[tuple[tuple[int, float], ...]] = []
    for first, last in spans:
        for step in range(first, last + 1):
            if step in number:
                rows.append(((number[step], 1.0),))
            else:
                alpha = (sigmas[step] - sigmas[first]) / (sigmas[last] - sigmas[first])
                rows.append(((number[first], 1 - alpha), (number[last], alpha)))
    return NodePlan(nodes=tuple(nodes), rows=tuple(rows), fraction=chosen / wide if wide else 0.0)


def velocity_cosines(velocities: Tensor) -> Tensor:
    """Batch mean of cos(v_i, v_{i+1}); shape (T, N, *latent) to (T-1,)."""
    flat_TND = velocities.flatten(2)
    return cosine_similarity(flat_TND[:-1], flat_TND[1:], dim=2).mean(1)


def route_windows(cosines: Sequence[float], steps: int, window: int, fraction: float) -> list[bool]:
    """Which windows to aggregate: the round(fraction · windows) whose consecutive velocities agree best.

    Only windows of 3 or more steps are counted and ranked: shorter ones are exact either way. A half rounds up; ties go
    to the earlier window.
    """
    spans = windows_of(steps, window)
    wide = [w for w, (first, last) in enumerate(spans) if last - first > 1]
    score = {w: sum(cosines[spans[w][0] : spans[w][1]]) / (spans[w][1] - spans[w][0]) for w in wide}
    best = sorted(wide, key=lambda w: (-score[w], w))[: math.floor(fraction * len(wide) + 0.5)]
    return [w in best for w in range(len(spans))]


def trained_sigmas(rollout: Rollout) -> list[float]:
    """The levels fed to the model at the trained steps, length T."""
    return [float(s) for s in rollout.sigmas[rollout.noise_start : rollout.noise_stop].tolist()]


class GradientEstimator(Protocol):
    """Chooses the nodes of an update; `accumulate` does the rest for every estimator alike."""

    @property
    def node_chunk(self) -> int:
        """Nodes that share one forward and backward; 0 = all."""
        ...

    def plan(self, rollout: Rollout) -> NodePlan:
        """Nodes and weights for the trained steps of this rollout."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactGradient:
    """The full gradient: one backward pass per trained step."""

    node_chunk: int = 1

    def plan(self, rollout: Rollout) -> NodePlan:
        """Every step a node."""
        return window_plan(trained_sigmas(rollout), 1, [False] * rollout.trained_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class JaggGradient:
    """Two backward passes per window of `window` consecutive steps.

    `jagg_frac` is the share of windows that are aggregated, those with the most parallel consecutive velocities first;
    the others are exact. The choice is one per update, from the batch mean, so that it does not depend on micro-batches.
    """

    window: int
    jagg_frac: float
    node_chunk: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            JaggError: a window below 1, a fraction outside [0, 1], or a negative chunk.
        """
        if self.window < 1:
            msg = f"JaggGradient: `window` is {self.window}, expected 1 or more."
            raise JaggError(msg)
        if not 0 <= self.jagg_frac <= 1:
            msg = (
                f"JaggGradient: `jagg_frac` is {self.jagg_frac}, expected a share between 0 and 1."
            )
            raise JaggError(msg)
        if self.node_chunk < 0:
            msg = f"JaggGradient: `node_chunk` is {self.node_chunk}, expected 0 (all nodes together) or more."
            raise JaggError(msg)

    def plan(self, rollout: Rollout) -> NodePlan:
        """Window ends, and every step of the windows that are not aggregated."""
        steps = rollout.trained_steps
        spans = windows_of(steps, self.window)
        if self.jagg_frac in (0, 1):
            aggregated = [self.jagg_frac == 1] * len(spans)
        else:
            cosines = velocity_cosines(rollout.velocities).tolist()
            aggregated = route_windows(cosines, steps, self.window, self.jagg_frac)
        return window_plan(trained_sigmas(rollout), self.window, aggregated)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss of one optimizer step over a rollout.

    Shape: advantages and weights (N,) over all samples of the rollout; reference (T, N, *latent).
    """

    rollout: Rollout
    advantages: Tensor
    weights: Tensor
    clip: float
    kl_weight: float
    kl_form: KlForm
    reference: Tensor | None
    samples: int
    """Samples of the optimizer step, those of weight 0 included."""
    levels: tuple[float, ...] = field(init=False)
    coefficients: tuple[StepCoefficients, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Look the schedule up once, so that no step waits for the device."""
        levels = tuple(float(s) for s in self.rollout.sigmas.tolist())
        numbers = tuple(
            self.rollout.transition.coefficients(levels[i], levels[i + 1], levels[1])
            for i in range(self.rollout.noise_start, self.rollout.noise_stop)
        )
        object.__setattr__(
            self, "levels", levels[self.rollout.noise_start : self.rollout.noise_stop]
        )
        object.__setattr__(self, "coefficients", numbers)

    def terms(self, step: int, start: int, stop: int) -> StepTerms:
        """What the loss of samples start..stop at trained step `step` needs besides the velocity."""
        rollout = self.rollout
        return StepTerms(
            latents=rollout.latents[step, start:stop],
            next_latents=rollout.latents[step + 1, start:stop],
            old_log_probs=rollout.log_probs[step, start:stop],
            advantages=self.advantages[start:stop],
            weights=self.weights[start:stop],
            kind=rollout.transition.kind,
            coefficients=self.coefficients[step],
            clip=self.clip,
            kl_weight=self.kl_weight,
            kl_form=self.kl_form,
            reference=None if self.reference is None else self.reference[step, start:stop],
            count=self.samples * rollout.trained_steps,
        )


class Tally:
    """Running sums of diagnostics, kept on the device so that nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        zero = torch.zeros((), device=device)
        self.policy = zero
        self.kl = zero
        self.clipped = zero
        self.scored = zero
        """Weighted number of (sample, step) pairs seen."""
        self.max_log_ratio = zero
        self.velocity_error = zero
        """max |v_stored - v_recomputed| over the nodes; NaN where one of them is."""
        self.node_forwards = 0
        """Forwards with grad, each of one micro-batch and up to `node_chunk` nodes."""

    def add(self, signal: Signal, weights: Tensor) -> None:
        """Count one step of one micro-batch."""
        self.policy = self.policy + (signal.policy * weights).sum()
        self.kl = self.kl + (signal.kl * weights).sum()
        self.clipped = self.clipped + (signal.clipped * weights).sum()
        self.scored = self.scored + weights.sum()
        self.see_log_ratio(signal.log_ratio, weights)

    def see_log_ratio(self, log_ratios: Tensor, weights: Tensor) -> None:
        """Keep the largest log-ratio of samples that take part."""
        seen = torch.where(weights > 0, log_ratios.abs(), torch.zeros_like(log_ratios)).amax()
        self.max_log_ratio = torch.maximum(self.max_log_ratio, seen)

    def see_velocity_error(self, error: Tensor) -> None:
        """Keep the largest deviation; a NaN stays."""
        self.velocity_error = torch.maximum(self.velocity_error, error)


def node_velocities(
    policy: Policy, objective: Objective, steps: Sequence[int], start: int, stop: int
) -> Tensor:
    """Velocities of samples start..stop at several trained steps in one forward; shape (len(steps), N, *latent)."""
    rollout = objective.rollout
    size = stop - start
    latents = torch.cat([rollout.latents[step, start:stop] for step in steps])
    sigma = torch.cat(
        [latents.new_full((size,), objective.levels[step], dtype=torch.float32) for step in steps]
    )
    conditional = _repeat(slice_conditioning(rollout.conditioning, start, stop), len(steps))
    empty = rollout.unconditional
    unconditional = (
        None if empty is None else _repeat(slice_conditioning(empty, start, stop), len(steps))
    )
    velocity = policy.guided_velocity(
        latents, sigma, conditional, unconditional, rollout.guidance_scale
    )
    return velocity.view(len(steps), size, *velocity.shape[1:])


def _repeat(conditioning: Conditioning, times: int) -> dict[str, Tensor]:
    return {name: torch.cat([tensor] * times) for name, tensor in conditioning.items()}


def _chunks(steps: Sequence[int], size: int) -> list[Sequence[int]]:
    return [
        steps[i : i + (size or len(steps))] for i in range(0, len(steps), size or len(steps) or 1)
    ]


def forwards_needed(plan: NodePlan, node_chunk: int, *, on_policy: bool) -> int:
    """How many forwards `accumulate` makes for one micro-batch."""
    interior = () if on_policy else plan.interior
    return len(_chunks(plan.nodes, node_chunk)) + len(_chunks(interior, node_chunk))


def accumulate(
    policy: Policy,
    objective: Objective,
    plan: NodePlan,
    *,
    span: tuple[int, int],
    node_chunk: int,
    on_policy: bool,
    backward: Backward,
    tally: Tally,
    on_forward: Callable[[], None],
    equalise: bool = False,
) -> None:
    """Add the gradient of one micro-batch to the parameters.

    `on_policy` states that the weights are still those of the rollout: every signal then comes in closed form from the
    stored velocities and only nodes are forwarded. Otherwise interior steps are forwarded without a graph, nodes use
    their own forward, and nothing is interpolated but Jacobians. The nodes' deviation from the stored velocities goes to
    `tally`, for the caller to judge. `equalise` divides each step's signal by its norm, for the probe.
    """
    start, stop = span
    sums: list[Tensor | None] = [None] * len(plan.nodes)

    def spread(step: int, velocity: Tensor) -> None:
        terms = objective.terms(step, start, stop)
        signal = upstream_signal(velocity, terms, on_policy=on_policy)
        tally.add(signal, terms.weights)
        gradient = signal.gradient
        if equalise:
            gradient = gradient / gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny)
        for node, weight in plan.rows[step]:
            part = gradient if weight == 1 else weight * gradient
            held = sums[node]
            sums[node] = part if held is None else held + part

    stored = objective.rollout.velocities
    if on_policy:
        for step in range(len(plan.rows)):
            spread(step, stored[step, start:stop])
    else:
        for steps in _chunks(plan.interior, node_chunk):
            with torch.no_grad():
                velocities = node_velocities(policy, objective, steps, start, stop)
            on_forward()
            for step, velocity in zip(steps, velocities, strict=True):
                spread(step, velocity)
    for numbers in _chunks(range(len(plan.nodes)), node_chunk):
        steps = [plan.nodes[m] for m in numbers]
        velocities = node_velocities(policy, objective, steps, start, stop)
        tally.node_forwards += 1
        on_forward()
        for step, velocity in zip(steps, velocities.detach(), strict=True):
            if on_policy:
                terms = objective.terms(step, start, stop)
                tally.see_log_ratio(log_ratio(velocity, terms), terms.weights)
                tally.see_velocity_error((velocity - stored[step, start:stop]).abs().amax())
            else:
                spread(step, velocity)
        gradient = torch.stack([_filled(sums[m]) for m in numbers])
        backward(velocities, gradient.to(velocities.dtype))
        for m in numbers:
            sums[m] = None


def _filled(total: Tensor | None) -> Tensor:
    """A node's sum; every node has at least its own signal."""
    if total is None:
        msg = "JaggGradient: a node has no signal; its plan lacks the node's own row."
        raise JaggError(msg)
    return total
