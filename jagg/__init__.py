"""JAGG: group-relative policy optimisation of flow-matching models with aggregated backward passes.

The package depends on torch and safetensors alone and can be used without the studio. A policy that learns to draw bright
images, on a toy model, in seconds:

    >>> import torch
    >>> from jagg import *
    >>> policy = toy_policy(seed=0)
    >>> prompts = PromptBatch(prompts=("a cat", "a dog"), group_size=8)
    >>> optimizer = adamw(policy, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-8)
    >>> means = []
    >>> for tick in range(1, 31):
    ...     noise = generator_factory(0, tick)
    ...     drawn = rollout(policy, prompts, id=f"tick-{tick}", sigmas=sigma_schedule(8, shift=1.0),
    ...                     transition=Transition(kind="cps", noise_level=0.8), noise_start=0, noise_stop=4,
    ...                     guidance_scale=1.0, shared_noise=True, micro_batch=0, generator=noise, on_step=None)
    ...     bright = torch.cat([drawn.images(p).mean((1, 2, 3)) for p in range(2)])
    ...     reward = Reward(rollout_id=drawn.id, components=(
    ...         RewardComponent(name="bright", weight=1.0, values=bright, raw=bright),))
    ...     stats = grpo_update(policy, drawn, reward, config=GrpoConfig(), jagg=JaggConfig(window=4),
    ...                         optimizer=optimizer, generator=noise, on_step=None)
    ...     means.append(float(bright.mean()))
    >>> means[-1] > means[0] + 0.1
    True
"""

from jagg.advantages import group_advantages
from jagg.ema import Ema
from jagg.errors import JaggError, NonFiniteError, ParityError, ShapeError, StaleRolloutError
from jagg.gradients import ExactGradient, GradientEstimator, JaggGradient
from jagg.losses import clip_from_nats
from jagg.optimizers import (
    adamw,
    learning_rate,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)
from jagg.parity import check_parity, parity
from jagg.policy import Family, Policy
from jagg.probe import probe
from jagg.randomness import GeneratorFactory, derive_seed, generator, generator_factory
from jagg.rollout import rollout, sample_ode
from jagg.schedule import sigma_schedule
from jagg.state import load_state, save_state
from jagg.toy import toy_policy
from jagg.transitions import (
    Step,
    StepCoefficients,
    Transition,
    cps_step,
    dance_sde_step,
    flow_sde_step,
    ode_step,
)
from jagg.update import GrpoConfig, JaggConfig, grpo_update
from jagg.values import (
    Checkpoint,
    PromptBatch,
    Reward,
    RewardComponent,
    Rollout,
    Samples,
    Scorer,
    ScoreRequest,
    ScoreResult,
    UpdateStats,
)

__all__ = [
    "Checkpoint",
    "Ema",
    "ExactGradient",
    "Family",
    "GeneratorFactory",
    "GradientEstimator",
    "GrpoConfig",
    "JaggConfig",
    "JaggError",
    "JaggGradient",
    "NonFiniteError",
    "ParityError",
    "Policy",
    "PromptBatch",
    "Reward",
    "RewardComponent",
    "Rollout",
    "Samples",
    "ScoreRequest",
    "ScoreResult",
    "Scorer",
    "ShapeError",
    "StaleRolloutError",
    "Step",
    "StepCoefficients",
    "Transition",
    "UpdateStats",
    "adamw",
    "check_parity",
    "clip_from_nats",
    "cps_step",
    "dance_sde_step",
    "derive_seed",
    "flow_sde_step",
    "generator",
    "generator_factory",
    "group_advantages",
    "grpo_update",
    "learning_rate",
    "load_optimizer_state",
    "load_state",
    "ode_step",
    "optimizer_state",
    "parity",
    "probe",
    "rollout",
    "sample_ode",
    "save_state",
    "set_learning_rate",
    "sigma_schedule",
    "toy_policy",
]
