"""The training reward: rendered truth above every way of getting it wrong."""

import numpy as np
import pytest
import torch

from jagg.values import ScoreRequest
from nodes.backends import shape_margin
from nodes.backends.shapes import Scene, parse_prompt, render, render_batch, sample_scene

PROMPT = "a small red star at the left on a gray background"


def score(prompt, *images, metadata=None, settings=None):
    count = len(images)
    batch = torch.tensor(np.stack(images)).movedim(-1, 1)
    metadata = [metadata or {}] * count
    return shape_margin.scorer(settings).score(
        ScoreRequest(images=batch, prompts=[prompt] * count, metadata=metadata)
    )


def picture(prompt, side=24):
    scene = parse_prompt(prompt)
    assert scene is not None
    return render(scene, side)


@pytest.mark.parametrize("side", [24, 32])
def test_rendered_truth_scores_high(side):
    random = np.random.default_rng(3)
    scenes = [sample_scene(random) for _ in range(200)]
    images = torch.tensor(render_batch(scenes, side, random)).movedim(-1, 1)
    result = shape_margin.scorer().score(
        ScoreRequest(images=images, prompts=[s.prompt() for s in scenes], metadata=[{}] * 200)
    )
    assert result.raw.mean() > 0.9
    assert result.raw.min() > 0.75
    assert result.parts["texture"].max() < 1e-6
    assert torch.allclose(result.values, (result.raw + 1) / 2)


def test_the_formula_by_hand():
    truth = picture(PROMPT)
    result = score(PROMPT, np.clip(truth + 0.05, 0, 1))
    margin, fit, texture = (result.parts[name].item() for name in ("margin", "fit", "texture"))
    assert result.raw.item() == pytest.approx(margin * fit - 1.5 * texture, abs=1e-6)
    assert texture > 0.02


def test_a_blank_picture_has_even_odds_and_no_fit():
    background = np.broadcast_to(np.array((0.55, 0.55, 0.55)), (24, 24, 3))
    result = score(PROMPT, background)
    assert result.parts["margin"].item() == pytest.approx(1 / 6)
    assert result.raw.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("size", ["a large red ring", "a small red ring at the left"])
def test_a_filled_ring_is_no_ring(size):
    prompt = f"{size} on a white background"
    ring, disc = picture(prompt), picture(prompt.replace("ring", "circle"))
    depths = [score(prompt, disc + (ring - disc) * w).raw.item() for w in (0, 0.25, 0.5, 0.75, 1)]
    assert depths == sorted(depths)
    assert depths[0] < 0.05
    assert depths[-1] > 0.85


def test_wrong_words_lose_nearly_everything():
    wrong = {
        "shape": PROMPT.replace("star", "square"),
        "colour": PROMPT.replace("red", "blue"),
        "place": PROMPT.replace("left", "right"),
        "size": "a large red star on a gray background",
        "background": PROMPT.replace("gray", "white"),
    }
    truth = score(PROMPT, picture(PROMPT)).raw.item()
    for word, other in wrong.items():
        assert score(PROMPT, picture(other)).raw.item() < truth - 0.6, word


def test_swapped_objects_lose():
    prompt = "a red star and a blue circle on a white background"
    result = score(
        prompt, picture(prompt), picture("a blue circle and a red star on a white background")
    )
    assert result.raw[0] > 0.8
    assert result.raw[1] < 0


def test_two_objects_are_means_of_their_halves():
    prompt = "a red star and a blue circle on a white background"
    half_right = score(prompt, picture("a red star and a blue square on a white background"))
    truth = score(prompt, picture(prompt))
    assert half_right.raw.item() < 0.45 * truth.raw.item()


def test_a_patch_grid_costs_more_the_stronger_it_is():
    truth = picture(PROMPT)
    rows, columns = np.mgrid[:24, :24]
    grid = ((rows % 4 == 0) | (columns % 4 == 0))[..., None] * np.array((0.0, 1.0, 0.3))
    scores = score(PROMPT, *(np.clip(truth + w * grid, 0, 1) for w in (0, 0.03, 0.06, 0.12, 0.24)))
    assert scores.raw.tolist() == sorted(scores.raw.tolist(), reverse=True)
    assert scores.raw[0] - scores.raw[1] > 0.02


def test_metadata_speak_before_the_prompt():
    scene = parse_prompt(PROMPT)
    assert isinstance(scene, Scene)
    with_metadata = score("free text", picture(PROMPT), metadata=scene.to_metadata())
    assert with_metadata.raw.item() == score(PROMPT, picture(PROMPT)).raw.item()


def test_bad_metadata_and_unknown_prompts_are_nan_with_a_reason():
    broken = score(PROMPT, picture(PROMPT), metadata={"objects": [{"shape": "hexagon"}]})
    unknown = score("a photo of a cat", picture(PROMPT))
    assert broken.values.isnan().all()
    assert unknown.values.isnan().all()
    assert "cat" in unknown.notes[0]


def test_a_neighbouring_colour_loses_by_the_colour_margin():
    prompt = "a small orange star at the left on a white background"
    pictures = picture(prompt), picture(prompt.replace("orange", "yellow"))
    plain = score(prompt, *pictures)
    paid = score(prompt, *pictures, settings=shape_margin.ShapeMargin(colour_margin=True))
    assert plain.parts["colour"][0] > 0.95
    assert plain.parts["colour"][1] < 0.05
    assert plain.raw[0] - plain.raw[1] < 0.2
    assert paid.raw[0] - paid.raw[1] > 0.7
    assert paid.raw[0] > 0.95


def test_colour_of_a_pair_is_the_geometric_mean():
    prompt = "a red star and a blue circle on a white background"
    wrong = picture("a red star and a purple circle on a white background")
    colour = score(prompt, picture(prompt), wrong).parts["colour"]
    assert colour[0] > 0.95
    # exp(-d² / 0.03) with the squared distance 0.216 of purple and blue
    assert colour[1] == pytest.approx(np.exp(-0.216 / 0.03 / 2), abs=0.01)
