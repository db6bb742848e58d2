"""The update: acceptance rows T9, T17 (library level) and T19, the guard, refusals and statistics."""

from dataclasses import replace

import pytest
import torch

from jagg.ema import Ema
from jagg.errors import JaggError, NonFiniteError, ShapeError, StaleRolloutError
from jagg.optimizers import adamw, load_optimizer_state, optimizer_state
from jagg.randomness import generator, generator_factory
from jagg.state import load_state, save_state
from jagg.toy import toy_policy
from jagg.transitions import Transition
from jagg.update import GrpoConfig, JaggConfig, grpo_update

NAN = float("nan")


def make_optimizer(policy, lr=1e-3):
    return adamw(policy, lr=lr, betas=(0.9, 0.95), weight_decay=0.01, eps=1e-8)


def update(
    policy,
    drawn,
    reward,
    optimizer=None,
    *,
    jagg=None,
    seed=0,
    on_step=None,
    backward=None,
    ema=None,
    reduce=None,
    **config,
):
    return grpo_update(
        policy,
        drawn,
        reward,
        config=GrpoConfig(**config),
        jagg=jagg or JaggConfig(),
        optimizer=optimizer or make_optimizer(policy),
        generator=generator_factory(seed),
        on_step=on_step,
        backward=backward,
        ema=ema,
        reduce=reduce,
    ).values


def weights(policy):
    return {name: p.detach().clone() for name, p in policy.trainable().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def brightness(drawn):
    return torch.cat([drawn.images(p).mean((1, 2, 3)) for p in range(len(drawn.prompts.prompts))])


def train(draw, reward, *, sign, ticks=50, kind="cps", jagg=None, **config):
    policy = toy_policy(seed=0)
    optimizer = make_optimizer(policy, lr=4e-3)
    means = []
    for tick in range(ticks):
        drawn = draw(
            policy,
            kind=kind,
            noise_level=0.7,
            steps=6,
            stop=4,
            shift=1.0,
            shared=True,
            group_size=8,
            seed=tick,
        )
        values = brightness(drawn)
        means.append(float(values.mean()))
        update(
            policy,
            drawn,
            reward(drawn, sign * values),
            optimizer,
            jagg=jagg,
            seed=tick,
            normalise="group_std",
            **config,
        )
    first, last = sum(means[:5]) / 5, sum(means[-5:]) / 5
    return last - first, policy


@pytest.mark.parametrize("estimator", ["exact", "windows"])
@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
def test_t9_reward_rises_with_its_sign_and_falls_against_it(draw, reward, kind, estimator):
    jagg = JaggConfig(estimator=estimator, window=4)
    assert train(draw, reward, sign=1, kind=kind, jagg=jagg)[0] > 0.1
    assert train(draw, reward, sign=-1, kind=kind, jagg=jagg)[0] < -0.1


def test_t9_shuffled_advantages_do_not_learn(draw, reward):
    learnt = train(draw, reward, sign=1)[0]
    control = train(draw, reward, sign=1, advantage_control="shuffle")[0]
    assert abs(control) < 0.5 * learnt


def test_t9_constant_reward_without_kl_leaves_weights_bitwise_unchanged(policy, draw, reward):
    optimizer = make_optimizer(policy)
    update(policy, draw(policy), reward(draw(policy)), optimizer)
    before, moments, version = weights(policy), optimizer_state(policy, optimizer), policy.version
    seen = []
    drawn = draw(policy)
    stats = update(
        policy, drawn, reward(drawn, [0.3] * 8), optimizer, on_step=lambda *x: seen.append(x)
    )
    assert same(weights(policy), before)
    assert policy.version == version == 1
    assert stats["update/skipped"] == 1
    assert stats["grad/norm"] == 0
    assert stats["advantage/zero_fraction"] == 1
    assert seen == []
    after = optimizer_state(policy, optimizer)
    assert all(torch.equal(after[name]["exp_avg"], moments[name]["exp_avg"]) for name in moments)


def test_zero_advantages_give_a_zero_gradient_and_no_step_even_when_a_step_is_forced(
    policy, draw, reward
):
    drawn = draw(policy)
    before = weights(policy)
    reduced = []
    stats = update(
        policy,
        drawn,
        reward(drawn, [1.0] * 8),
        reduce=lambda grads: reduced.extend(g.abs().max() for g in grads),
    )
    assert len(reduced) == 4
    assert max(reduced) == 0
    assert same(weights(policy), before)
    assert stats["update/skipped"] == 1


def test_constant_reward_with_kl_pulls_back_to_the_reference(policy, draw, reward):
    policy.keep_reference()
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.5)
    for _ in range(3):
        drawn = draw(policy)
        update(policy, drawn, reward(drawn), optimizer)
    drifts = []
    for tick in range(4):
        drawn = draw(policy, seed=tick)
        stats = update(policy, drawn, reward(drawn, [1.0] * 8), optimizer, kl_weight=1.0)
        drifts.append(stats["kl"])
        assert stats["update/skipped"] == 0
    assert drifts[0] > 0
    assert drifts[-1] < drifts[0]


