"""Stochastic transitions of a denoising step, and the probability that they give to what was drawn.

Every transition is linear in state and velocity: the next state is b·x + k·v + sd·z with z a unit Gaussian. Two
quantities that the literature both calls "std" keep apart names here: `std_dev` is the diffusion coefficient without
sqrt(-dt), `sd` the standard deviation of one whole step.

Arithmetic is float32 (float64 where the input is), whatever the storage dtype; a drawn state is rounded to the storage
dtype before it is scored, so that scoring it again gives the same number. Source: algorithms 2.1 of Flow-GRPO
(arXiv 2505.05470), DanceGRPO (arXiv 2505.07818) and Flow-CPS (arXiv 2509.05952).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jagg.errors import JaggError, ShapeError

TransitionKind = Literal["flow_sde", "dance_sde", "cps"]
TRANSITION_KINDS: tuple[TransitionKind, ...] = ("flow_sde", "dance_sde", "cps")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCoefficients:
    """The numbers of one step: next = b·x + k·v + sd·z."""

    b: float
    k: float
    """d mean / d v; negative."""
    sd: float
    """Standard deviation of the whole step; 0 where the step is deterministic."""
    std_dev: float
    """Diffusion coefficient without sqrt(-dt); equal to `sd` for CPS, which has no such factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step taken.

    Shape: next and mean (N, *latent); log_prob (N,), nats per latent element, None where the step has no noise.
    """

    next: Tensor
    """The drawn state, in the storage dtype of the latents that came in."""
    mean: Tensor
    std: float
    """`sd` of the step: the standard deviation of `next` around `mean`."""
    log_prob: Tensor | None


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or unchanged where it is float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def transition_mean(latents: Tensor, velocity: Tensor, coefficients: StepCoefficients) -> Tensor:
    """b·x + k·v; the one expression that sampling and training share. Shape: all (N, *latent)."""
    return coefficients.b * _wide(latents) + coefficients.k * _wide(velocity)


def log_prob(next_latents: Tensor, mean: Tensor, sd: float, *, kind: TransitionKind) -> Tensor:
    """The log-probability of a step, averaged (not summed) over latent elements; shape (N, *latent) to (N,).

    Flow-SDE and Dance-SDE: mean of -(x' - mean)²/(2 sd²) - log sd - log(2 pi)/2. CPS drops the scale and the constants:
    mean of -(x' - mean)², a surrogate whose ratio is not a likelihood ratio.
    """
    squares_ND = (_wide(next_latents) - mean).square().flatten(1)
    if kind == "cps":
        return -squares_ND.mean(1)
    return -squares_ND.mean(1) / (2 * sd * sd) - math.log(sd) - 0.5 * math.log(2 * math.pi)


def _sde_coefficients(sigma: float, dt: float, std_dev: float) -> StepCoefficients:
    variance = std_dev * std_dev
    return StepCoefficients(
        b=1 + variance / (2 * sigma) * dt,
        k=(1 + variance * (1 - sigma) / (2 * sigma)) * dt,
        sd=std_dev * math.sqrt(-dt),
        std_dev=std_dev,
    )


def _cps_coefficients(sigma: float, sigma_next: float, noise_level: float) -> StepCoefficients:
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    kept = math.sqrt(sigma_next * sigma_next - std * std)
    return StepCoefficients(
        b=(1 - sigma_next) + kept,
        k=-(1 - sigma_next) * sigma + kept * (1 - sigma),
        sd=std,
        std_dev=std,
    )


def _ode_coefficients(sigma: float, sigma_next: float) -> StepCoefficients:
    return StepCoefficients(b=1.0, k=sigma_next - sigma, sd=0.0, std_dev=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """A family of noisy steps and its noise level; level 0 is the Euler step of the ODE.

    Example:
        >>> numbers = Transition(kind="flow_sde", noise_level=0.7).coefficients(0.75, 0.5, 0.9)
        >>> round(numbers.sd, 4), round(numbers.k, 4)
        (0.6062, -0.3112)
    """

    kind: TransitionKind
    noise_level: float
    """a of Flow-SDE and CPS, eta of Dance-SDE; CPS takes at most 1."""

    def __post_init__(self) -> None:
        """Check kind and level.

        Raises:
            JaggError: an unknown kind, a negative or infinite level, or a CPS level above 1.
        """
        if self.kind not in TRANSITION_KINDS:
            msg = f"Transition: no kind {self.kind!r}. Kinds are {', '.join(TRANSITION_KINDS)}."
            raise JaggError(msg)
        if not 0 <= self.noise_level < math.inf:
            msg = f"Transition: `noise_level` is {self.noise_level}, expected 0 or more."
            raise JaggError(msg)
        if self.kind == "cps" and self.noise_level > 1:
            msg = f"Transition: `noise_level` is {self.noise_level}, expected at most 1 for kind 'cps'."
            raise JaggError(msg)

    def coefficients(self, sigma: float, sigma_next: float, sigma_max: float) -> StepCoefficients:
        """The numbers of the step from `sigma` down to `sigma_next`.

        `sigma_max` is the second level of the schedule, sigmas[1]. Flow-SDE puts it in the place of sigma where
        sigma = 1, to avoid a division by 0, in the diffusion coefficient but not in the drift. So its first step has
        k = dt instead of (1 + a²/2)·dt: a small bias, kept for parity with Flow-GRPO.
        """
        if self.noise_level == 0:
            return _ode_coefficients(sigma, sigma_next)
        if self.kind == "cps":
            return _cps_coefficients(sigma, sigma_next, self.noise_level)
        std_dev = self.noise_level
        if self.kind == "flow_sde":
            std_dev *= math.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))
        return _sde_coefficients(sigma, sigma_next - sigma, std_dev)

    def step(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: float,
        sigma_next: float,
        sigma_max: float,
        noise: Tensor,
    ) -> Step:
        """One noisy step; no log-prob where it turns out deterministic. Shape: tensors (N, *latent).

        Raises:
            ShapeError: latents, velocity and noise differ in shape.
        """
        return _take(
            latents, velocity, noise, self.coefficients(sigma, sigma_next, sigma_max), self.kind
        )


def _take(
    latents: Tensor,
    velocity: Tensor,
    noise: Tensor | None,
    numbers: StepCoefficients,
    kind: TransitionKind,
) -> Step:
    for name, tensor in (("velocity", velocity), ("noise", noise)):
        if tensor is not None and tensor.shape != latents.shape:
            msg = f"Transition: `{name}` has shape {tuple(tensor.shape)}, expected that of the latents, {tuple(latents.shape)}."
            raise ShapeError(msg)
    mean = transition_mean(latents, velocity, numbers)
    if noise is None or numbers.sd == 0:
        return Step(next=mean.to(latents.dtype), mean=mean, std=0.0, log_prob=None)
    drawn = (mean + numbers.sd * _wide(noise)).to(latents.dtype)
    scored = log_prob(drawn.detach(), mean, numbers.sd, kind=kind)
    return Step(next=drawn, mean=mean, std=numbers.sd, log_prob=scored)


def flow_sde_step(
    latents: Tensor,
    velocity: Tensor,
    sigma: float,
    sigma_next: float,
    *,
    noise_level: float,
    sigma_max: float,
    noise: Tensor,
) -> Step:
    """One step of Flow-GRPO's SDE. Shape: tensors (N, *latent)."""
    transition = Transition(kind="flow_sde", noise_level=noise_level)
    return transition.step(latents, velocity, sigma, sigma_next, sigma_max, noise)


def dance_sde_step(
    latents: Tensor,
    velocity: Tensor,
    sigma: float,
    sigma_next: float,
    *,
    noise_level: float,
    noise: Tensor,
) -> Step:
    """One step of DanceGRPO's SDE, `noise_level` = eta. Shape: tensors (N, *latent).

    Its drift grows like eta²/(2 sigma), so the last step of a trajectory is taken by `ode_step`: that gives the image
    prediction x - sigma·v.
    """
    return Transition(kind="dance_sde", noise_level=noise_level).step(
        latents, velocity, sigma, sigma_next, sigma, noise
    )


def cps_step(
    latents: Tensor,
    velocity: Tensor,
    sigma: float,
    sigma_next: float,
    *,
    noise_level: float,
    noise: Tensor,
) -> Step:
    """One step of Flow-CPS, which keeps the coefficient of noise at sigma_next. Shape: tensors (N, *latent).

    It does not keep the marginals of the ODE. A step to sigma_next = 0 is deterministic.
    """
    return Transition(kind="cps", noise_level=noise_level).step(
        latents, velocity, sigma, sigma_next, sigma, noise
    )


def ode_step(latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> Step:
    """One Euler step x + (sigma_next - sigma)·v, without a log-prob. Shape: tensors (N, *latent)."""
    return _take(latents, velocity, None, _ode_coefficients(sigma, sigma_next), "flow_sde")
