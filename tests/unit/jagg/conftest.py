"""Tiny real policies and rollouts for the algorithm's tests."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from jagg.gradients import Objective
from jagg.losses import log_ratio, step_loss
from jagg.policy import Policy
from jagg.randomness import generator, generator_factory
from jagg.rollout import rollout
from jagg.schedule import sigma_schedule
from jagg.toy import toy_policy
from jagg.transitions import Transition
from jagg.values import PromptBatch, Reward, RewardComponent


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class _Affine(nn.Module):
    """v = (A + P·Q)·z + b·sigma + c, affine in (z, sigma) jointly; with a rank, only P and Q are trained."""

    def __init__(self, elements: int, rank: int) -> None:
        super().__init__()
        source = generator(7, "affine")

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                torch.randn(shape, generator=source, dtype=torch.float64) / shape[-1] ** 0.5
            )

        self.a = draw(elements, elements)
        self.b = draw(elements)
        self.c = draw(elements)
        self.p = draw(elements, max(rank, 1)) if rank else None
        self.q = draw(max(rank, 1), elements) if rank else None
        if rank:
            for parameter in (self.a, self.b, self.c):
                parameter.requires_grad_(False)

    def forward(self, z: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        a = self.a if self.p is None else self.a + self.p @ self.q
        return z @ a.T + sigma[:, None] * self.b + self.c


class _AffineFamily:
    name = "affine"

    def __init__(self, latent_shape: tuple[int, ...], rank: int) -> None:
        self.latent_shape = latent_shape
        self.transformer = _Affine(torch.Size(latent_shape).numel(), rank)
        self.text_encoder = nn.Identity()

    def encode(self, prompts):
        return {"text": torch.zeros(len(prompts), 1)}

    def velocity(self, latents, sigma, conditioning):
        return self.transformer(latents.flatten(1).double(), sigma.double()).view(latents.shape)

    def decode(self, latents):
        return latents.float().clamp(0, 1)


@pytest.fixture
def affine_policy():
    """A float64 policy affine in (z, sigma); rank > 0 makes it a LoRA with B != 0."""
    return lambda rank=0: Policy(family=_AffineFamily((1, 4, 6), rank))


@pytest.fixture
def policy():
    return toy_policy(seed=1)


@pytest.fixture
def draw():
    """Draw a rollout of a policy; defaults give 2 prompts x 4 images, 10 steps, Flow-SDE .7 on all but the last."""

    def make(
        policy,
        *,
        kind="flow_sde",
        noise_level=0.7,
        steps=10,
        start=0,
        stop=None,
        shift=3.0,
        guidance_scale=1.0,
        shared=False,
        micro_batch=0,
        prompts=2,
        group_size=4,
        seed=0,
        id="drawn",  # noqa: A002 - the field of Rollout
        on_step=None,
    ):
        texts = tuple(f"prompt {p}" for p in range(prompts))
        return rollout(
            policy,
            PromptBatch(prompts=texts, group_size=group_size),
            id=id,
            sigmas=sigma_schedule(steps, shift=shift),
            transition=Transition(kind=kind, noise_level=noise_level),
            noise_start=start,
            noise_stop=steps - 1 if stop is None else stop,
            guidance_scale=guidance_scale,
            shared_noise=shared,
            micro_batch=micro_batch,
            generator=generator_factory(seed),
            on_step=on_step,
        )

    return make


@pytest.fixture
def reward():
    """A reward of given values, or of random ones, for a rollout."""

    def make(drawn, values=None, *, seed=0):
        if values is None:
            values = torch.randn(len(drawn), generator=generator(seed, "reward"))
        values = torch.as_tensor(values, dtype=torch.float32)
        component = RewardComponent(name="test", weight=1.0, values=values, raw=values)
        return Reward(rollout_id=drawn.id, components=(component,))

    return make


@pytest.fixture
def objective():
    """An objective over a rollout with random advantages; a KL weight needs reference velocities."""

    def make(drawn, *, advantages=None, clip=1e-4, kl_weight=0.0, kl_form="exact", reference=None):
        dtype = drawn.log_probs.dtype
        if advantages is None:
            advantages = torch.randn(len(drawn), generator=generator(3, "advantages"), dtype=dtype)
        return Objective(
            rollout=drawn,
            advantages=advantages,
            weights=torch.ones(len(drawn), dtype=dtype),
            clip=clip,
            kl_weight=kl_weight,
            kl_form=kl_form,
            reference=reference,
            samples=len(drawn),
        )

    return make


@pytest.fixture
def full_gradient():
    """The gradient of the whole loss by plain autograd, step by step: no code of the estimators."""

    def compute(policy, objective):
        drawn = objective.rollout
        trainable = policy.trainable()
        total = {name: torch.zeros_like(p) for name, p in trainable.items()}
        for step in range(drawn.trained_steps):
            sigma = drawn.sigmas[drawn.noise_start + step].expand(len(drawn))
            velocity = policy.guided_velocity(
                drawn.latents[step],
                sigma,
                drawn.conditioning,
                drawn.unconditional,
                drawn.guidance_scale,
            )
            loss = step_loss(velocity, objective.terms(step, 0, len(drawn)))
            parts = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
            for name, part in zip(total, parts, strict=True):
                if part is not None:
                    total[name] += part
        return total

    return compute


@pytest.fixture
def straight(objective):
    """A rollout moved onto the straight path z_i = z_0 + (1 - sigma_i)·d, with its velocities and log-probs made anew."""

    def make(policy, drawn):
        sigmas = drawn.sigmas[drawn.noise_start : drawn.noise_stop + 1].double()
        shape = (len(sigmas),) + (1,) * (drawn.latents.dim() - 1)
        first = drawn.latents[0].double()
        direction = torch.randn(first.shape, generator=generator(5, "path"), dtype=torch.float64)
        latents = first + (1 - sigmas).view(shape) * direction
        with torch.no_grad():
            velocities = torch.stack(
                [
                    policy.velocity(z, s.float().expand(len(drawn)), drawn.conditioning)
                    for z, s in zip(latents[:-1], sigmas[:-1], strict=True)
                ]
            )
        moved = replace(
            drawn,
            latents=latents,
            velocities=velocities,
            log_probs=torch.zeros_like(drawn.log_probs).double(),
        )
        scored = objective(moved)
        log_probs = torch.stack(
            [log_ratio(v, scored.terms(t, 0, len(drawn))) for t, v in enumerate(velocities)]
        )
        return replace(moved, log_probs=log_probs)

    return make


@pytest.fixture
def relative():
    """Relative L2 distance of two gradients by name."""

    def distance(one, other):
        a = torch.cat([one[name].double().flatten() for name in other])
        b = torch.cat([tensor.double().flatten() for tensor in other.values()])
        return float((a - b).norm() / b.norm())

    return distance