def test_kl_is_zero_at_the_reference_and_its_forwards_are_skipped_at_weight_zero(
    policy, draw, reward
):
    policy.keep_reference()
    drawn = draw(policy, micro_batch=4)
    asked = []
    lend = policy.weights
    policy.weights = lambda which: (asked.append(which), lend(which))[1]
    assert update(policy, drawn, reward(drawn))["kl"] == 0
    assert asked == []
    fresh = toy_policy(seed=1)
    fresh.keep_reference()
    stats = update(fresh, draw(fresh, micro_batch=4), reward(drawn), kl_weight=0.1)
    assert stats["kl"] == pytest.approx(0, abs=1e-9)
    assert stats["update/forwards"] == 2 + 2 * 9


def test_kl_needs_a_reference(policy, draw, reward):
    drawn = draw(policy)
    with pytest.raises(JaggError, match="keep_reference"):
        update(policy, drawn, reward(drawn), kl_weight=0.1)


@pytest.mark.parametrize("estimator", ["exact", "windows"])
def test_t19_update_does_not_depend_on_micro_batches(draw, reward, estimator):
    results = []
    for micro_batch in (0, 1, 3, 4):
        policy = toy_policy(seed=1)
        drawn = draw(policy)
        spans = tuple((i, min(i + (micro_batch or 8), 8)) for i in range(0, 8, micro_batch or 8))
        drawn = replace(drawn, micro_batches=spans)
        values = [0.1, 0.1, 0.1, 0.1, 0.7, NAN, 0.2, 0.4]
        update(
            policy,
            drawn,
            reward(drawn, values),
            jagg=JaggConfig(estimator=estimator),
            reduce=lambda grads: results.append(torch.cat([g.flatten() for g in grads])),
        )
    assert len(results) == 4
    for other in results[1:]:
        assert float((other - results[0]).norm() / results[0].norm()) < 1e-6


def test_samples_of_weight_zero_count_in_n(policy, draw, reward):
    """A NaN reward leaves a group, but does not raise the weight of the others."""
    gradients = []
    for values in (
        [0.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5],
        [0.0, 1.0, 0.0, 1.0, NAN, NAN, NAN, NAN],
    ):
        fresh = toy_policy(seed=1)
        drawn = draw(fresh)
        optimizer = torch.optim.SGD(fresh.trainable().values(), lr=1.0)
        update(fresh, drawn, reward(drawn, values), optimizer, normalise="none", max_grad_norm=0)
        gradients.append(weights(fresh))
    assert same(*gradients)


def test_accumulation_makes_one_optimizer_step_per_so_many_micro_batches(policy, draw, reward):
    drawn = draw(policy, micro_batch=2)
    stats = update(policy, drawn, reward(drawn), accumulation=2)
    assert stats["update/optimizer_steps"] == 2
    assert policy.version == 2
    # First step: 2 micro-batches, nodes only. Second: 2 micro-batches, interior and nodes.
    assert stats["update/forwards"] == 2 * 1 + 2 * 2
    assert stats["ratio/max_abs_log"] > 0


