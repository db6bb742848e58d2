"""Acceptance rows T1-T5 and the table of section 12 of the algorithms reference; right values are literals."""

import math
from itertools import pairwise

import pytest
import torch
from torch.distributions import Normal

from jagg.errors import JaggError, ShapeError
from jagg.randomness import generator
from jagg.schedule import sigma_schedule
from jagg.transitions import Transition, cps_step, dance_sde_step, flow_sde_step, log_prob, ode_step


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=generator(seed, "test"), dtype=dtype)


def exact_velocity(x, sigma, *, mean, std):
    """The velocity of data N(mean, std²)."""
    d = x - (1 - sigma) * mean
    q = (1 - sigma) ** 2 * std**2 + sigma**2
    return sigma * d / q - (mean + (1 - sigma) * std**2 * d / q)


def walk(kind, noise_level, steps, *, std, samples, until=0.0):
    """Follow the transition with exact velocities down to level `until`; returns the states."""
    levels = sigma_schedule(steps, shift=3.0).tolist()
    transition = Transition(kind=kind, noise_level=noise_level)
    source = generator(0, "walk")
    x = torch.randn(samples, 1, generator=source)
    for sigma, sigma_next in pairwise(levels):
        if sigma < until + 1e-3:
            break
        v = exact_velocity(x, sigma, mean=0.5, std=std)
        noise = torch.randn(samples, 1, generator=source)
        x = transition.step(x, v, sigma, sigma_next, levels[1], noise).next
    return x


KINDS = ("flow_sde", "dance_sde", "cps")


@pytest.mark.parametrize("kind", KINDS)
def test_t1_zero_noise_is_the_diffusers_euler_step(kind):
    from diffusers import FlowMatchEulerDiscreteScheduler  # slow to import, and for this test alone

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 0.1, 10).tolist())
    sigmas = sigma_schedule(10, shift=3.0)
    assert torch.allclose(scheduler.sigmas, sigmas, atol=1e-6)
    levels = sigmas.tolist()
    transition = Transition(kind=kind, noise_level=0.0)
    ours = theirs = randn(4, 3, 5, 5)
    for i, t in enumerate(scheduler.timesteps):
        velocity = randn(4, 3, 5, 5, seed=i + 1)
        step = transition.step(
            ours, velocity, levels[i], levels[i + 1], levels[1], randn(4, 3, 5, 5, seed=99)
        )
        theirs = scheduler.step(velocity, t, theirs).prev_sample
        ours = step.next
        assert step.log_prob is None
        assert step.std == 0
        assert (ours - theirs).abs().max() < 1e-6


def test_t1_ode_step_has_no_log_prob_and_is_euler():
    x, v = randn(2, 3), randn(2, 3, seed=1)
    step = ode_step(x, v, 0.5, 0.25)
    assert step.log_prob is None
    assert torch.equal(step.next, x - 0.25 * v)


def test_cps_with_tiny_noise_tends_to_the_euler_step():
    x, v, z = randn(2, 9), randn(2, 9, seed=1), randn(2, 9, seed=2)
    step = cps_step(x, v, 0.6, 0.4, noise_level=1e-5, noise=z)
    assert torch.allclose(step.next, x - 0.2 * v, atol=1e-4)


T2 = [
    (10, "cps", 0.0, 0.370),
    (10, "flow_sde", 0.7, 0.424),
    (10, "dance_sde", 0.3, 0.385),
    (10, "cps", 0.7, 0.328),
    (40, "cps", 0.0, 0.465),
    (40, "flow_sde", 0.7, 0.480),
    (40, "dance_sde", 0.3, 0.468),
    (40, "cps", 0.7, 0.392),
]
T2_SLOW = [
    (200, "cps", 0.0, 0.493),
    (200, "flow_sde", 0.7, 0.497),
    (200, "dance_sde", 0.3, 0.493),
    (200, "cps", 0.7, 0.415),
    (1000, "cps", 0.0, 0.500),
    (1000, "flow_sde", 0.7, 0.500),
    (1000, "dance_sde", 0.3, 0.499),
    (1000, "cps", 0.7, 0.423),
]
SAMPLING_ERROR = 0.002  # four standard errors of a std near .5 from 4e5 samples, and the third decimal of the table


