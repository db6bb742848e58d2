"""Acceptance rows T7, T10, T11, T12 of the algorithms reference, and the closed-form signals of the JAGG reference."""

import math
from dataclasses import replace

import pytest
import torch

from jagg.errors import JaggError
from jagg.losses import (
    KL_FORMS,
    StepTerms,
    autograd_signal,
    clip_from_nats,
    kl_divergence,
    log_ratio,
    step_loss,
    surrogate,
    upstream_signal,
)
from jagg.randomness import generator
from jagg.transitions import TRANSITION_KINDS, Transition, log_prob, transition_mean

SAMPLES, SHAPE = 4, (2, 3, 5)
ELEMENTS = 30


def randn(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed, "losses"))


def make_terms(kind, *, kl_weight=0.0, kl_form="exact", advantages=None, clip=1e-3):
    """Terms of a step that was really drawn, and the velocity that it was drawn with."""
    transition = Transition(kind=kind, noise_level=0.7)
    x, v, z = (randn(SAMPLES, *SHAPE, seed=s) for s in range(3))
    step = transition.step(x, v, 0.75, 0.6667, 0.9643, z)
    terms = StepTerms(
        latents=x,
        next_latents=step.next,
        old_log_probs=step.log_prob,
        advantages=torch.tensor([1.5, -0.5, 0.25, -2.0]) if advantages is None else advantages,
        weights=torch.ones(SAMPLES),
        kind=kind,
        coefficients=transition.coefficients(0.75, 0.6667, 0.9643),
        clip=clip,
        kl_weight=kl_weight,
        kl_form=kl_form,
        reference=v + 0.1 * randn(SAMPLES, *SHAPE, seed=3) if kl_weight else None,
        count=SAMPLES * 5,
    )
    return terms, v, z


