"""Sampler, reward, optimizer, evaluation and saving cards on the embedded policy."""

import json
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from app.storage.events import Metric, Progress
from jagg.errors import JaggError, NonFiniteError, ShapeError, StaleRolloutError
from jagg.policy import Policy
from jagg.values import Reward, RewardComponent, Scorer, ScoreResult
from nodes.checkpoint import CheckpointSaver, CheckpointSaverParams
from nodes.evaluate import Evaluate, EvaluateParams
from nodes.optimizer import GRPOJAGGOptimizer, GRPOJAGGOptimizerParams
from nodes.policy import DiTLoader, DiTLoaderParams
from nodes.pretraining import (
    FlowMatchingTrainer,
    FlowMatchingTrainerParams,
    ShapeDataset,
    ShapeDatasetParams,
)
from nodes.preview import PreviewImages, PreviewImagesParams
from nodes.reward import RewardMix, RewardMixParams, Score, ScoreParams
from nodes.sampler import ODESampler, ODESamplerParams, SDESampler, SDESamplerParams


def _brightness(request):
    values = request.images.mean((1, 2, 3)).clamp(0, 1)
    return ScoreResult(values=values, raw=values, parts={"red": request.images[:, 0].mean((1, 2))})


BRIGHTNESS = Scorer(name="brightness", version=1, score=_brightness)


def _half_blind(request):
    values = _brightness(request).values.clone()
    values[0] = math.nan
    return ScoreResult(values=values, raw=values)


def _metrics(emitted):
    return {e.name: e.value for e in emitted if isinstance(e, Metric)}


def _reward(context, rollout, scorer=BRIGHTNESS, weight=1.0):
    return (
        Score(ScoreParams(weight=weight)).run(context("5"), scorer=scorer, rollout=rollout).reward
    )


def _optimizer(context, **params):
    node = GRPOJAGGOptimizer(
        GRPOJAGGOptimizerParams(**{"window": 2, "learning_rate": 1e-3, **params})
    )
    node.open(context("6"))
    return node


def _weights(policy: Policy):
    return {name: p.detach().clone() for name, p in policy.trainable().items()}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"steps": 4, "noise_stop": 5}, "noise_start < noise_stop <= steps"),
        ({"steps": 4, "noise_start": 2, "noise_stop": 2}, "noise_start < noise_stop <= steps"),
        ({"steps": 4, "noise_stop": 4, "transition": "cps"}, "set `noise_stop` to 3 or less"),
        ({"steps": 4, "noise_stop": 4, "transition": "dance_sde"}, "set `noise_stop` to 3 or less"),
        ({"noise_level": 0.0}, "`noise_level` is 0"),
        ({"noise_level": 1.2, "transition": "cps"}, "`noise_level` is 1.2, expected at most 1"),
        ({"transition": "cpss"}, "Did you mean `cps`"),
    ],
)
def test_a_sampler_that_cannot_be_trained_from_is_refused_before_it_runs(params, message):
    with pytest.raises(ValueError, match=message):
        SDESamplerParams(**params)


def test_noise_is_keyed_by_prompt_and_member_not_by_micro_batch(context, policy, prompts, rollout):
    whole = SDESamplerParams(
        steps=3,
        shift=1.0,
        transition="cps",
        noise_level=0.8,
        noise_start=0,
        noise_stop=2,
        micro_batch=6,
    )
    other = SDESampler(whole).run(context("3"), policy=policy, prompts=prompts).rollout
    assert torch.equal(rollout.latents[0], other.latents[0])
    torch.testing.assert_close(rollout.final_latents, other.final_latents, rtol=0, atol=1e-4)
    assert rollout.micro_batches == ((0, 4), (4, 6))


def test_score_keeps_nan_and_reports_the_rest(context, rollout, emitted):
    reward = _reward(context, rollout, Scorer(name="blind", version=1, score=_half_blind))
    values = reward.components[0].values
    assert values.isnan().tolist() == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]  # the first of each group
    assert _metrics(emitted)["reward/blind/mean"] == pytest.approx(float(values.nanmean()))