def check_marginal(steps, kind, noise_level, std):
    x = walk(kind, noise_level, steps, std=0.5, samples=400_000)
    assert float(x.mean()) == pytest.approx(0.5, abs=SAMPLING_ERROR + 0.001)
    assert float(x.std()) == pytest.approx(std, abs=SAMPLING_ERROR)


@pytest.mark.parametrize(("steps", "kind", "noise_level", "std"), T2)
def test_t2_final_marginal(steps, kind, noise_level, std):
    check_marginal(steps, kind, noise_level, std)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("steps", "kind", "noise_level", "std"), T2_SLOW)
def test_t2_final_marginal_of_long_schedules(steps, kind, noise_level, std):
    check_marginal(steps, kind, noise_level, std)


@pytest.mark.parametrize(
    ("kind", "noise_level", "std"),
    [
        ("cps", 0.0, 0.6838),
        ("flow_sde", 0.7, 0.7362),
        ("dance_sde", 0.3, 0.6831),
        ("cps", 0.7, 0.6750),
    ],
)
def test_t2_marginal_half_way(kind, noise_level, std):
    x = walk(kind, noise_level, 10, std=0.5, samples=400_000, until=0.6667)
    assert float(x.mean()) == pytest.approx(0.1667, abs=0.0035)
    assert float(x.std()) == pytest.approx(std, abs=0.003)


@pytest.mark.parametrize(
    ("kind", "noise_level", "stds"),
    [
        ("cps", 0.0, (0, 0, 0)),
        ("cps", 0.7, (0, 0, 0)),
        ("flow_sde", 0.7, (0.228, 0.114, 0.057)),
        ("dance_sde", 0.3, (0.158, 0.122, 0.099)),
        ("dance_sde", 0.7, (0.479, 0.499, 0.674)),
    ],
)
def test_t3_point_mass(kind, noise_level, stds):
    for steps, std in zip((10, 20, 40), stds, strict=True):
        x = walk(kind, noise_level, steps, std=0.0, samples=100_000)
        tolerance = 1e-6 if std == 0 else 0.01 * std + 0.001
        assert float(x.std()) == pytest.approx(std, abs=tolerance)


@pytest.mark.parametrize(
    ("kind", "noise_level", "std"),
    [
        ("cps", 0.0, 0.2500),
        ("cps", 0.7, 0.2495),
        ("flow_sde", 0.7, 0.322),
        ("dance_sde", 0.3, 0.266),
        ("dance_sde", 0.7, 0.334),
    ],
)
def test_t3_point_mass_before_the_last_step(kind, noise_level, std):
    x = walk(kind, noise_level, 10, std=0.0, samples=100_000, until=0.25)
    assert float(x.std()) == pytest.approx(std, abs=0.003)


@pytest.mark.parametrize("sigma", [1.0, 0.9643, 0.4286])
def test_t4_flow_sde_log_prob_is_the_gaussian_one(sigma):
    x, v, z = randn(3, 2, 4, 4), randn(3, 2, 4, 4, seed=1), randn(3, 2, 4, 4, seed=2)
    sigma_next, sigma_max = sigma - 0.0357, 0.9643
    step = flow_sde_step(x, v, sigma, sigma_next, noise_level=0.7, sigma_max=sigma_max, noise=z)
    std_dev = 0.7 * math.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))
    dt = sigma_next - sigma
    mean = (
        x * (1 + std_dev**2 / (2 * sigma) * dt)
        + v * (1 + std_dev**2 * (1 - sigma) / (2 * sigma)) * dt
    )
    expected = Normal(mean, std_dev * math.sqrt(-dt)).log_prob(step.next).flatten(1).mean(1)
    assert torch.allclose(step.mean, mean, atol=1e-6)
    assert (step.log_prob - expected).abs().max() < 1e-6


def test_t4_dance_sde_log_prob_is_the_gaussian_one():
    x, v, z = randn(3, 20), randn(3, 20, seed=1), randn(3, 20, seed=2)
    sigma, sigma_next, eta = 0.75, 0.6667, 0.3
    step = dance_sde_step(x, v, sigma, sigma_next, noise_level=eta, noise=z)
    dt = sigma_next - sigma
    x0 = x - sigma * v
    score = -(x - (1 - sigma) * x0) / sigma**2
    mean = x + v * dt - 0.5 * eta**2 * score * dt
    expected = Normal(mean, eta * math.sqrt(-dt)).log_prob(step.next).mean(1)
    assert torch.allclose(step.mean, mean, atol=1e-6)
    assert (step.log_prob - expected).abs().max() < 1e-6