def relative(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde"])
def test_t7_gradient_at_ratio_one(kind):
    terms, v, z = make_terms(kind)
    numbers = terms.coefficients
    per_sample = terms.advantages.view(-1, 1, 1, 1)
    expected = -per_sample * numbers.k / (ELEMENTS * numbers.sd) * z / terms.count
    assert relative(autograd_signal(v, terms), expected) < 1e-5
    assert relative(upstream_signal(v, terms, on_policy=True).gradient, expected) < 1e-5


def test_t7_gradient_of_cps_at_ratio_one():
    terms, v, z = make_terms("cps")
    numbers = terms.coefficients
    per_sample = terms.advantages.view(-1, 1, 1, 1)
    expected = -per_sample * 2 * numbers.k * numbers.sd / ELEMENTS * z / terms.count
    assert relative(autograd_signal(v, terms), expected) < 1e-5
    assert relative(upstream_signal(v, terms, on_policy=True).gradient, expected) < 1e-5


def test_t7_identical_samples_with_advantages_that_cancel_give_zero():
    terms, v, _ = make_terms("flow_sde", advantages=torch.tensor([1.0, -3.0, 0.5, 1.5]))
    same = replace(
        terms,
        latents=terms.latents[:1].expand(4, *SHAPE),
        next_latents=terms.next_latents[:1].expand(4, *SHAPE),
    )
    gradient = upstream_signal(v[:1].expand(4, *SHAPE), same, on_policy=True).gradient
    assert float(gradient.sum(0).abs().max()) < 1e-7
    assert float(gradient.abs().max()) > 1e-4


@pytest.mark.parametrize("kl_form", [None, *KL_FORMS])
@pytest.mark.parametrize("kind", TRANSITION_KINDS)
def test_closed_form_equals_autograd_at_ratio_one(kind, kl_form):
    terms, v, _ = make_terms(kind, kl_weight=0.3 if kl_form else 0.0, kl_form=kl_form or "exact")
    closed = upstream_signal(v, terms, on_policy=True)
    assert relative(closed.gradient, autograd_signal(v, terms)) < 1e-5
    assert float(closed.log_ratio.abs().max()) == 0
    assert bool((closed.kl > 0).all()) is (kl_form is not None)


@pytest.mark.parametrize("kl_form", [None, *KL_FORMS])
@pytest.mark.parametrize("kind", TRANSITION_KINDS)
def test_closed_form_equals_autograd_off_policy_with_clipping_on_both_sides(kind, kl_form):
    clip = 0.01
    terms, v, _ = make_terms(
        kind,
        kl_weight=0.3 if kl_form else 0.0,
        kl_form=kl_form or "exact",
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        clip=clip,
    )
    v = v + 0.05 * randn(SAMPLES, *SHAPE, seed=9)
    for shift, clipped in (
        (2 * clip, [True, True, False, False]),
        (-2 * clip, [False, False, True, True]),
        (0.5 * clip, [False] * 4),
    ):
        moved = replace(terms, old_log_probs=terms.old_log_probs + log_ratio(v, terms) - shift)
        signal = upstream_signal(v, moved, on_policy=False)
        assert signal.clipped.tolist() == clipped
        assert signal.log_ratio.tolist() == pytest.approx([shift] * 4, abs=1e-5)
        expected = autograd_signal(v, moved)
        assert float((signal.gradient - expected).norm()) <= 1e-5 * float(
            autograd_signal(v, replace(moved, clip=10.0)).norm()
        )
        assert torch.allclose(signal.policy, surrogate(log_ratio(v, moved), moved.advantages, clip))


@pytest.mark.parametrize("kind", TRANSITION_KINDS)
@pytest.mark.parametrize(
    ("advantage", "log_r", "flows"),
    [(1.0, 0.02, False), (1.0, -0.02, True), (-1.0, -0.02, False), (-1.0, 0.02, True)],
)
def test_t10_clip_holds_only_the_profitable_side(kind, advantage, log_r, flows):
    terms, v, _ = make_terms(kind, advantages=torch.full((4,), advantage), clip=0.01)
    moved = replace(terms, old_log_probs=terms.old_log_probs - log_r)
    for gradient in (
        autograd_signal(v, moved),
        upstream_signal(v, moved, on_policy=False).gradient,
    ):
        assert bool((gradient != 0).any()) is flows


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_an_overflowing_ratio_of_an_idle_sample_gives_zero_not_nan(advantage):
    terms, v, _ = make_terms("flow_sde", advantages=torch.full((4,), advantage))
    moved = replace(terms, old_log_probs=terms.old_log_probs - 1000)
    assert torch.equal(upstream_signal(v, moved, on_policy=False).gradient, torch.zeros_like(v))


def test_weight_zero_takes_a_sample_out_of_policy_and_kl():
    terms, v, _ = make_terms("flow_sde", kl_weight=0.5)
    terms = replace(terms, weights=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    gradient = upstream_signal(v, terms, on_policy=True).gradient
    assert torch.equal(gradient[1], torch.zeros(SHAPE))
    assert relative(gradient, autograd_signal(v, terms)) < 1e-5


@pytest.mark.parametrize("kl_form", KL_FORMS)
@pytest.mark.parametrize("kind", TRANSITION_KINDS)
def test_t11_kl_is_zero_with_zero_gradient_at_the_reference(kind, kl_form):
    terms, v, _ = make_terms(kind, kl_weight=1.0, kl_form=kl_form, advantages=torch.zeros(4))
    terms = replace(terms, reference=v)
    signal = upstream_signal(v, terms, on_policy=True)
    assert torch.equal(signal.kl, torch.zeros(4))
    assert torch.equal(signal.gradient, torch.zeros_like(v))
    assert torch.equal(autograd_signal(v, terms), torch.zeros_like(v))


@pytest.mark.parametrize("kind", TRANSITION_KINDS)
def test_t11_exact_kl_is_that_of_two_gaussians(kind):
    terms, v, _ = make_terms(kind, kl_weight=1.0)
    numbers = terms.coefficients
    mean = transition_mean(terms.latents, v, numbers)
    mean_reference = transition_mean(terms.latents, terms.reference, numbers)
    one = torch.distributions.Normal(mean, numbers.sd)
    other = torch.distributions.Normal(mean_reference, numbers.sd)
    expected = torch.distributions.kl_divergence(one, other).flatten(1).mean(1)
    assert torch.allclose(
        kl_divergence(v, terms.reference, numbers, form="exact"), expected, rtol=1e-4
    )


def test_t11_kl_of_a_known_shift_in_every_form():
    _, v, _ = make_terms("flow_sde")
    numbers = Transition(kind="flow_sde", noise_level=0.7).coefficients(0.75, 0.6667, 0.9643)
    reference = v - 0.2
    k, sd, std_dev = 0.0833 * 1.245, 0.3499, 1.2124
    for form, scale in (("exact", 2 * sd**2), ("flow_grpo", 2 * std_dev**2), ("x", 1.0)):
        expected = (0.2 * k) ** 2 / scale
        assert kl_divergence(v, reference, numbers, form=form).tolist() == pytest.approx(
            [expected] * 4, rel=1e-3
        )


def test_kl_without_a_reference_is_refused():
    terms, v, _ = make_terms("cps")
    with pytest.raises(JaggError, match="reference"):
        upstream_signal(v, replace(terms, kl_weight=0.1), on_policy=True)
    with pytest.raises(JaggError, match="reference"):
        step_loss(v, replace(terms, kl_weight=0.1))


@pytest.mark.parametrize("rho", [1e-3, 7.8e-3, 3e-2])
def test_t12_ratio_statistics(rho):
    elements, draws, sd = 65_536, 60, 0.5
    source = generator(0, "ratio")
    scored, held = [], []
    for _ in range(draws):
        z = torch.randn(1, elements, generator=source, dtype=torch.float64)
        shift = rho * sd * torch.randn(1, elements, generator=source, dtype=torch.float64)
        held.append(log_prob(sd * z, torch.zeros_like(z), sd, kind="flow_sde"))
        scored.append(log_prob(sd * z, shift, sd, kind="flow_sde"))
    log_r = torch.cat(scored) - torch.cat(held)
    spread = rho / math.sqrt(elements)
    assert float(log_r.mean()) == pytest.approx(
        -(rho**2) / 2, abs=4 * spread / math.sqrt(draws) + 0.01 * rho**2
    )
    assert float(log_r.std()) == pytest.approx(spread, rel=0.3)
    # Table of section 5: the share of ratios above 1 is .44, .165 and 0.
    expected = {1e-3: 0.44, 7.8e-3: 0.165, 3e-2: 0.0}[rho]
    assert float((log_r > 0).double().mean()) == pytest.approx(
        expected, abs=0.2 if rho < 3e-2 else 0
    )


@pytest.mark.parametrize(("nats", "clip"), [(6.6, 1.007e-4), (0.66, 1.007e-5), (0.1835, 2.8e-6)])
def test_clip_in_nats_at_the_latent_size_of_the_literature(nats, clip):
    assert clip_from_nats(nats, 65_536) == pytest.approx(clip, rel=1e-3)
