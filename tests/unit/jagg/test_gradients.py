"""Acceptance rows of the JAGG reference, section 9.1 (all but knots), and T15."""

from dataclasses import replace

import pytest
import torch

from jagg.errors import JaggError
from jagg.gradients import (
    ExactGradient,
    JaggGradient,
    Tally,
    accumulate,
    forwards_needed,
    route_windows,
    velocity_cosines,
    window_plan,
    windows_of,
)
from jagg.losses import autograd_signal
from jagg.probe import compare_gradients, micro_batch_gradient
from jagg.randomness import generator
from jagg.schedule import sigma_schedule
from jagg.toy import toy_policy
from jagg.update import reference_velocities


def jagg(window=4, fraction=1.0, chunk=0):
    return JaggGradient(window=window, jagg_frac=fraction, node_chunk=chunk)


def gradient(policy, objective, estimator, *, on_policy=True, span=None):
    return micro_batch_gradient(
        policy, objective, estimator, span=span or (0, len(objective.rollout)), on_policy=on_policy
    )


def moved(drawn, policy):
    """The policy after a small change of every weight: the rollout is off-policy for it."""
    source = generator(11, "move")
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(
                0.01 * torch.randn(parameter.shape, generator=source, dtype=parameter.dtype)
            )
    return drawn


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("rank", [0, 3])
def test_straight_path_of_an_affine_velocity_is_exact(
    affine_policy, draw, straight, objective, relative, rank
):
    policy = affine_policy(rank)
    drawn = straight(policy, draw(policy, steps=21, stop=20, group_size=4))
    assert drawn.trained_steps == 20
    scored = objective(drawn)
    exact = gradient(policy, scored, ExactGradient())
    assert relative(gradient(policy, scored, jagg(5)), exact) < 1e-12
    assert relative(gradient(policy, scored, jagg(20)), exact) < 1e-12


@pytest.mark.parametrize("rank", [0, 3])
def test_noise_on_the_path_breaks_exactness(affine_policy, draw, objective, relative, rank):
    policy = affine_policy(rank)
    scored = objective(draw(policy, steps=21, stop=20))
    exact = gradient(policy, scored, ExactGradient())
    assert 1e-2 < relative(gradient(policy, scored, jagg(5)), exact) < 1


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("on_policy", [True, False])
def test_window_of_two_is_exact(affine_policy, draw, objective, relative, rank, on_policy):
    policy = affine_policy(rank)
    scored = objective(draw(policy))
    exact = gradient(policy, scored, ExactGradient(), on_policy=on_policy)
    assert relative(gradient(policy, scored, jagg(2), on_policy=on_policy), exact) < 1e-6


def test_window_of_two_is_exact_in_float32(policy, draw, objective, relative):
    scored = objective(draw(policy))
    assert (
        relative(gradient(policy, scored, jagg(2)), gradient(policy, scored, ExactGradient()))
        < 1e-6
    )


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(
    "estimator",
    [jagg(1, chunk=1), jagg(2, chunk=1), jagg(4, fraction=0.0, chunk=1)],
    ids=["window-1", "every-step-a-node", "fraction-0"],
)
def test_every_step_a_node_equals_exact_bit_for_bit(policy, draw, objective, estimator, on_policy):
    scored = objective(draw(policy))
    exact = gradient(policy, scored, ExactGradient(), on_policy=on_policy)
    assert equal(gradient(policy, scored, estimator, on_policy=on_policy), exact)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_exact_equals_plain_autograd_of_the_whole_loss(
    policy, draw, objective, full_gradient, relative, kind, guidance_scale, kl_weight
):
    policy.keep_reference()
    drawn = draw(policy, kind=kind, guidance_scale=guidance_scale)
    for on_policy in (True, False):
        if not on_policy:
            moved(drawn, policy)
        scored = objective(drawn, kl_weight=kl_weight, clip=1e-3)
        if kl_weight:
            scored = objective(
                drawn,
                kl_weight=kl_weight,
                clip=1e-3,
                reference=reference_velocities(policy, scored, lambda: None),
            )
        expected = full_gradient(policy, scored)
        assert (
            relative(gradient(policy, scored, ExactGradient(), on_policy=on_policy), expected)
            < 1e-5
        )
        assert relative(gradient(policy, scored, jagg(2), on_policy=on_policy), expected) < 1e-5


def test_guidance_flows_through_both_branches(policy, draw, objective, relative):
    drawn = draw(policy, guidance_scale=4.0)
    scored = objective(drawn)
    both = gradient(policy, scored, ExactGradient())
    assert relative(gradient(policy, scored, jagg(2)), both) < 1e-5

    guided = policy.guided_velocity

    def conditional_branch_only(latents, sigma, conditioning, unconditional, scale):
        with torch.no_grad():
            held = policy.velocity(latents, sigma, unconditional)
        return held + scale * (policy.velocity(latents, sigma, conditioning) - held)

    policy.guided_velocity = conditional_branch_only
    detached = gradient(policy, scored, ExactGradient())
    policy.guided_velocity = guided
    assert relative(detached, both) > 0.05