def test_t4_cps_log_prob_is_the_plain_mean_square():
    x, v, z = randn(3, 2, 20), randn(3, 2, 20, seed=1), randn(3, 2, 20, seed=2)
    sigma, sigma_next = 0.75, 0.6667
    step = cps_step(x, v, sigma, sigma_next, noise_level=0.8, noise=z)
    std = sigma_next * math.sin(0.8 * math.pi / 2)
    x0, x1 = x - sigma * v, x + (1 - sigma) * v
    mean = (1 - sigma_next) * x0 + math.sqrt(sigma_next**2 - std**2) * x1
    assert torch.allclose(step.mean, mean, atol=1e-6)
    assert torch.allclose(step.next, mean + std * z, atol=1e-6)
    assert torch.allclose(step.log_prob, -((step.next - mean) ** 2).flatten(1).mean(1), atol=1e-7)


@pytest.mark.parametrize("noise_level", [0.3, 0.7])
def test_t5_expected_log_prob_of_own_samples(noise_level):
    elements = 65_536
    x, v = randn(64, elements), randn(64, elements, seed=1)
    step = flow_sde_step(
        x,
        v,
        0.75,
        0.6667,
        noise_level=noise_level,
        sigma_max=0.9643,
        noise=randn(64, elements, seed=2),
    )
    expected = -0.5 - math.log(step.std) - 0.5 * math.log(2 * math.pi)
    spread = 1 / math.sqrt(2 * elements)
    assert spread == pytest.approx(2.8e-3, abs=5e-5)
    assert float(step.log_prob.mean()) == pytest.approx(expected, abs=4 * spread / 8)
    assert float(step.log_prob.std()) == pytest.approx(spread, rel=0.35)


SECTION_12 = [
    # sigma, |dt|, std_dev, sd, |k|, |k|/sd, |k|/|dt|, CPS std, CPS |k|, CPS 2|k|std
    (1.0000, 0.0357, 3.7041, 0.7000, 0.03571, 0.0510, 1.000, 0.8592, 0.0357, 0.0614),
    (0.9643, 0.0412, 3.6373, 0.7384, 0.05130, 0.0695, 1.245, 0.8225, 0.0592, 0.0974),
    (0.9231, 0.0481, 2.4249, 0.5317, 0.05986, 0.1126, 1.245, 0.7796, 0.0848, 0.1323),
    (0.8750, 0.0568, 1.8520, 0.4415, 0.07074, 0.1602, 1.245, 0.7290, 0.1127, 0.1643),
    (0.8182, 0.0682, 1.4849, 0.3877, 0.08489, 0.2189, 1.245, 0.6683, 0.1426, 0.1906),
    (0.7500, 0.0833, 1.2124, 0.3500, 0.10375, 0.2964, 1.245, 0.5940, 0.1743, 0.2071),
    (0.6667, 0.1042, 0.9899, 0.3195, 0.12969, 0.4059, 1.245, 0.5012, 0.2065, 0.2070),
    (0.5625, 0.1339, 0.7937, 0.2905, 0.16674, 0.5740, 1.245, 0.3819, 0.2363, 0.1805),
    (0.4286, 0.1786, 0.6062, 0.2562, 0.22232, 0.8679, 1.245, 0.2228, 0.2566, 0.1143),
    (0.2500, 0.2500, 0.4041, 0.2021, 0.31125, 1.5403, 1.245, 0.0, 0.2500, 0.0),
]


