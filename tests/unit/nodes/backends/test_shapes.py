import json
from itertools import pairwise

import numpy as np
import pytest

from jagg.errors import JaggError
from jagg.randomness import generator
from nodes.backends.shapes import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Scene,
    SceneMix,
    ShapeObject,
    composition_split,
    corrupt_caption,
    held_out_prompts,
    held_out_scenes,
    parse_prompt,
    render,
    render_batch,
    sample_scene,
    shape_mask,
    signed_distance,
    training_prompts,
    training_scenes,
)


def _scenes(count, seed=0):
    random = np.random.default_rng(seed)
    return [sample_scene(random) for _ in range(count)]


def _single(shape, size="large", colour="red", background="white", position="center"):
    return Scene(
        objects=(ShapeObject(colour=colour, shape=shape, size=size, position=position),),
        background=background,
    )


def test_captions_and_metadata_read_back_as_the_same_scene():
    scenes = _scenes(300)
    assert {len(s.objects) for s in scenes} == {1, 2}
    for scene in scenes:
        assert parse_prompt(scene.prompt()) == scene
        assert Scene.from_metadata(json.loads(json.dumps(scene.to_metadata()))) == scene


@pytest.mark.parametrize(
    ("scene", "caption"),
    [
        (_single("star"), "a large red star on a white background"),
        (
            _single("ring", "small", "blue", "pink", "top"),
            "a small blue ring at the top on a pink background",
        ),
        (
            Scene(
                objects=(
                    ShapeObject(colour="orange", shape="cross", size="small", position="left"),
                    ShapeObject(colour="green", shape="circle", size="small", position="right"),
                ),
                background="gray",
            ),
            "an orange cross and a green circle on a gray background",
        ),
    ],
)
def test_known_captions(scene, caption):
    assert scene.prompt() == caption
    assert parse_prompt(f"  {caption.upper()}.") == scene


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a cat",
        "a large red star",
        "a large red star at the left on a white background",
        "a small red star and a blue ring on a white background",
        "a red blob and a blue ring on a white background",
    ],
)
def test_other_texts_are_no_scenes(text):
    assert parse_prompt(text) is None


@pytest.mark.parametrize(
    "change",
    [
        {"background": "brown"},
        {"background": ["white"]},
        {"objects": []},
        {"objects": [{"colour": "red"}]},
        {"objects": [{"colour": ["red"], "shape": "star", "size": "large", "position": "center"}]},
        {"objects": None},
    ],
)
def test_bad_metadata_is_refused(change):
    with pytest.raises(JaggError, match="Shapes: metadata"):
        Scene.from_metadata({**_single("star").to_metadata(), **change})