@pytest.mark.parametrize("on_policy", [True, False])
def test_joint_separate_and_chunked_agree(policy, draw, objective, relative, on_policy):
    scored = objective(draw(policy))
    joint = gradient(policy, scored, jagg(4), on_policy=on_policy)
    for chunk in (1, 2, 3, 100):
        assert (
            relative(gradient(policy, scored, jagg(4, chunk=chunk), on_policy=on_policy), joint)
            < 1e-5
        )


@pytest.mark.parametrize("estimator", [ExactGradient(), jagg(4)], ids=["exact", "windows"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_t19_gradient_does_not_depend_on_micro_batches(
    policy, draw, objective, relative, estimator, on_policy
):
    drawn = draw(policy)
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 2.0, -0.5, -1.5, 0.0])
    scored = objective(drawn, advantages=advantages)
    whole = gradient(policy, scored, estimator, on_policy=on_policy)
    for size in (1, 3, 4):
        parts = [
            gradient(
                policy, scored, estimator, on_policy=on_policy, span=(start, min(start + size, 8))
            )
            for start in range(0, 8, size)
        ]
        summed = {name: sum(part[name] for part in parts) for name in whole}
        assert relative(summed, whole) < 1e-6


@pytest.mark.parametrize("on_policy", [True, False])
def test_aggregation_follows_the_written_formula(policy, draw, objective, relative, on_policy):
    """grad = sum over nodes m of J_m^T · sum over steps i of w_im·g_i, spelled out by hand for one window of three."""
    drawn = draw(policy, steps=4, stop=3)
    if not on_policy:
        moved(drawn, policy)
    scored = objective(drawn, clip=1.0)
    sigma = drawn.sigmas.tolist()
    alpha = (sigma[1] - sigma[0]) / (sigma[2] - sigma[0])
    assert alpha == pytest.approx(0.4, abs=1e-6)  # the step index would give .5

    def velocity(step):
        return policy.velocity(
            drawn.latents[step], drawn.sigmas[step].expand(8), drawn.conditioning
        )

    signals = [
        autograd_signal(velocity(step).detach(), scored.terms(step, 0, 8)) for step in range(3)
    ]
    ends = [signals[0] + (1 - alpha) * signals[1], signals[2] + alpha * signals[1]]
    scalar = (velocity(0) * ends[0]).sum() + (velocity(2) * ends[1]).sum()
    trainable = policy.trainable()
    expected = dict(
        zip(trainable, torch.autograd.grad(scalar, list(trainable.values())), strict=True)
    )
    estimate = gradient(policy, scored, jagg(3), on_policy=on_policy)
    assert relative(estimate, expected) < 1e-5
    assert relative(estimate, gradient(policy, scored, ExactGradient(), on_policy=on_policy)) > 1e-3


@pytest.mark.parametrize(
    ("steps", "window", "nodes"),
    [
        (10, 4, (0, 3, 4, 7, 8, 9)),
        (16, 5, (0, 4, 5, 9, 10, 14, 15)),
        (10, 5, (0, 4, 5, 9)),
        (10, 3, (0, 2, 3, 5, 6, 8, 9)),
        (11, 4, (0, 3, 4, 7, 8, 10)),
        (4, 4, (0, 3)),
        (3, 8, (0, 2)),
        (1, 4, (0,)),
    ],
)
def test_windows_and_remainders(steps, window, nodes):
    sigmas = sigma_schedule(steps + 1, shift=3.0).tolist()[:steps]
    plan = window_plan(sigmas, window, [True] * len(windows_of(steps, window)))
    matrix = plan.weight_matrix()
    assert plan.nodes == nodes
    assert matrix.shape == (steps, len(nodes))
    assert torch.allclose(matrix.sum(1), torch.ones(steps, dtype=torch.float64), atol=1e-12)
    for m, step in enumerate(nodes):
        assert matrix[step].tolist() == [1.0 if other == m else 0.0 for other in range(len(nodes))]
    assert bool((matrix >= 0).all())


def test_weights_are_linear_in_sigma_not_in_the_step_index():
    sigmas = sigma_schedule(10, shift=3.0).tolist()
    matrix = window_plan(sigmas[:4], 4, [True]).weight_matrix()
    # sigma 1, .9643, .9231, .875: alpha = (1 - sigma)/.125
    assert matrix[:, 1].tolist() == pytest.approx([0.0, 0.2857, 0.6154, 1.0], abs=1e-4)


def test_a_remainder_of_one_step_keeps_its_own_signal(policy, draw, objective, relative):
    """Weight 0 on it would lose the dominant last step."""
    drawn = draw(policy, steps=10, stop=9)
    plan = jagg(4).plan(drawn)
    assert plan.nodes == (0, 3, 4, 7, 8)
    assert plan.rows[8] == ((4, 1.0),)
    scored = objective(drawn)
    exact = gradient(policy, scored, ExactGradient())
    lost = gradient(policy, objective(replace(drawn, noise_stop=8)), ExactGradient())
    lost = {name: tensor * 8 / 9 for name, tensor in lost.items()}
    assert relative(gradient(policy, scored, jagg(4)), exact) < relative(lost, exact)