def test_inner_epochs_are_off_policy_after_the_first(policy, draw, reward):
    drawn = draw(policy)
    seen = []
    stats = update(
        policy,
        drawn,
        reward(drawn),
        make_optimizer(policy, lr=1e-2),
        inner_epochs=3,
        clip_nats=1e-3,
        on_step=lambda done, total: seen.append((done, total)),
    )
    assert policy.version == 3
    assert stats["ratio/max_abs_log"] > 1e-3
    assert 0 < stats["clip/fraction"] < 1
    assert seen == [(i, 5) for i in range(1, 6)]
    on_policy = update(toy_policy(seed=1), drawn, reward(drawn))
    assert on_policy["ratio/max_abs_log"] < 1e-6
    assert on_policy["clip/fraction"] == 0


def test_off_policy_windows_of_two_equal_exact(draw, reward):
    results = []
    for jagg in (JaggConfig(estimator="exact"), JaggConfig(window=2, node_chunk=1)):
        policy = toy_policy(seed=1)
        drawn = draw(policy)
        update(policy, drawn, reward(drawn), jagg=jagg, inner_epochs=3)
        results.append(weights(policy))
    assert same(*results)


def test_gradient_norm_is_clipped(draw, reward):
    moves = []
    for bound in (0.0, 1e-3):
        policy = toy_policy(seed=1)
        before = weights(policy)
        drawn = draw(policy)
        optimizer = torch.optim.SGD(policy.trainable().values(), lr=1.0)
        stats = update(policy, drawn, reward(drawn), optimizer, max_grad_norm=bound)
        moved = torch.cat([(p - before[name]).flatten() for name, p in weights(policy).items()])
        moves.append(float(moved.norm()))
    assert stats["grad/norm"] == pytest.approx(moves[0], rel=1e-4)
    assert moves[1] == pytest.approx(1e-3, rel=1e-3)


def test_perturbed_velocities_trip_the_guard_and_fall_back_to_real_forwards(draw, reward):
    results = []
    for error in (0.0, 0.01):
        policy = toy_policy(seed=1)
        drawn = draw(policy)
        noise = torch.randn(drawn.velocities.shape, generator=generator(0, "perturb"))
        broken = replace(drawn, velocities=drawn.velocities + error * noise)
        optimizer = torch.optim.SGD(policy.trainable().values(), lr=1.0)
        stats = update(policy, broken, reward(drawn), optimizer, max_grad_norm=0)
        assert stats["jagg/fallback"] == (error > 0)
        assert stats["jagg/velocity_error"] == pytest.approx(
            error * float(noise.abs().max()), rel=0.3, abs=1e-5
        )
        assert stats["update/forwards"] == (1 if error == 0 else 3)
        assert policy.version == 1
        results.append(weights(policy))
    start = weights(toy_policy(seed=1))
    clean = torch.cat([(results[0][name] - start[name]).flatten() for name in start])
    fallen = torch.cat([(results[1][name] - start[name]).flatten() for name in start])
    assert float((clean - fallen).norm() / clean.norm()) < 1e-4


def test_guard_tolerance_can_be_set(policy, draw, reward):
    drawn = draw(policy)
    broken = replace(drawn, velocities=drawn.velocities + 0.01)
    assert (
        update(policy, broken, reward(drawn), jagg=JaggConfig(guard_tolerance=0.1))["jagg/fallback"]
        == 0
    )


def test_bfloat16_joint_forwards_stay_within_the_guard(draw, reward):
    policy = toy_policy(seed=1, dtype=torch.bfloat16)
    drawn = draw(policy, micro_batch=3)
    stats = update(policy, drawn, reward(drawn))
    assert stats["jagg/fallback"] == 0
    assert stats["grad/norm"] > 0


def test_a_stale_rollout_is_refused(policy, draw, reward):
    drawn = draw(policy)
    policy.version += 1
    before = weights(policy)
    with pytest.raises(StaleRolloutError, match=r"version 0.*at 1"):
        update(policy, drawn, reward(drawn))
    assert same(weights(policy), before)


def test_a_foreign_reward_is_refused(policy, draw, reward):
    with pytest.raises(StaleRolloutError, match="other"):
        update(policy, draw(policy), reward(draw(policy, id="other")))
    with pytest.raises(ShapeError):
        update(policy, draw(policy), reward(draw(policy, group_size=3)))


