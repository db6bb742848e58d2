"""The independent scorer: right for rendered prompts, wrong for each word that is wrong, and trained reproducibly."""

import ast
import inspect

import numpy as np
import pytest
import torch
from safetensors import safe_open

from jagg.errors import JaggError
from jagg.values import ScoreRequest
from nodes.backends import shape_check, shape_classifiers, shape_contours
from nodes.backends.shapes import COLOURS, SHAPES, parse_prompt, render, render_batch, sample_scene

PROMPT = "a small red star at the left on a gray background"
PAIR = "a red star and a blue circle on a white background"


@pytest.fixture(scope="module")
def scorer():
    return shape_check.scorer()


def score(scorer, prompt, *images):
    batch = torch.tensor(np.stack(images)).movedim(-1, 1)
    return scorer.score(
        ScoreRequest(images=batch, prompts=[prompt] * len(images), metadata=[{}] * len(images))
    )


def picture(prompt, side=24):
    scene = parse_prompt(prompt)
    assert scene is not None
    return render(scene, side)


@pytest.mark.parametrize("side", [24, 32])
def test_rendered_truth_is_fully_right(scorer, side):
    random = np.random.default_rng(11)
    scenes = [sample_scene(random) for _ in range(120)]
    images = torch.tensor(render_batch(scenes, side, random)).movedim(-1, 1)
    result = scorer.score(
        ScoreRequest(images=images, prompts=[s.prompt() for s in scenes], metadata=[{}] * 120)
    )
    assert result.values.mean() >= 0.99
    assert result.parts["contour"].mean() >= 0.97
    for name in ("colour", "background", "position"):
        assert result.parts[name].mean() >= 0.99, name


@pytest.mark.parametrize(
    ("drawn", "part"),
    [
        (PROMPT.replace("star", "ring"), "shape"),
        (PROMPT.replace("red", "purple"), "colour"),
        (PROMPT.replace("gray", "pink"), "background"),
        (PROMPT.replace("left", "top"), "position"),
        ("a large red star on a gray background", "position"),
    ],
)
def test_one_wrong_word_fails_its_own_part(scorer, drawn, part):
    result = score(scorer, PROMPT, picture(drawn))
    assert result.values.item() == 0
    wrong = {
        name
        for name in ("shape", "colour", "background", "position")
        if result.parts[name].item() == 0
    }
    assert wrong == {part}
    assert result.raw.item() == 0.75


def test_every_shape_is_told_from_every_other(scorer):
    for asked in SHAPES:
        prompt = f"a large blue {asked} on a white background"
        drawn = [picture(f"a large blue {shape} on a white background") for shape in SHAPES]
        result = score(scorer, prompt, *drawn)
        assert result.values.tolist() == [float(shape == asked) for shape in SHAPES]
        assert result.parts["contour"].tolist() == result.values.tolist()


def test_every_colour_is_told_from_every_other(scorer):
    for asked in COLOURS:
        prompt = f"a small {asked} square at the top on a white background"
        drawn = [picture(prompt.replace(asked, colour)) for colour in COLOURS]
        assert score(scorer, prompt, *drawn).values.tolist() == [float(c == asked) for c in COLOURS]


def test_pairs_need_both_objects_in_order(scorer):
    swapped = picture("a blue circle and a red star on a white background")
    alone = picture("a small red star at the left on a white background")
    assert score(scorer, PAIR, picture(PAIR), swapped, alone).values.tolist() == [1, 0, 0]


def test_a_second_object_is_not_what_was_asked(scorer):
    stuffed = picture(PROMPT)
    stuffed[:, 12:] = picture(PROMPT.replace("left", "right"))[:, 12:]
    assert score(scorer, PROMPT, stuffed).parts["position"].item() == 0


def test_texture_is_measured_but_does_not_decide(scorer):
    noise = np.random.default_rng(0).normal(0, 0.03, (24, 24, 3))
    clean, noisy = picture(PROMPT), np.clip(picture(PROMPT) + noise, 0, 1)
    result = score(scorer, PROMPT, clean, noisy)
    assert result.values.tolist() == [1, 1]
    assert result.parts["texture"][1] > result.parts["texture"][0] + 0.005


