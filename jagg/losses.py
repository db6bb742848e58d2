"""The GRPO objective of one denoising step as a function of its velocity, and the gradient of it in closed form.

Axes: N samples (here those of one micro-batch), D latent elements per sample; `*latent` is a sample's latent shape.

Per step i, with e = x' - b·x - k·v the residual and r = exp(logp - logp_old):

    loss  = sum over samples of w·[ max(-A·r, -A·clamp(r, 1-c, 1+c)) + beta·KL ] / count
    g = d loss / d v = w·[ -A·r·chi·lam·k·e + beta·kappa·k²·(v - v_ref) ] / (count·D)

chi is 0 where the clip holds the sample (A > 0 and r > 1+c, or A < 0 and r < 1-c), else 1; lam is 1/sd² for the SDE
transitions and 2 for CPS; `count` is samples times trained steps of the optimizer step.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jagg.errors import JaggError
from jagg.transitions import StepCoefficients, TransitionKind, log_prob, transition_mean

KlForm = Literal["exact", "flow_grpo", "x"]
KL_FORMS: tuple[KlForm, ...] = ("exact", "flow_grpo", "x")


def clip_from_nats(clip_nats: float, elements: int) -> float:
    """A clip range in nats of the whole sample as one of the mean log-prob: clip_nats / D."""
    return clip_nats / elements


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTerms:
    """What the loss of one step needs besides the velocity.

    Shape: latents, next_latents and reference (N, *latent); old_log_probs, advantages and weights (N,).
    """

    latents: Tensor
    next_latents: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    """1, or 0 for a sample that does not take part but keeps its place in the batch."""
    kind: TransitionKind
    coefficients: StepCoefficients
    clip: float
    """Clip range of the ratio, in units of the mean log-prob."""
    kl_weight: float
    kl_form: KlForm
    reference: Tensor | None
    """Velocity of the reference weights; needed where `kl_weight` is not 0."""
    count: int
    """Samples times trained steps of the whole optimizer step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """The upstream gradient of one step and what it was made of.

    Shape: gradient (N, *latent); log_ratio, clipped (bool), policy and kl (N,), the last two without weights and count.
    """

    gradient: Tensor
    log_ratio: Tensor
    clipped: Tensor
    policy: Tensor
    kl: Tensor


def log_ratio(velocity: Tensor, terms: StepTerms) -> Tensor:
    """logp(velocity) - logp_old; shape (N,), nats per latent element."""
    mean = transition_mean(terms.latents, velocity, terms.coefficients)
    return (
        log_prob(terms.next_latents, mean, terms.coefficients.sd, kind=terms.kind)
        - terms.old_log_probs
    )


def surrogate(log_ratios: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's clipped loss max(-A·r, -A·clamp(r, 1-c, 1+c)) per sample; shape (N,). Source: arXiv 1707.06347, eq. 7."""
    ratio_N = log_ratios.exp()
    return torch.maximum(-advantages * ratio_N, -advantages * ratio_N.clamp(1 - clip, 1 + clip))


def _kl_scale(form: KlForm, coefficients: StepCoefficients) -> float:
    """The factor on mean((mu - mu_ref)²)."""
    if form == "exact":
        return 1 / (2 * coefficients.sd**2)
    if form == "flow_grpo":
        return 1 / (2 * coefficients.std_dev**2)
    return 1.0


def kl_divergence(
    velocity: Tensor, reference: Tensor, coefficients: StepCoefficients, *, form: KlForm
) -> Tensor:
    """Distance of the step's mean from that of the reference, averaged over latent elements; (N, *latent) to (N,).

    `exact` is the Gaussian KL mean((mu - mu_ref)²)/(2 sd²); `flow_grpo` divides by 2 std_dev² and so lacks the |dt| of the
    paper; `x` is the plain mean square.
    """
    squares_N = (velocity - reference).square().flatten(1).mean(1)
    return squares_N * (coefficients.k**2 * _kl_scale(form, coefficients))


def _reference(terms: StepTerms) -> Tensor:
    if terms.reference is None:
        msg = f"KL term: weight {terms.kl_weight} needs the velocity of the reference weights, got none."
        raise JaggError(msg)
    return terms.reference


def step_loss(velocity: Tensor, terms: StepTerms) -> Tensor:
    """The loss of one step as a differentiable scalar; velocity (N, *latent)."""
    loss_N = surrogate(log_ratio(velocity, terms), terms.advantages, terms.clip)
    if terms.kl_weight != 0:
        kl_N = kl_divergence(velocity, _reference(terms), terms.coefficients, form=terms.kl_form)
        loss_N = loss_N + terms.kl_weight * kl_N
    return (loss_N * terms.weights).sum() / terms.count


def autograd_signal(velocity: Tensor, terms: StepTerms) -> Tensor:
    """The gradient of `step_loss` by velocity, by automatic differentiation: the reference for `upstream_signal`."""
    with torch.enable_grad():
        leaf = velocity.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(step_loss(leaf, terms), leaf)
    return gradient


def upstream_signal(velocity: Tensor, terms: StepTerms, *, on_policy: bool) -> Signal:
    """The gradient of `step_loss` by velocity in closed form, with the step's diagnostics; velocity (N, *latent), without a graph.

    `on_policy` states that the velocity is the one that the rollout stored: the ratio is then 1 and is not computed.
    """
    numbers = terms.coefficients
    residual = terms.next_latents - transition_mean(terms.latents, velocity, numbers)
    if on_policy:
        log_ratio_N = torch.zeros_like(terms.advantages)
        clipped_N = torch.zeros_like(terms.advantages, dtype=torch.bool)
    else:
        log_ratio_N = log_ratio(velocity, terms)
        ratio_N = log_ratio_N.exp()
        above_N = (terms.advantages > 0) & (ratio_N > 1 + terms.clip)
        below_N = (terms.advantages < 0) & (ratio_N < 1 - terms.clip)
        clipped_N = above_N | below_N
    elements = residual[0].numel()
    per_sample = (-1,) + (1,) * (residual.dim() - 1)
    scale = numbers.k / (terms.count * elements)
    lam = 2.0 if terms.kind == "cps" else 1 / numbers.sd**2
    # Off-policy ratios may overflow; samples that are held or have no advantage are cut out, not multiplied by 0.
    idle_N = clipped_N | (terms.advantages == 0)
    pull_N = (-terms.advantages * log_ratio_N.exp() * (scale * lam)).masked_fill(idle_N, 0.0)
    gradient = (pull_N * terms.weights).view(per_sample) * residual
    kl_N = torch.zeros_like(terms.advantages)
    if terms.kl_weight != 0:
        reference = _reference(terms)
        kl_N = kl_divergence(velocity, reference, numbers, form=terms.kl_form)
        pull = terms.kl_weight * 2 * _kl_scale(terms.kl_form, numbers) * numbers.k * scale
        gradient = gradient + (pull * terms.weights).view(per_sample) * (velocity - reference)
    return Signal(
        gradient=gradient,
        log_ratio=log_ratio_N,
        clipped=clipped_N,
        policy=surrogate(log_ratio_N, terms.advantages, terms.clip),
        kl=kl_N,
    )