def test_notes_stay_with_their_samples_where_other_groups_have_none(context, rollout):
    def remark(request):
        values = _brightness(request).values
        notes = ("dim",) * len(values) if "star" in request.prompts[0] else ()
        return ScoreResult(values=values, raw=values, notes=notes)

    noted = _reward(context, rollout, Scorer(name="noted", version=1, score=remark))
    assert noted.components[0].notes == ("", "", "", "dim", "dim", "dim")
    assert _reward(context, rollout).components[0].notes == ()


def test_a_scorer_that_raises_costs_its_sample_alone(context, rollout, emitted):
    def fragile(request):
        if bool((request.images.mean((1, 2, 3)) > threshold).any()):
            msg = "too bright"
            raise RuntimeError(msg)
        return _brightness(request)

    bright = _reward(context, rollout).components[0].values
    threshold = float(bright.median())  # the lower of the two middle ones
    component = _reward(
        context, rollout, Scorer(name="fragile", version=1, score=fragile)
    ).components[0]
    failed = bright > threshold
    assert failed.sum() == 3
    assert torch.equal(component.values.isnan(), failed)
    assert torch.equal(component.values[~failed], bright[~failed])
    assert torch.equal(component.parts["red"].isnan(), failed)
    notes = [note for note, bad in zip(component.notes, failed, strict=True) if bad]
    assert notes == ["fragile raised RuntimeError: too bright"] * 3


def test_a_learning_text_encoder_is_refused_where_it_could_not_learn(context, prompts):
    params = DiTLoaderParams(model="embedded/random", train_text_encoder=True)
    policy = DiTLoader(params).run(context("2")).policy
    sampler = SDESampler(SDESamplerParams(steps=3, shift=1.0, noise_stop=2))
    rollout = sampler.run(context("3"), policy=policy, prompts=prompts).rollout
    with pytest.raises(JaggError, match="Switch `train_text_encoder` off"):
        _optimizer(context).run(
            context("6"), policy=policy, rollout=rollout, reward=_reward(context, rollout)
        )


def test_a_mix_refuses_what_does_not_belong_together(context, policy, prompts, rollout):
    mix = RewardMix(RewardMixParams(weight_1=2.0, weight_2=1.0))
    first = _reward(context, rollout)
    dark = Scorer(
        name="dark",
        version=1,
        score=lambda r: ScoreResult(values=1 - _brightness(r).values, raw=_brightness(r).raw),
    )
    second = _reward(context, rollout, dark)
    joined = mix.run(context(), reward_1=first, reward_2=second).reward
    b = first.components[0].values.double()
    torch.testing.assert_close(joined.total(), (2 * b + (1 - b)) / 3)
    later = (
        SDESampler(SDESamplerParams(steps=3, noise_stop=2))
        .run(context("3", 2), policy=policy, prompts=prompts)
        .rollout
    )
    with pytest.raises(StaleRolloutError, match="`reward_2` scores rollout '3:2'"):
        mix.run(context(), reward_1=first, reward_2=_reward(context, later, dark))
    with pytest.raises(JaggError, match="brightness is given twice"):
        mix.run(context(), reward_1=first, reward_2=first)
    with pytest.raises(JaggError, match="every weight is 0"):
        RewardMix(RewardMixParams(weight_1=0.0)).run(context(), reward_1=first)


def test_a_component_of_weight_zero_is_reported_and_does_not_train(rollout):
    blank = torch.full((6,), math.nan)
    reward = Reward(
        rollout_id=rollout.id,
        components=(
            RewardComponent(name="a", weight=1.0, values=torch.ones(6), raw=torch.ones(6)),
            RewardComponent(name="b", weight=0.0, values=blank, raw=blank),
        ),
    )
    assert reward.total().tolist() == [1.0] * 6
    with pytest.raises(ShapeError, match=r"shape \(6,\), expected \(N,\) = \(4,\)"):
        reward.check_belongs_to(_Four(rollout.id, rollout.prompts))


class _Four:
    """Something of four samples under a rollout's id."""

    def __init__(self, name, prompts):
        self.id, self.prompts = name, prompts

    def __len__(self):
        return 4