@pytest.mark.parametrize("step", range(10))
def test_section_12_weights(step):
    levels = sigma_schedule(10, shift=3.0).tolist()
    sigma, dt, std_dev, sd, k, weight, guard, cps_std, cps_k, cps_weight = SECTION_12[step]
    flow = Transition(kind="flow_sde", noise_level=0.7).coefficients(
        levels[step], levels[step + 1], levels[1]
    )
    cps = Transition(kind="cps", noise_level=0.7).coefficients(
        levels[step], levels[step + 1], levels[1]
    )
    assert levels[step] == pytest.approx(sigma, abs=5e-5)
    assert levels[step] - levels[step + 1] == pytest.approx(dt, abs=6e-5)
    assert flow.std_dev == pytest.approx(std_dev, abs=5e-5)
    assert flow.sd == pytest.approx(sd, abs=6e-5)
    assert flow.k == pytest.approx(-k, abs=6e-6)
    assert abs(flow.k) / flow.sd == pytest.approx(weight, abs=6e-5)
    assert abs(flow.k) / (levels[step] - levels[step + 1]) == pytest.approx(guard, abs=6e-4)
    assert cps.sd == cps.std_dev == pytest.approx(cps_std, abs=6e-5)
    assert cps.k == pytest.approx(-cps_k, abs=6e-5)
    assert 2 * abs(cps.k) * cps.sd == pytest.approx(cps_weight, abs=6e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_agree_with_autograd(kind):
    x = randn(2, 6, dtype=torch.float64).requires_grad_()
    v = randn(2, 6, seed=1, dtype=torch.float64).requires_grad_()
    transition = Transition(kind=kind, noise_level=0.4)
    step = transition.step(x, v, 0.75, 0.5, 0.9, randn(2, 6, seed=2, dtype=torch.float64))
    by_x, by_v = torch.autograd.grad(step.mean.sum(), (x, v))
    numbers = transition.coefficients(0.75, 0.5, 0.9)
    assert torch.allclose(by_x, torch.full_like(x, numbers.b))
    assert torch.allclose(by_v, torch.full_like(v, numbers.k))
    assert numbers.k < 0


def test_states_are_rounded_to_storage_before_they_are_scored():
    x, v, z = randn(4, 512).bfloat16(), randn(4, 512, seed=1).bfloat16(), randn(4, 512, seed=2)
    step = flow_sde_step(x, v, 0.2, 0.19, noise_level=0.3, sigma_max=0.9, noise=z)
    assert step.next.dtype == torch.bfloat16
    assert step.log_prob.dtype == torch.float32
    again = log_prob(step.next, step.mean, step.std, kind="flow_sde")
    assert torch.equal(step.log_prob, again)
    unrounded = log_prob(step.mean + step.std * z, step.mean, step.std, kind="flow_sde")
    assert not torch.equal(unrounded, again)


def test_arithmetic_is_float32_for_half_precision_inputs():
    x, v, z = randn(4, 64), randn(4, 64, seed=1), randn(4, 64, seed=2)
    x, v = x.half().float(), v.half().float()
    wide = flow_sde_step(x, v, 0.75, 0.5, noise_level=0.7, sigma_max=0.9, noise=z)
    narrow = flow_sde_step(x.half(), v.half(), 0.75, 0.5, noise_level=0.7, sigma_max=0.9, noise=z)
    assert torch.equal(wide.mean, narrow.mean)


def test_packed_latents_of_any_rank_give_one_log_prob_per_sample():
    for shape in ((5, 7), (5, 7, 3), (5, 2, 3, 4, 2)):
        step = cps_step(
            randn(*shape),
            randn(*shape, seed=1),
            0.75,
            0.5,
            noise_level=0.8,
            noise=randn(*shape, seed=2),
        )
        assert step.log_prob.shape == (5,)


def test_the_last_cps_step_is_deterministic():
    step = cps_step(
        randn(2, 3), randn(2, 3, seed=1), 0.25, 0.0, noise_level=0.8, noise=randn(2, 3, seed=2)
    )
    assert step.log_prob is None


@pytest.mark.parametrize(
    ("kind", "noise_level", "words"),
    [
        ("sde", 0.7, "flow_sde"),
        ("cps", 1.2, "at most 1"),
        ("flow_sde", -0.1, "noise_level"),
        ("dance_sde", math.inf, "noise_level"),
    ],
)
def test_bad_transitions_are_named(kind, noise_level, words):
    with pytest.raises(JaggError, match=words):
        Transition(kind=kind, noise_level=noise_level)


def test_shapes_must_agree():
    with pytest.raises(ShapeError, match="velocity"):
        ode_step(randn(2, 3), randn(2, 1, 3), 0.5, 0.25)