def test_too_few_finite_rewards_are_refused(policy, draw, reward):
    drawn = draw(policy)
    with pytest.raises(NonFiniteError, match="8 of 8"):
        update(policy, drawn, reward(drawn, [NAN] * 8), max_nan_fraction=1.0)
    with pytest.raises(NonFiniteError, match="3 of 8"):
        update(policy, drawn, reward(drawn, [NAN] * 3 + [1.0] * 5), max_nan_fraction=0.3)
    stats = update(
        policy, drawn, reward(drawn, [NAN] * 3 + [1.0, 1.0, 2.0, 3.0, 4.0]), max_nan_fraction=0.4
    )
    assert stats["reward/nan_fraction"] == 0.375
    assert stats["update/skipped"] == 0


def test_nan_gradients_are_refused_and_weights_left_alone(policy, draw, reward):
    drawn = draw(policy)
    drawn.latents[3, 1] = NAN
    before = weights(policy)
    with pytest.raises(NonFiniteError, match="gradient norm"):
        update(policy, drawn, reward(drawn))
    assert same(weights(policy), before)
    assert policy.version == 0
    assert all(p.grad is None for p in policy.trainable().values())


def test_cancelling_leaves_weights_and_gradients_clean(policy, draw, reward):
    def cancel(done, total):
        if done == 2:
            raise KeyboardInterrupt

    drawn = draw(policy, micro_batch=2)
    before = weights(policy)
    with pytest.raises(KeyboardInterrupt):
        update(policy, drawn, reward(drawn), on_step=cancel)
    assert same(weights(policy), before)
    assert all(p.grad is None for p in policy.trainable().values())


def test_inputs_are_unchanged(policy, draw, reward):
    drawn = draw(policy)
    given = reward(drawn)
    held = (
        drawn.latents.clone(),
        drawn.velocities.clone(),
        drawn.log_probs.clone(),
        given.total().clone(),
    )
    update(policy, drawn, given, inner_epochs=2)
    now = (drawn.latents, drawn.velocities, drawn.log_probs, given.total())
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))


def test_the_executors_hooks_get_every_gradient_once(policy, draw, reward):
    drawn = draw(policy, micro_batch=4)
    backwards, reductions = [], []

    def backward(velocity, gradient):
        backwards.append((velocity.shape, gradient.shape))
        (velocity * gradient).sum().backward()

    update(
        policy,
        drawn,
        reward(drawn),
        backward=backward,
        reduce=lambda grads: reductions.append(len(grads)),
    )
    # 9 trained steps in windows 4, 4, 1: five nodes in one joint forward per micro-batch.
    assert backwards == [((5, 4, 1, 4, 4), (5, 4, 1, 4, 4))] * 2
    assert reductions == [4]
    default = toy_policy(seed=1)
    other = draw(default, micro_batch=4)
    update(default, other, reward(other))
    assert all(
        torch.allclose(a, weights(default)[n], atol=1e-7) for n, a in weights(policy).items()
    )


def test_a_reduction_that_averages_changes_the_step(draw, reward):
    moves = []
    for factor in (1.0, 0.5):
        policy = toy_policy(seed=1)
        before = weights(policy)
        drawn = draw(policy)
        optimizer = torch.optim.SGD(policy.trainable().values(), lr=1.0)
        update(
            policy,
            drawn,
            reward(drawn),
            optimizer,
            max_grad_norm=0,
            reduce=lambda g, f=factor: [t.mul_(f) for t in g],
        )
        moves.append({n: w - before[n] for n, w in weights(policy).items()})
    assert all(torch.allclose(moves[0][n] / 2, moves[1][n], atol=1e-7) for n in moves[0])


def test_ema_follows_every_optimizer_step(policy, draw, reward):
    ema = Ema(policy, decay=0.9)
    drawn = draw(policy)
    update(policy, drawn, reward(drawn), inner_epochs=2, ema=ema)
    assert ema.updates == 2
    assert policy.ema is not None
    assert not same(policy.ema, weights(policy))