def test_an_update_changes_the_one_policy_and_says_what_it_did(context, policy, rollout, emitted):
    before = _weights(policy)
    node = _optimizer(context, probe_every=1)
    outputs = node.run(
        context("6"), policy=policy, rollout=rollout, reward=_reward(context, rollout)
    )
    assert outputs.policy is policy
    assert policy.version == 1
    assert any(not torch.equal(p, before[name]) for name, p in policy.trainable().items())
    told = _metrics(emitted)
    texts = [e.text for e in emitted if isinstance(e, Progress) and e.text]
    assert texts[0].startswith("parity gate passed: max |delta log-prob| = 0")
    assert not any(name.startswith("parity") for name in told)
    assert told["ratio/max_abs_log"] <= 1e-6
    assert told["jagg/cosine"] == pytest.approx(1.0, abs=1e-5)  # a window of two steps is exact
    for name in (
        "reward/mean",
        "reward/std",
        "loss/policy",
        "clip/fraction",
        "kl",
        "grad/norm",
        "jagg/fraction",
        "learning_rate",
    ):
        assert math.isfinite(told[name]), name
    with pytest.raises(StaleRolloutError, match="policy version 0"):
        node.run(context("6", 2), policy=policy, rollout=rollout, reward=_reward(context, rollout))


def test_a_kl_weight_that_rises_after_training_began_is_refused(context, policy, prompts, rollout):
    node = _optimizer(context)
    node.run(context("6"), policy=policy, rollout=rollout, reward=_reward(context, rollout))
    node.params = replace(node.params, kl_weight=0.1)
    sampler = SDESampler(SDESamplerParams(steps=3, shift=1.0, noise_stop=2))
    later = sampler.run(context("3", 2), policy=policy, prompts=prompts).rollout
    with pytest.raises(JaggError, match=r"`kl_weight` is 0\.1, but training began with 0"):
        node.run(context("6", 2), policy=policy, rollout=later, reward=_reward(context, later))


def test_a_live_kl_weight_is_refused_where_the_weights_from_before_training_are_gone(
    context, policy, rollout
):
    def refused(node, kl_weight):
        return node.refuse_live(replace(node.params, kl_weight=kl_weight))

    without = _optimizer(context)
    assert refused(without, 0.1) is None
    without.run(context("6"), policy=policy, rollout=rollout, reward=_reward(context, rollout))
    assert "`kl_weight` cannot rise from 0" in refused(without, 0.1)
    assert refused(without, 0.0) is None
    resumed = _optimizer(context)
    resumed.load_state(without.state())
    assert "`kl_weight` cannot rise from 0" in refused(resumed, 0.1)


def test_a_live_kl_weight_changes_where_there_was_one(context, policy, rollout):
    node = _optimizer(context, kl_weight=0.1)
    node.run(context("6"), policy=policy, rollout=rollout, reward=_reward(context, rollout))
    assert node.refuse_live(replace(node.params, kl_weight=0.2)) is None


def test_the_rate_follows_warm_up_and_the_recorded_horizon(context, policy, prompts, emitted):
    node = _optimizer(context, warmup=2, decay="linear", final_fraction=0.1)
    rates = []
    for tick in range(1, 11):
        sampler = SDESampler(SDESamplerParams(steps=3, shift=1.0, noise_stop=2))
        rollout = sampler.run(context("3", tick), policy=policy, prompts=prompts).rollout
        node.run(
            context("6", tick), policy=policy, rollout=rollout, reward=_reward(context, rollout)
        )
        rates.append(_metrics(emitted)["learning_rate"])
    assert rates[:2] == pytest.approx([5e-4, 1e-3])
    assert rates[5] == pytest.approx(1e-3 * (1 - 0.9 * 4 / 8))
    assert rates[-1] == pytest.approx(1e-4)


