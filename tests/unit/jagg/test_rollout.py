"""Sampling, and acceptance row T6: replaying a rollout gives its log-probs."""

import pytest
import torch

from jagg.errors import JaggError
from jagg.parity import parity
from jagg.randomness import generator, generator_factory
from jagg.rollout import micro_batch_ranges, sample_ode
from jagg.schedule import sigma_schedule
from jagg.toy import toy_policy
from jagg.transitions import Transition
from jagg.values import PromptBatch

KINDS = ("flow_sde", "dance_sde", "cps")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_t6_first_update_ratio_in_float32(policy, draw, kind, guidance_scale):
    drawn = draw(policy, kind=kind, guidance_scale=guidance_scale, micro_batch=3)
    assert parity(policy, drawn) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_t6_first_update_ratio_in_bfloat16_is_exactly_zero(draw, kind):
    policy = toy_policy(seed=1, dtype=torch.bfloat16)
    drawn = draw(policy, kind=kind, micro_batch=3)
    assert drawn.latents.dtype == torch.float32
    assert parity(policy, drawn) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_stored_states_replay_the_transition_and_its_log_prob(policy, draw, kind):
    drawn = draw(policy, kind=kind, start=2, stop=5)
    levels = drawn.sigmas.tolist()
    assert drawn.trained_steps == 3
    assert drawn.latents.shape == (4, 8, 1, 4, 4)
    for t in range(3):
        numbers = drawn.transition.coefficients(levels[t + 2], levels[t + 3], levels[1])
        noise = (
            drawn.latents[t + 1] - numbers.b * drawn.latents[t] - numbers.k * drawn.velocities[t]
        ) / numbers.sd
        step = drawn.transition.step(
            drawn.latents[t], drawn.velocities[t], levels[t + 2], levels[t + 3], levels[1], noise
        )
        assert torch.allclose(step.next, drawn.latents[t + 1], atol=1e-6)
        assert torch.allclose(step.log_prob, drawn.log_probs[t], atol=1e-5)
        for p in range(2):
            for g in range(4):
                stream = torch.randn(3, 1, 4, 4, generator=generator_factory(0)("noise", (p, g)))
                assert torch.allclose(noise[4 * p + g], stream[t], atol=1e-4)


