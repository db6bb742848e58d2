"""How far the estimated gradient is from the exact one, on one micro-batch."""

import torch
from torch import Tensor

from jagg.gradients import ExactGradient, GradientEstimator, Objective, Tally, accumulate
from jagg.policy import Policy
from jagg.randomness import GeneratorFactory
from jagg.update import (
    GrpoConfig,
    JaggConfig,
    advantages_of,
    objective_of,
    reference_velocities,
    torch_backward,
)
from jagg.values import Reward, Rollout


def _nothing() -> None:
    """No progress to report."""


def micro_batch_gradient(
    policy: Policy,
    objective: Objective,
    estimator: GradientEstimator,
    *,
    span: tuple[int, int],
    on_policy: bool,
    equalise: bool = False,
) -> dict[str, Tensor]:
    """The gradient of one micro-batch by parameter name; gradients that were there before stay as they were."""
    trainable = policy.trainable()
    kept = {name: p.grad for name, p in trainable.items()}
    for parameter in trainable.values():
        parameter.grad = None
    try:
        accumulate(
            policy,
            objective,
            estimator.plan(objective.rollout),
            span=span,
            node_chunk=estimator.node_chunk,
            on_policy=on_policy,
            backward=torch_backward,
            tally=Tally(objective.rollout.latents.device),
            on_forward=_nothing,
            equalise=equalise,
        )
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trainable.items()
        }
    finally:
        for name, parameter in trainable.items():
            parameter.grad = kept[name]


def compare_gradients(estimate: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float]:
    """Cosine and relative L2 error of all parameters together; NaN where a gradient is 0."""
    a = torch.cat([tensor.double().flatten() for tensor in estimate.values()])
    b = torch.cat([exact[name].double().flatten() for name in estimate])
    return float(a @ b / (a.norm() * b.norm())), float((a - b).norm() / b.norm())


def probe(
    policy: Policy,
    rollout: Rollout,
    reward: Reward,
    *,
    config: GrpoConfig,
    jagg: JaggConfig,
    generator: GeneratorFactory,
) -> dict[str, float]:
    """Cosine and relative error of the configured estimator against the exact gradient of the first micro-batch.

    `jagg/cosine_equalised` divides every step's signal by its norm first: the native cosine is ruled by the last steps. A cosine is
    a regression test, not a measure of how well a run learns: estimators that drop signals score high and learn badly.
    """
    objective = objective_of(
        rollout, advantages_of(rollout, reward, config=config, generator=generator), config=config
    )
    if config.kl_weight > 0:
        reference = reference_velocities(policy, objective, _nothing)
        objective = Objective(
            rollout=rollout,
            advantages=objective.advantages,
            weights=objective.weights,
            clip=objective.clip,
            kl_weight=objective.kl_weight,
            kl_form=objective.kl_form,
            reference=reference,
            samples=objective.samples,
        )
    on_policy = policy.version == rollout.policy_version
    result = {}
    for equalise, suffix in ((False, ""), (True, "_equalised")):
        estimate, exact = (
            micro_batch_gradient(
                policy,
                objective,
                chosen,
                span=rollout.micro_batches[0],
                on_policy=on_policy,
                equalise=equalise,
            )
            for chosen in (jagg.build(), ExactGradient())
        )
        cosine, error = compare_gradients(estimate, exact)
        result[f"jagg/cosine{suffix}"] = cosine
        result[f"jagg/rel_error{suffix}"] = error
    return result