def test_fraction_is_of_windows_wide_enough_to_differ():
    sigmas = sigma_schedule(11, shift=1.0).tolist()[:10]
    assert window_plan(sigmas, 4, [True, True, True]).fraction == 1.0
    assert window_plan(sigmas, 4, [True, False, True]).fraction == 0.5
    assert window_plan(sigmas, 4, [False] * 3).fraction == 0.0
    assert window_plan(sigmas, 2, [True] * 5).fraction == 0.0


def test_routing_sends_the_most_parallel_windows_to_jagg():
    cosines = [0.9, 0.9, 0.9, 0.0, 0.2, 0.2, 0.2, 0.0, 0.5, 0.5, 0.5]
    assert route_windows(cosines, 12, 4, 0.0) == [False, False, False]
    assert route_windows(cosines, 12, 4, 0.34) == [True, False, False]
    assert route_windows(cosines, 12, 4, 0.67) == [True, False, True]
    assert route_windows(cosines, 12, 4, 1.0) == [True, True, True]
    assert route_windows(cosines[:9], 10, 4, 0.5) == [True, False, False]


def test_velocity_cosines_average_over_the_batch():
    velocities = torch.zeros(3, 2, 1, 2)
    velocities[0, :, 0] = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    velocities[1, :, 0] = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    velocities[2, :, 0] = torch.tensor([[-1.0, 0.0], [0.0, -1.0]])
    assert velocity_cosines(velocities).tolist() == pytest.approx([0.5, -1.0])


def test_a_fraction_routes_by_the_rollout_and_lies_between(policy, draw, objective, relative):
    drawn = draw(policy, steps=13, stop=12)
    scored = objective(drawn)
    plan = jagg(4, fraction=0.34).plan(drawn)
    cosines = velocity_cosines(drawn.velocities).tolist()
    means = [sum(cosines[first : first + 3]) / 3 for first in (0, 4, 8)]
    best = means.index(max(means))
    assert plan.fraction == pytest.approx(1 / 3)
    assert plan.interior == (4 * best + 1, 4 * best + 2)
    exact = gradient(policy, scored, ExactGradient())
    part, all_windows = (
        relative(gradient(policy, scored, jagg(4, fraction=f)), exact) for f in (0.34, 1.0)
    )
    assert 0 < part < all_windows


@pytest.mark.parametrize(("on_policy", "expected"), [(True, 1), (False, 2)])
def test_one_joint_forward_with_grad_and_none_of_the_interior_on_policy(
    policy, draw, objective, on_policy, expected
):
    drawn = draw(policy, steps=9, stop=8)
    scored = objective(drawn)
    plan = jagg(4).plan(drawn)
    shapes, backwards = [], []
    velocity = policy.family.velocity

    def watched(latents, sigma, conditioning):
        shapes.append((len(latents), torch.is_grad_enabled()))
        return velocity(latents, sigma, conditioning)

    policy.family.velocity = watched

    def backward(value, upstream):
        backwards.append(value.shape)
        torch.autograd.backward(value, upstream)

    accumulate(
        policy,
        scored,
        plan,
        span=(0, 8),
        node_chunk=0,
        on_policy=on_policy,
        backward=backward,
        tally=Tally(torch.device("cpu")),
        on_forward=lambda: None,
    )
    assert forwards_needed(plan, 0, on_policy=on_policy) == expected == len(shapes)
    assert shapes[-1] == (4 * 8, True)
    assert shapes[:-1] == [(4 * 8, False)] * (expected - 1)
    assert backwards == [(4, 8, 1, 4, 4)]


def test_only_trainable_weights_get_gradients(policy, draw, objective):
    frozen = dict(policy.module.named_parameters())["transformer.0.weight"]
    frozen.requires_grad_(False)
    scored = objective(draw(policy))
    accumulate(
        policy,
        scored,
        jagg(4).plan(scored.rollout),
        span=(0, 8),
        node_chunk=0,
        on_policy=True,
        backward=torch.autograd.backward,
        tally=Tally(torch.device("cpu")),
        on_forward=lambda: None,
    )
    assert frozen.grad is None
    assert all(parameter.grad is not None for parameter in policy.trainable().values())


def test_fidelity_on_the_toy_model_stays_above_its_floor(draw, objective):
    policy = toy_policy(seed=2)
    scored = objective(draw(policy, steps=11, stop=10, shift=1.0, prompts=4))
    exact = gradient(policy, scored, ExactGradient())
    by_window = {
        w: compare_gradients(gradient(policy, scored, jagg(w)), exact)[0] for w in (2, 3, 5, 10)
    }
    assert by_window[2] > 1 - 1e-9
    assert by_window[3] > 0.97
    assert by_window[5] > 0.9
    assert by_window[2] > by_window[3] > by_window[5] > by_window[10]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"window": 0}, "window"), ({"fraction": 1.2}, "jagg_frac"), ({"chunk": -1}, "node_chunk")],
)
def test_bad_settings_are_named(arguments, name):
    with pytest.raises(JaggError, match=name):
        jagg(**arguments)