def test_statistics_have_the_documented_names(policy, draw, reward):
    drawn = draw(policy)
    stats = update(policy, drawn, reward(drawn))
    assert set(stats) == {
        "loss/policy",
        "ratio/max_abs_log",
        "clip/fraction",
        "kl",
        "grad/norm",
        "jagg/fraction",
        "jagg/nodes",
        "jagg/velocity_error",
        "jagg/fallback",
        "update/forwards",
        "update/optimizer_steps",
        "update/skipped",
        "advantage/zero_fraction",
        "reward/nan_fraction",
    }
    assert all(isinstance(value, float) for value in stats.values())
    assert stats["jagg/fraction"] == 1.0


def test_clip_is_in_nats_for_sde_and_native_for_cps():
    config = GrpoConfig()
    assert config.clip(Transition(kind="flow_sde", noise_level=0.7), 65_536) == pytest.approx(
        1.007e-4, rel=1e-3
    )
    assert config.clip(Transition(kind="dance_sde", noise_level=0.3), 1_000) == pytest.approx(
        6.6e-3
    )
    assert config.clip(Transition(kind="cps", noise_level=0.8), 65_536) == 1e-4


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"clip_nats": 0.0}, "clip_nats"),
        ({"advantage_clamp": -1.0}, "advantage_clamp"),
        ({"inner_epochs": 0}, "inner_epochs"),
        ({"kl_weight": -0.1}, "kl_weight"),
        ({"kl_form": "kl3"}, "flow_grpo"),
        ({"advantage_control": "flip"}, "shuffle"),
        ({"max_nan_fraction": 1.5}, "max_nan_fraction"),
    ],
)
def test_bad_grpo_settings_are_named(arguments, name):
    with pytest.raises(JaggError, match=name):
        GrpoConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"estimator": "knots"}, "windows"),
        ({"window": 0}, "window"),
        ({"guard_tolerance": -1.0}, "guard"),
    ],
)
def test_bad_jagg_settings_are_named(arguments, name):
    with pytest.raises(JaggError, match=name):
        JaggConfig(**arguments)


def continue_training(draw, reward, policy, optimizer, ema, ticks):
    for tick in ticks:
        drawn = draw(policy, seed=tick, micro_batch=3)
        config = {
            "kl_weight": 0.01,
            "inner_epochs": 2,
            "advantage_control": "shuffle" if tick % 2 else "none",
        }
        update(policy, drawn, reward(drawn, seed=tick), optimizer, ema=ema, seed=tick, **config)


def test_t17_ten_steps_equal_five_saved_loaded_and_five(draw, reward, tmp_path):
    def begin():
        policy = toy_policy(seed=1)
        policy.keep_reference()
        return policy, make_optimizer(policy, lr=1e-3), Ema(policy, decay=0.99)

    through = begin()
    continue_training(draw, reward, *through, range(10))

    policy, optimizer, ema = begin()
    continue_training(draw, reward, policy, optimizer, ema, range(5))
    state = {
        "weights": weights(policy),
        "reference": policy.reference,
        "version": policy.version,
        "optimizer": optimizer_state(policy, optimizer),
        "ema": ema.state(),
    }
    save_state(tmp_path / "tick-000005", state)

    resumed, fresh_optimizer, fresh_ema = begin()
    saved = load_state(tmp_path / "tick-000005")
    with torch.no_grad():
        for name, parameter in resumed.trainable().items():
            parameter.copy_(saved["weights"][name])
    resumed.reference, resumed.version = saved["reference"], saved["version"]
    load_optimizer_state(resumed, fresh_optimizer, saved["optimizer"])
    fresh_ema.load_state(resumed, saved["ema"])
    continue_training(draw, reward, resumed, fresh_optimizer, fresh_ema, range(5, 10))

    assert resumed.version == through[0].version == 20
    assert same(weights(resumed), weights(through[0]))
    assert same(resumed.ema, through[0].ema)
    one, other = optimizer_state(resumed, fresh_optimizer), optimizer_state(*through[:2])
    for name, entry in other.items():
        assert all(torch.equal(one[name][key], value) for key, value in entry.items())