def test_state_of_optimizer_and_loader_continue_bit_for_bit(context, prompts):
    def tick(node, policy, number):
        sampler = SDESampler(SDESamplerParams(steps=3, shift=1.0, noise_stop=2))
        rollout = sampler.run(context("3", number), policy=policy, prompts=prompts).rollout
        node.run(
            context("6", number), policy=policy, rollout=rollout, reward=_reward(context, rollout)
        )

    def load():
        loader = DiTLoader(
            DiTLoaderParams(
                model="embedded/random", train="match", train_patterns="proj_out\ncontext_embedder"
            )
        )
        return loader, loader.run(context("2")).policy

    loader, policy = load()
    node = _optimizer(context, ema_decay=0.9, kl_weight=0.1)
    for number in (1, 2):
        tick(node, policy, number)
    import copy

    saved = copy.deepcopy((loader.state(), node.state()))
    for number in (3, 4):
        tick(node, policy, number)

    again_loader, again = load()
    again_node = _optimizer(context, ema_decay=0.9, kl_weight=0.1)
    again_loader.load_state(saved[0])
    again_node.load_state(saved[1])
    for number in (3, 4):
        tick(again_node, again, number)
    for ours, theirs in ((policy, again),):
        assert ours.version == theirs.version == 4
        for name, p in ours.trainable().items():
            assert torch.equal(p, theirs.trainable()[name]), name
            assert torch.equal(ours.ema[name], theirs.ema[name]), name
            assert torch.equal(ours.reference[name], theirs.reference[name]), name


def test_evaluation_draws_the_same_noise_at_every_tick_and_compares_with_the_first(
    context, policy, prompts, tmp_path, emitted
):
    params = EvaluateParams(images_per_prompt=2, steps=2, shown=2)
    node = Evaluate(params)
    node.open(context("9", 0))
    first = node.run(context("9", 0), policy=policy, prompts=prompts, scorer=BRIGHTNESS)
    assert not (tmp_path / "run/samples/before_after.png").exists()
    again = node.run(context("9", 5), policy=policy, prompts=prompts, scorer=BRIGHTNESS)
    assert torch.equal(first.samples.images, again.samples.images)
    assert first.stats == again.stats
    assert set(first.stats.values) == {
        "eval/brightness/mean",
        "eval/brightness/not_scored",
        "eval/brightness/red",
    }
    assert len(first.samples.prompts) == 4
    assert Image.open(tmp_path / "run/samples/before_after.png").width > 100
    with pytest.raises(JaggError, match="keeps no ema weights; set `ema_decay`"):
        Evaluate(EvaluateParams(weights="ema")).run(
            context(), policy=policy, prompts=prompts, scorer=BRIGHTNESS
        )


def test_two_scorers_of_one_name_are_refused_before_sampling(context, policy, prompts, emitted):
    node = Evaluate(EvaluateParams(images_per_prompt=1, steps=2))
    node.open(context("9", 0))
    with pytest.raises(JaggError, match="scorer brightness is linked twice"):
        node.run(
            context("9", 0), policy=policy, prompts=prompts, scorer=BRIGHTNESS, scorer_3=BRIGHTNESS
        )
    assert emitted == []


def test_the_baseline_of_averaged_weights_is_that_of_the_weights_before_training(
    context, policy, prompts
):
    """The average starts with the first update; the evaluation at tick 0 comes before it."""
    averaged, raw = (
        Evaluate(EvaluateParams(images_per_prompt=1, steps=2, weights=which))
        for which in ("ema", "raw")
    )
    for node in (averaged, raw):
        node.open(context("9", 0))
    told = [
        node.run(context("9", 0), policy=policy, prompts=prompts, scorer=BRIGHTNESS).stats
        for node in (averaged, raw)
    ]
    assert told[0] == told[1]


def test_exported_weights_load_again_and_carry_the_workflow(context, policy, tmp_path):
    saver = CheckpointSaver(CheckpointSaverParams(name="mine"))
    told = {"prompt": '{"1": {}}', "workflow": "{}"}
    handle = saver.run(context("7", 3, metadata=told), policy=policy).checkpoint
    assert (handle.path, handle.tick) == ("export/mine.safetensors", 3)
    path = tmp_path / "run" / handle.path
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["prompt"] == told["prompt"]
        assert file.metadata()["tick"] == "3"
    path.rename(tmp_path / "models" / "mine.safetensors")
    loaded = DiTLoader(DiTLoaderParams(model="mine.safetensors")).run(context("2")).policy
    ours = dict(policy.module.named_parameters())
    for name, p in loaded.module.named_parameters():
        assert torch.equal(p, ours[name].half().float()), name
    for name in ("../mine", "", "a/b", "..", "a\\b"):
        with pytest.raises(ValueError, match="`name` is"):
            CheckpointSaverParams(name=name)