def test_missing_weights_say_so(tmp_path):
    with pytest.raises(JaggError, match="no weights"):
        shape_check.scorer(tmp_path / "absent.safetensors")


def test_training_is_a_function_of_seed_and_tick():
    training = shape_classifiers.ClassifierTraining(steps=4, batch=8)

    def steps(seed):
        classifiers, optimizer = shape_classifiers.start(seed, training)
        for tick in range(2):
            shape_classifiers.train_step(
                classifiers, optimizer, seed=seed, tick=tick, training=training
            )
        return torch.cat([p.detach().flatten() for p in classifiers.parameters()])

    first = steps(1)
    torch.rand(3)
    assert torch.equal(first, steps(1))
    assert not torch.equal(first, steps(2))


def test_the_rate_stays_at_zero_beyond_the_last_step():
    training = shape_classifiers.ClassifierTraining(steps=30, batch=2)
    classifiers, optimizer = shape_classifiers.start(0, training)
    rates = []
    for tick in (25, 30, 37, 40):
        shape_classifiers.train_step(classifiers, optimizer, seed=0, tick=tick, training=training)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([training.lr / 2, 0, 0, 0])


def test_training_learns():
    training = shape_classifiers.ClassifierTraining(steps=20, batch=24)
    classifiers, optimizer = shape_classifiers.start(5, training)
    losses = [
        shape_classifiers.train_step(classifiers, optimizer, seed=5, tick=t, training=training)[
            "shape_loss"
        ]
        for t in range(20)
    ]
    assert np.mean(losses[-5:]) < 0.7 * losses[0]


def test_weights_survive_saving(tmp_path):
    training = shape_classifiers.ClassifierTraining(batch=4)
    classifiers, _ = shape_classifiers.start(0, training)
    shape_classifiers.save(classifiers, tmp_path / "w.safetensors", {"seed": "0"})
    loaded = shape_classifiers.load(tmp_path / "w.safetensors")
    batch = shape_classifiers.draw_batch(4, seed=0, key="test", tick=0)
    assert torch.allclose(
        loaded.shape_logits(batch.crops), classifiers.shape_logits(batch.crops), atol=5e-3
    )
    assert not any(p.requires_grad for p in loaded.parameters())


def test_shipped_weights_say_how_they_were_made():
    assert shape_check.WEIGHTS.stat().st_size < 1_500_000
    with safe_open(shape_check.WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    assert {"seed", "steps", "batch", "accuracy_shape", "accuracy_contour"} <= set(metadata)
    assert metadata["shapes"] == ",".join(SHAPES)
    assert float(metadata["accuracy_shape"]) > 0.97


def test_contour_features_of_a_ring_and_a_disc():
    features = {}
    for shape in ("circle", "ring"):
        image = picture(f"a large red {shape} on a white background", 32)
        found = shape_contours.find_foreground(image, shape_contours.border_colour(image))
        features[shape] = shape_contours.contour_features(shape_contours.crop_object(found))
    assert features["ring"].shape == (shape_contours.CONTOUR_FEATURES,)
    assert features["ring"][1] == 1
    assert features["circle"][1] == 0
    # Circularity 4πA/P² of a disc is 1; both have the same outline.
    assert features["circle"][5] == pytest.approx(1, abs=0.1)
    assert features["ring"][5] == pytest.approx(features["circle"][5], abs=0.05)


def test_nothing_on_a_plain_picture():
    plain = np.full((24, 24, 3), 0.5)
    assert shape_contours.find_foreground(plain, shape_contours.border_colour(plain)) is None


def test_it_shares_no_code_with_the_training_reward():
    for module in (shape_check, shape_classifiers, shape_contours):
        tree = ast.parse(inspect.getsource(module))
        imported = {
            node.module: {a.name for a in node.names}
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        assert "nodes.backends.shape_margin" not in imported
        assert not imported.get("nodes.backends.shapes", set()) & {
            "shape_mask",
            "render",
            "render_batch",
        }
