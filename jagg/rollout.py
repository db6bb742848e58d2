"""Sampling: stochastic rollouts that can be trained on, and deterministic samples.

Axes: N = P·G samples, T trained (noisy) steps.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from jagg.errors import JaggError
from jagg.policy import Policy
from jagg.randomness import GeneratorFactory
from jagg.schedule import check_schedule
from jagg.transitions import Transition, ode_step
from jagg.values import Conditioning, PromptBatch, Rollout, Samples

OnStep = Callable[[int, int], None]
"""Told (done, total) after every forward of the model; an exception that it raises ends the work."""


def device_of(policy: Policy) -> torch.device:
    """The device of the policy's first parameter."""
    return next(policy.module.parameters()).device


def slice_conditioning(conditioning: Conditioning, start: int, stop: int) -> dict[str, Tensor]:
    """The conditioning of the half-open sample range."""
    return {name: tensor[start:stop] for name, tensor in conditioning.items()}


def micro_batch_ranges(samples: int, micro_batch: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of at most `micro_batch` samples that cover all; 0 puts all into one.

    Raises:
        JaggError: `micro_batch` is negative.
    """
    if micro_batch < 0:
        msg = f"Sampler: `micro_batch` is {micro_batch}, expected 0 (all samples at once) or more."
        raise JaggError(msg)
    size = micro_batch or samples
    return tuple((start, min(start + size, samples)) for start in range(0, samples, size))


def _encode(
    policy: Policy, prompts: PromptBatch, guidance_scale: float
) -> tuple[Conditioning, Conditioning | None]:
    """Conditioning of every sample, and of the unconditional branch where guidance is on."""
    group = prompts.group()
    per_prompt = policy.encode(prompts.prompts)
    conditional = {name: tensor[group.to(tensor.device)] for name, tensor in per_prompt.items()}
    if guidance_scale == 1:
        return conditional, None
    empty = policy.encode([prompts.negative_prompt])
    return conditional, {name: t.expand(len(prompts), *t.shape[1:]) for name, t in empty.items()}


def _draw(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=generator.device)


def _initial_latents(
    policy: Policy, prompts: PromptBatch, generator: GeneratorFactory, *, shared: bool
) -> Tensor:
    """Unit noise of every sample, one draw per prompt group where `shared`; shape (N, *latent), float32."""
    shape = policy.family.latent_shape
    size = prompts.group_size
    if shared:
        drawn = [_draw(generator("initial", (p,)), shape) for p in range(len(prompts.prompts))]
        return torch.stack(drawn).repeat_interleave(size, 0).to(device_of(policy))
    drawn = [
        _draw(generator("initial", (p, g)), shape)
        for p in range(len(prompts.prompts))
        for g in range(size)
    ]
    return torch.stack(drawn).to(device_of(policy))


def _step_noise(
    policy: Policy, prompts: PromptBatch, generator: GeneratorFactory, steps: int
) -> Tensor:
    """Unit noise of every noisy step; shape (T, N, *latent), float32."""
    shape = (steps, *policy.family.latent_shape)
    members = [(p, g) for p in range(len(prompts.prompts)) for g in range(prompts.group_size)]
    return torch.stack([_draw(generator("noise", key), shape) for key in members], 1).to(
        device_of(policy)
    )


def _check_noisy_range(
    sigmas: Sequence[float], transition: Transition, noise_start: int, noise_stop: int
) -> None:
    steps = len(sigmas) - 1
    if not 0 <= noise_start < noise_stop <= steps:
        msg = (
            f"Sampler: noisy steps {noise_start}..{noise_stop} (`noise_start`, `noise_stop`) do not lie within the "
            f"{steps} steps; expected 0 <= noise_start < noise_stop <= {steps}."
        )
        raise JaggError(msg)
    if transition.noise_level == 0:
        msg = (
            "Sampler: `noise_level` is 0, so no step has a log-prob to train on; raise it, or sample with `sample_ode` "
            "(the ODE Sampler card)."
        )
        raise JaggError(msg)
    if noise_stop == steps and transition.kind != "flow_sde":
        why = (
            "is deterministic"
            if transition.kind == "cps"
            else "must give the image prediction, not a noisy latent"
        )
        msg = f"Sampler: the last step of {transition.kind} {why}; set `noise_stop` to at most {steps - 1}, got {noise_stop}."
        raise JaggError(msg)


def rollout(
    policy: Policy,
    prompts: PromptBatch,
    *,
    id: str,  # noqa: A002 - the field of Rollout that it fills
    sigmas: Tensor,
    transition: Transition,
    noise_start: int,
    noise_stop: int,
    guidance_scale: float,
    shared_noise: bool,
    micro_batch: int,
    generator: GeneratorFactory,
    on_step: OnStep | None,
) -> Rollout:
    """Sample every prompt's group with noise on steps `noise_start`..`noise_stop` and Euler steps elsewhere.

    Every member draws from generator("noise", (prompt, member)) and starts from generator("initial", (prompt, member)),
    or from generator("initial", (prompt,)) where `shared_noise`. `micro_batch` samples are forwarded together, 0 = all;
    guidance scale 1 means no guidance. `sigmas` (steps+1,) as of `sigma_schedule`.

    Raises:
        JaggError: the noisy steps do not fit the schedule, or one of them would be deterministic.
    """
    check_schedule(sigmas, where="Sampler")
    levels = [float(level) for level in sigmas.tolist()]
    _check_noisy_range(levels, transition, noise_start, noise_stop)
    device = device_of(policy)
    with torch.no_grad():
        conditioning, unconditional = _encode(policy, prompts, guidance_scale)
        initial = _initial_latents(policy, prompts, generator, shared=shared_noise)
        trained = noise_stop - noise_start
        noise = _step_noise(policy, prompts, generator, trained)
        states = initial.new_empty((trained + 1, *initial.shape))
        velocities = initial.new_empty((trained, *initial.shape))
        log_probs = initial.new_empty((trained, len(prompts)))
        final = torch.empty_like(initial)
        ranges = micro_batch_ranges(len(prompts), micro_batch)
        total, done = len(ranges) * (len(levels) - 1), 0
        sigmas_on_device = sigmas.to(device=device, dtype=torch.float32)
        for start, stop in ranges:
            conditional = slice_conditioning(conditioning, start, stop)
            empty = (
                None if unconditional is None else slice_conditioning(unconditional, start, stop)
            )
            latents = initial[start:stop]
            for i, (sigma, sigma_next) in enumerate(pairwise(levels)):
                fed = sigmas_on_device[i].expand(stop - start)
                velocity = policy.guided_velocity(latents, fed, conditional, empty, guidance_scale)
                if not noise_start <= i < noise_stop:
                    latents = ode_step(latents, velocity, sigma, sigma_next).next
                else:
                    t = i - noise_start
                    step = transition.step(
                        latents, velocity, sigma, sigma_next, levels[1], noise[t, start:stop]
                    )
                    if step.log_prob is None:
                        msg = f"Sampler: step {i} has no noise and so no log-prob; leave it out of the noisy steps."
                        raise JaggError(msg)
                    states[t, start:stop] = latents
                    velocities[t, start:stop] = velocity
                    log_probs[t, start:stop] = step.log_prob
                    latents = step.next
                    states[t + 1, start:stop] = latents
                done += 1
                if on_step is not None:
                    on_step(done, total)
            final[start:stop] = latents
    return Rollout(
        id=id,
        prompts=prompts,
        conditioning=conditioning,
        unconditional=unconditional,
        guidance_scale=guidance_scale,
        transition=transition,
        sigmas=sigmas,
        noise_start=noise_start,
        noise_stop=noise_stop,
        latents=states,
        final_latents=final,
        log_probs=log_probs,
        velocities=velocities,
        micro_batches=ranges,
        policy_version=policy.version,
        decode=decoder(policy),
    )


def decoder(policy: Policy) -> Callable[[Tensor], Tensor]:
    """The policy's decoder, without a graph."""

    def decode(latents: Tensor) -> Tensor:
        with torch.no_grad():
            return policy.family.decode(latents)

    return decode


def sample_ode(
    policy: Policy,
    prompts: PromptBatch,
    *,
    id: str,  # noqa: A002 - the field of Samples that it fills
    sigmas: Tensor,
    guidance_scale: float,
    micro_batch: int,
    generator: GeneratorFactory,
    on_step: OnStep | None,
) -> Samples:
    """Images by Euler steps of the ODE from generator("initial", (prompt, member)), with the weights now in force."""
    check_schedule(sigmas, where="ODE sampler")
    levels = [float(level) for level in sigmas.tolist()]
    with torch.no_grad():
        conditioning, unconditional = _encode(policy, prompts, guidance_scale)
        initial = _initial_latents(policy, prompts, generator, shared=False)
        final = torch.empty_like(initial)
        ranges = micro_batch_ranges(len(prompts), micro_batch)
        total, done = len(ranges) * (len(levels) - 1), 0
        sigmas_on_device = sigmas.to(device=initial.device, dtype=torch.float32)
        images = []
        for start, stop in ranges:
            conditional = slice_conditioning(conditioning, start, stop)
            empty = (
                None if unconditional is None else slice_conditioning(unconditional, start, stop)
            )
            latents = initial[start:stop]
            for i, (sigma, sigma_next) in enumerate(pairwise(levels)):
                fed = sigmas_on_device[i].expand(stop - start)
                velocity = policy.guided_velocity(latents, fed, conditional, empty, guidance_scale)
                latents = ode_step(latents, velocity, sigma, sigma_next).next
                done += 1
                if on_step is not None:
                    on_step(done, total)
            final[start:stop] = latents
            images.append(policy.family.decode(latents))
    return Samples(
        id=id,
        prompts=prompts,
        latents=final,
        images=torch.cat(images),
        policy_version=policy.version,
    )
