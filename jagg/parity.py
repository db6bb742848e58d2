"""The gate before training: the training path must score a rollout as the sampler did."""

import torch

from jagg.errors import ParityError
from jagg.gradients import Objective, node_velocities
from jagg.losses import log_ratio
from jagg.policy import Policy
from jagg.update import lower_precision
from jagg.values import Rollout

FULL_PRECISION_BOUND = 1e-6
"""Largest |delta log-prob| in float32, nats per latent element; replay of the same shapes gives 0."""


def parity(policy: Policy, rollout: Rollout) -> float:
    """The largest |log-prob as trained - log-prob as sampled| of the first micro-batch at all trained steps.

    The forward is that of a training step, graph included, at the rollout's own batch shape.
    """
    blank = torch.zeros(
        len(rollout), device=rollout.log_probs.device, dtype=rollout.log_probs.dtype
    )
    objective = Objective(
        rollout=rollout,
        advantages=blank,
        weights=blank,
        clip=1.0,
        kl_weight=0.0,
        kl_form="exact",
        reference=None,
        samples=len(rollout),
    )
    start, stop = rollout.micro_batches[0]
    worst = blank.new_zeros(())
    for step in range(rollout.trained_steps):
        with torch.enable_grad():
            velocity = node_velocities(policy, objective, [step], start, stop)[0].detach()
        delta = log_ratio(velocity, objective.terms(step, start, stop)).abs().amax()
        worst = torch.maximum(worst, delta)
    return float(worst)


def check_parity(policy: Policy, rollout: Rollout, *, clip: float) -> float:
    """`parity`, refused above 1e-6 in float32 and above clip/10 below; `clip` as of `GrpoConfig.clip`.

    Raises:
        ParityError: the two paths disagree by more, or the difference is NaN.
    """
    measured = parity(policy, rollout)
    lower = lower_precision(policy)
    bound = clip / 10 if lower else FULL_PRECISION_BOUND
    if not measured <= bound:
        why = "a tenth of the clip range" if lower else "the bound of float32"
        msg = (
            f"Parity gate: training scores the rollout differently from the sampler: max |delta log-prob| is {measured:.3g}, "
            f"expected at most {bound:.3g} ({why}). Use the same precision, attention backend and compile mode for both, "
            "and switch dropout off (`policy.module.eval()`)."
        )
        raise ParityError(msg)
    return measured