def test_previews_refuse_the_reward_of_another_rollout(context, policy, prompts, rollout, tmp_path):
    node = PreviewImages(PreviewImagesParams(groups=1))
    node.run(context("10", 4), rollout=rollout, reward=_reward(context, rollout))
    assert [p.name for p in (tmp_path / "run/samples/tick-000004").iterdir()] == ["10-000.png"]
    node.run(context("194:45", 5), rollout=rollout)
    assert [p.name for p in (tmp_path / "run/samples/tick-000005").iterdir()] == ["194_45-000.png"]
    later = (
        SDESampler(SDESamplerParams(steps=3, noise_stop=2))
        .run(context("3", 2), policy=policy, prompts=prompts)
        .rollout
    )
    with pytest.raises(StaleRolloutError):
        node.run(context("10"), rollout=later, reward=_reward(context, rollout))


def test_pictures_carry_the_workflow_whatever_its_letters(
    context, policy, prompts, rollout, tmp_path
):
    told = {"prompt": '{"1": {"title": "Kreis → rot"}}', "workflow": '{"nodes": []}'}
    PreviewImages(PreviewImagesParams(groups=1)).run(
        context("10", 4, metadata=told), rollout=rollout, reward=_reward(context, rollout)
    )
    node = Evaluate(EvaluateParams(images_per_prompt=1, steps=2))
    node.open(context("9", 0))
    for tick in (0, 4):
        node.run(
            context("9", tick, metadata=told), policy=policy, prompts=prompts, scorer=BRIGHTNESS
        )
    samples = tmp_path / "run" / "samples"
    written = [*samples.glob("tick-*/*.png"), samples / "before_after.png"]
    assert len(written) == 4
    for path in written:
        texts = Image.open(path).text
        assert {name: json.loads(text) for name, text in texts.items()} == {
            name: json.loads(text) for name, text in told.items()
        }


def test_the_error_of_unscored_samples_says_why_the_first_one_is(context, policy, rollout):
    def blind(request):
        blank = torch.full((len(request.prompts),), math.nan)
        return ScoreResult(values=blank, raw=blank, notes=("the lens cap is on",) * len(blank))

    reward = _reward(context, rollout, Scorer(name="blind", version=1, score=blind))
    with pytest.raises(NonFiniteError, match=r"6 of 6 .* by blind: the lens cap is on"):
        _optimizer(context).run(context("6"), policy=policy, rollout=rollout, reward=reward)


def test_ode_samples_carry_no_log_probs(context, policy, prompts):
    samples = (
        ODESampler(ODESamplerParams(steps=2)).run(context(), policy=policy, prompts=prompts).samples
    )
    assert samples.images.shape == (6, 3, 24, 24)
    assert not hasattr(samples, "log_probs")


def test_pretraining_lowers_the_loss_and_resumes_bit_for_bit(context, emitted):
    def load():
        loader = DiTLoader(DiTLoaderParams(model="embedded/random", train_text_encoder=True))
        return loader, loader.run(context("2")).policy

    data = ShapeDataset(ShapeDatasetParams(batch=8))
    params = FlowMatchingTrainerParams(learning_rate=3e-3, warmup=1)

    def tick(node, policy, number):
        batch = data.run(context("1", number)).batch
        node.run(context("3", number), policy=policy, batch=batch)
        return _metrics(emitted)["loss/flow_matching"]

    loader, policy = load()
    node = FlowMatchingTrainer(params)
    node.open(context("3"))
    losses = [tick(node, policy, number) for number in range(1, 5)]
    import copy

    saved = copy.deepcopy((loader.state(), node.state()))
    losses += [tick(node, policy, number) for number in range(5, 9)]
    assert sum(losses[-2:]) < sum(losses[:2])
    again_loader, again = load()
    again_node = FlowMatchingTrainer(params)
    again_node.open(context("3"))
    again_loader.load_state(saved[0])
    again_node.load_state(saved[1])
    assert [tick(again_node, again, number) for number in range(5, 9)] == losses[4:]
    for name, p in policy.trainable().items():
        assert torch.equal(p, again.trainable()[name]), name
        assert torch.equal(policy.ema[name], again.ema[name]), name