def test_steps_outside_the_noisy_range_are_euler_steps(policy, draw):
    drawn = draw(policy, kind="cps", noise_level=0.8, steps=6, start=2, stop=4)
    levels = drawn.sigmas.tolist()
    initial = torch.stack(
        [
            torch.randn(1, 4, 4, generator=generator_factory(0)("initial", (n // 4, n % 4)))
            for n in range(8)
        ]
    )

    def euler(x, steps):
        for i in steps:
            with torch.no_grad():
                v = policy.velocity(x, drawn.sigmas[i].expand(8), drawn.conditioning)
            x = x + (levels[i + 1] - levels[i]) * v
        return x

    assert torch.allclose(drawn.latents[0], euler(initial, (0, 1)), atol=1e-6)
    assert torch.allclose(drawn.final_latents, euler(drawn.latents[2], (4, 5)), atol=1e-6)


def test_shared_initial_noise_is_one_draw_per_group(policy, draw):
    drawn = draw(policy, shared=True)
    assert torch.equal(drawn.latents[0, 0], drawn.latents[0, 3])
    assert not torch.equal(drawn.latents[0, 3], drawn.latents[0, 4])
    assert not torch.equal(drawn.latents[1, 0], drawn.latents[1, 1])
    own = draw(policy)
    assert not torch.equal(own.latents[0, 0], own.latents[0, 1])


def test_noise_does_not_depend_on_micro_batches(policy, draw):
    whole, split = draw(policy), draw(policy, micro_batch=3)
    assert whole.micro_batches == ((0, 8),)
    assert split.micro_batches == ((0, 3), (3, 6), (6, 8))
    assert torch.allclose(whole.latents, split.latents, atol=1e-5)
    assert torch.equal(whole.latents[0], split.latents[0])


def test_same_generators_give_the_same_rollout_and_other_seeds_another(policy, draw):
    assert torch.equal(draw(policy).final_latents, draw(policy).final_latents)
    assert not torch.equal(draw(policy).final_latents, draw(policy, seed=1).final_latents)


def test_a_rollout_leaves_global_random_numbers_and_weights_alone(policy, draw):
    state = torch.get_rng_state()
    before = {name: p.clone() for name, p in policy.trainable().items()}
    drawn = draw(policy)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable().items())
    assert drawn.policy_version == policy.version == 0
    assert not drawn.velocities.requires_grad


def test_guidance_is_the_written_combination(policy, draw):
    drawn = draw(policy, guidance_scale=3.0)
    sigma = drawn.sigmas[0].expand(8)
    with torch.no_grad():
        v_c = policy.velocity(drawn.latents[0], sigma, drawn.conditioning)
        v_u = policy.velocity(drawn.latents[0], sigma, drawn.unconditional)
    assert torch.allclose(drawn.velocities[0], v_u + 3.0 * (v_c - v_u), atol=1e-5)
    assert draw(policy).unconditional is None


def test_progress_counts_every_forward_and_can_cancel(policy, draw):
    seen = []
    draw(policy, micro_batch=3, on_step=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 30) for i in range(1, 31)]

    def cancel(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw(policy, on_step=cancel)


def test_images_are_decoded_by_group(policy, draw):
    drawn = draw(policy)
    assert drawn.images(1).shape == (4, 3, 4, 4)
    assert torch.equal(drawn.images(1), policy.family.decode(drawn.final_latents[4:]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stop": 11}, "noise_stop"),
        ({"start": 5, "stop": 5}, "noise_start"),
        ({"noise_level": 0.0}, "noise_level"),
        ({"kind": "cps", "stop": 10}, "deterministic"),
        ({"kind": "dance_sde", "stop": 10}, "image prediction"),
        ({"micro_batch": -1}, "micro_batch"),
    ],
)
def test_ranges_that_cannot_be_trained_are_refused(policy, draw, arguments, words):
    with pytest.raises(JaggError, match=words):
        draw(policy, **arguments)


def test_flow_sde_may_put_noise_on_its_last_step(policy, draw):
    assert draw(policy, stop=10).trained_steps == 10


def test_micro_batch_ranges_cover_all_samples():
    assert micro_batch_ranges(8, 0) == ((0, 8),)
    assert micro_batch_ranges(8, 3) == ((0, 3), (3, 6), (6, 8))
    assert micro_batch_ranges(2, 5) == ((0, 2),)


def test_ode_samples_start_where_the_rollout_starts_and_follow_euler(policy, draw):
    prompts = PromptBatch(prompts=("prompt 0", "prompt 1"), group_size=4)
    seen = []
    samples = sample_ode(
        policy,
        prompts,
        id="s",
        sigmas=sigma_schedule(10, shift=3.0),
        guidance_scale=1.0,
        micro_batch=5,
        generator=generator_factory(0),
        on_step=lambda done, total: seen.append((done, total)),
    )
    drawn = draw(policy)
    x = drawn.latents[0]
    for i in range(10):
        with torch.no_grad():
            v = policy.velocity(x, drawn.sigmas[i].expand(8), drawn.conditioning)
        x = x + float(drawn.sigmas[i + 1] - drawn.sigmas[i]) * v
    assert torch.allclose(samples.latents, x, atol=1e-5)
    assert torch.equal(samples.images, policy.family.decode(samples.latents))
    assert seen[-1] == (20, 20)


def test_ode_samples_read_the_weights_that_are_lent(policy):
    def sample():
        return sample_ode(
            policy,
            PromptBatch(prompts=("x",), group_size=2),
            id="s",
            sigmas=sigma_schedule(4, shift=1.0),
            guidance_scale=2.0,
            micro_batch=0,
            generator=generator_factory(0),
            on_step=None,
        ).latents

    policy.keep_reference()
    before = sample()
    source = generator(0, "w")
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=source))
    assert not torch.equal(sample(), before)
    with policy.weights("reference"):
        assert torch.equal(sample(), before)


def test_transition_is_recorded(policy, draw):
    assert draw(policy, kind="cps", noise_level=0.8).transition == Transition(
        kind="cps", noise_level=0.8
    )