def test_the_same_seed_draws_the_same_scenes_and_pictures():
    assert _scenes(50) == _scenes(50)
    assert _scenes(50) != _scenes(50, seed=1)
    scenes = _scenes(8)
    first, second = (render_batch(scenes, 24, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, render_batch(scenes, 24))


def test_the_mix_sets_the_kinds_of_scene():
    random = np.random.default_rng(0)
    assert all(
        len(s.objects) == 1 and s.objects[0].size == "small"
        for s in (sample_scene(random, SceneMix(two_objects=0, small_single=1)) for _ in range(50))
    )


def test_pixels_inside_and_outside_have_the_named_colours():
    for shape in SHAPES:
        image = render(_single(shape, colour="blue", background="pink"), 48)
        np.testing.assert_allclose(image[0, 0], BACKGROUNDS["pink"])
        # A ring has a hole at its centre; its band is at three quarters of the radius.
        x = 24 + round(0.75 * 0.38 * 48) if shape == "ring" else 24
        np.testing.assert_allclose(image[24, x], COLOURS["blue"])
    np.testing.assert_allclose(render(_single("ring"), 48)[24, 24], BACKGROUNDS["white"])


def test_a_mask_covers_the_area_of_its_shape():
    mask = shape_mask("circle", 0.5, 0.5, 0.3, 64)
    assert mask.sum() == pytest.approx(np.pi * (0.3 * 64) ** 2, rel=0.01)
    assert shape_mask("square", 0.5, 0.5, 0.3, 64).sum() == pytest.approx(
        (2 * 0.84 * 0.3 * 64) ** 2, rel=0.01
    )
    batch = shape_mask("star", np.array([0.3, 0.7]), np.array([0.5, 0.5]), 0.2, 24)
    assert batch.shape == (2, 24, 24)
    np.testing.assert_allclose(batch[0], batch[1][:, ::-1], atol=1e-9)


def test_shapes_point_up_and_differ_from_one_another():
    triangle = shape_mask("triangle", 0.5, 0.5, 0.4, 48)
    assert triangle[:20].sum() < triangle[28:].sum() + triangle[20:28].sum() / 2
    assert triangle[4].sum() < triangle[30].sum()
    masks = [shape_mask(shape, 0.5, 0.5, 0.2, 24) for shape in SHAPES]
    for i, first in enumerate(masks):
        for second in masks[i + 1 :]:
            assert np.abs(first - second).sum() > 8  # pixels, even at the small size


def test_signed_distance_is_negative_inside_and_grows_by_one_per_unit_outside():
    along = np.linspace(1.5, 3, 16)
    for shape in SHAPES:
        steps = [b - a for a, b in pairwise(signed_distance(shape, along, np.zeros(16)))]
        assert max(steps) <= 0.1 + 1e-9
        assert min(signed_distance(shape, along, np.zeros(16))) > 0
    assert signed_distance("circle", 0.0, 0.0) == -1
    assert signed_distance("ring", 0.0, 0.0) == pytest.approx(0.5)
    with pytest.raises(JaggError, match="hexagon"):
        signed_distance("hexagon", 0.0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_split_keeps_every_word_in_training(seed):
    split = composition_split(seed)
    assert len(split.held_out) == 8
    assert split == composition_split(seed)
    rest = {(c, s) for c in COLOURS for s in SHAPES} - split.held_out
    assert {c for c, _ in rest} == set(COLOURS)
    assert {s for _, s in rest} == set(SHAPES)


def test_training_never_sees_what_evaluation_always_holds():
    split = composition_split(0)
    trained = training_scenes(300, split, generator(0, "t"))
    unseen = held_out_scenes(64, split, 0)
    assert not any(o.pair in split.held_out for s in trained for o in s.objects)
    assert all(any(o.pair in split.held_out for o in s.objects) for s in unseen)
    assert len(set(unseen)) == 64
    assert held_out_scenes(16, split, 0) == unseen[:16]
    assert held_out_scenes(16, split, 1) != unseen[:16]
    assert {len(s.objects) for s in unseen} == {1, 2}


def test_prompts_are_the_captions_of_the_scenes():
    split = composition_split(0)
    assert training_prompts(5, split, generator(1)) == tuple(
        s.prompt() for s in training_scenes(5, split, generator(1))
    )
    assert held_out_prompts(5, split, 2) == tuple(s.prompt() for s in held_out_scenes(5, split, 2))


def test_too_many_distinct_scenes_are_refused():
    with pytest.raises(JaggError, match="ask for fewer"):
        held_out_scenes(200, composition_split(0), 0, SceneMix(two_objects=0, small_single=0))


def test_captions_are_falsified_at_the_given_rates():
    random = np.random.default_rng(0)
    pairs = [
        (s, parse_prompt(corrupt_caption(s, random, wrong_shape=0.45, wrong_colour=0.25)))
        for s in _scenes(2000)
    ]
    objects = [(a, b) for s, t in pairs for a, b in zip(s.objects, t.objects, strict=True)]
    assert np.mean([a.shape != b.shape for a, b in objects]) == pytest.approx(0.45, abs=0.03)
    assert np.mean([a.colour != b.colour for a, b in objects]) == pytest.approx(0.25, abs=0.03)
    assert all(s.background == t.background for s, t in pairs)
    assert all((a.size, a.position) == (b.size, b.position) for a, b in objects)
    scene = _scenes(1)[0]
    assert corrupt_caption(scene, random, wrong_shape=0, wrong_colour=0) == scene.prompt()
