"""Pretraining on drawn shapes: a batch and a step by tick, so that equal seeds give equal weights.

Axes: B pictures of a batch; C, H, W channels, height and width.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jagg.errors import NonFiniteError
from jagg.flow_matching import flow_matching_loss, logit_normal_sigma
from jagg.optimizers import adamw, set_learning_rate
from jagg.policy import Policy
from jagg.randomness import generator
from nodes.backends.shapes import (
    SceneMix,
    corrupt_caption,
    numpy_generator,
    render_batch,
    sample_scene,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeData:
    """Which pictures are drawn, and how their captions are falsified."""

    batch: int = 64
    mix: SceneMix = field(default_factory=lambda: SceneMix(two_objects=0.4, small_single=0.4))
    """Small single shapes are the hardest to draw and get more than their share."""
    empty_caption: float = 0.1
    """Share of captions left empty, for classifier-free guidance."""
    wrong_shape: float = 0.0
    wrong_colour: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowMatchingConfig:
    """One step of pretraining: learning rate by tick, noise levels, clipping and averaging."""

    steps: int
    lr: float
    warmup: int = 40
    decay_start: float = 0.5
    """Share of the steps after which the rate falls linearly."""
    final_fraction: float = 0.02
    betas: tuple[float, float] = (0.9, 0.98)
    ema_decay: float = 0.995
    sigma_mean: float = 0.0
    sigma_std: float = 1.0
    """Noise levels have logits of this mean and standard deviation."""
    gradient_norm: float = 1.0
    micro_batch: int = 64
    """Pictures of one forward and backward; the step sums over them."""

    def learning_rate(self, tick: int) -> float:
        """The rate of tick 1..steps."""
        rise = min(1.0, tick / self.warmup)
        done = (tick / self.steps - self.decay_start) / (1 - self.decay_start)
        return self.lr * rise * (1 - (1 - self.final_fraction) * min(max(done, 0.0), 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """Pictures as latents in [-1, 1] with their captions. Shape: latents (B, C, H, W)."""

    latents: Tensor
    captions: tuple[str, ...]


def draw_batch(data: ShapeData, *, size_px: int, seed: int, tick: int) -> TrainingBatch:
    """The batch of a tick; it depends on `data`, `seed` and `tick` alone."""
    random = numpy_generator(generator(seed, "pretraining", "batch", tick))
    scenes = [sample_scene(random, data.mix) for _ in range(data.batch)]
    pictures = render_batch(scenes, size_px, random)
    captions = tuple(
        ""
        if random.random() < data.empty_caption
        else corrupt_caption(
            scene, random, wrong_shape=data.wrong_shape, wrong_colour=data.wrong_colour
        )
        for scene in scenes
    )
    return TrainingBatch(
        latents=torch.from_numpy(pictures).permute(0, 3, 1, 2).float() * 2 - 1, captions=captions
    )


def pretraining_optimizer(policy: Policy, config: FlowMatchingConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, text encoder included where it trains, without decay."""
    return adamw(policy, lr=config.lr, betas=config.betas, weight_decay=0.0, eps=1e-8)


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: TrainingBatch,
    config: FlowMatchingConfig,
    *,
    seed: int,
    tick: int,
) -> float:
    """One optimizer step on the flow-matching loss of a batch; returns the loss.

    Noise depends on `seed` and `tick` alone. Averages the trainable weights into `policy.ema` and raises
    `policy.version`. Ticks count from 1.

    Raises:
        NonFiniteError: the gradient is not finite; the weights are as before.
    """
    device = next(policy.module.parameters()).device
    random = generator(seed, "pretraining", "noise", tick)
    latents = batch.latents
    count = len(latents)
    noise = torch.randn(latents.shape, generator=random)
    sigma = logit_normal_sigma(
        count, mean=config.sigma_mean, std=config.sigma_std, generator=random
    )
    # Strata come in rising order; shuffled, so that micro-batches are alike.
    sigma = sigma[torch.randperm(count, generator=random)]
    set_learning_rate(optimizer, config.learning_rate(tick))
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for start in range(0, count, config.micro_batch):
        part = slice(start, start + config.micro_batch)
        conditioning = policy.family.encode(batch.captions[part])
        loss = flow_matching_loss(
            policy,
            latents[part].to(device),
            conditioning,
            sigma=sigma[part].to(device),
            noise=noise[part].to(device),
        ) * (len(batch.captions[part]) / count)
        loss.backward()
        total += float(loss.detach())
    trainable = policy.trainable()
    norm = float(torch.nn.utils.clip_grad_norm_(trainable.values(), config.gradient_norm))
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        msg = (
            f"Flow matching: the gradient norm is {norm} at tick {tick}, expected a finite number; the weights were left as "
            "they were. Lower the learning rate."
        )
        raise NonFiniteError(msg)
    optimizer.step()
    policy.version += 1
    _average(policy, trainable, config.ema_decay, tick)
    return total


@torch.no_grad()
def _average(
    policy: Policy, trainable: dict[str, torch.nn.Parameter], decay: float, tick: int
) -> None:
    """Exponential average of the weights; early on its memory is a tenth of the ticks so far."""
    if policy.ema is None:
        policy.ema = {name: p.detach().clone() for name, p in trainable.items()}
        return
    kept = min(decay, tick / (tick + 10))
    averages = [policy.ema[name] for name in trainable]
    torch._foreach_lerp_(averages, [p.detach() for p in trainable.values()], 1 - kept)
