"""What every scorer promises, whatever it measures.

Rule numbers in test names: 1 range, 2 failure is NaN, 4 batching, 5 determinism, 6 order, 7 perturbation ladder,
8 adversarial set, 10 golden values, 12 no trainable state.
"""

import hashlib
import itertools
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from jagg.errors import ShapeError
from jagg.values import Scorer, ScoreRequest
from nodes.backends import redness, shape_check, shape_margin
from nodes.backends.shapes import BACKGROUNDS, parse_prompt, render, render_batch, sample_scene

PROMPT = "a large green ring on a white background"
PAIR = "a red star and a blue circle on a white background"
FACTORIES = {
    "redness": redness.scorer,
    "shape_margin": shape_margin.scorer,
    "shape_check": shape_check.scorer,
}
READS_PROMPTS = ("shape_margin", "shape_check")


@dataclass(frozen=True)
class Case:
    """A scorer's ladder of ever stronger corruption, its adversarial bounds and its golden values."""

    ladder: list[np.ndarray]
    bounds: dict[str, float]
    golden: list[float]
    golden_parts: dict[str, list[float]] = field(default_factory=dict)


def picture(prompt, side=24):
    scene = parse_prompt(prompt)
    assert scene is not None
    return render(scene, side)


def paper(background="white"):
    return np.broadcast_to(np.array(BACKGROUNDS[background]), (24, 24, 3)).copy()


def noisy(image, strength, seed=0):
    noise = np.random.default_rng(seed).normal(0, 1, image.shape)
    return np.clip(image + strength * noise, 0, 1)


def red(share):
    image = paper()
    image[: round(24 * share)] = (1, 0, 0)
    return image


ADVERSARIAL = {
    "blank": paper(),
    "white noise": np.random.default_rng(1).uniform(0, 1, (24, 24, 3)),
    "filled ring": picture(PROMPT.replace("ring", "circle")),
    "wrong colour": picture(PROMPT.replace("green", "blue")),
    "wrong shape": picture(PROMPT.replace("ring", "star")),
    "wrong background": picture(PROMPT.replace("white", "black")),
    "painted all over": np.broadcast_to(np.array((0.12, 0.63, 0.20)), (24, 24, 3)).copy(),
    "checkerboard": np.indices((24, 24)).sum(0)[..., None] % 2 * np.ones(3),
}
GOLDEN_PROMPTS = [
    PROMPT,
    PAIR,
    "a small red square at the top on a black background",
    "a large yellow cross on a pink background",
    "a small orange triangle at the right on a gray background",
    "a purple ring and a green cross on a gray background",
]


def golden_images():
    drawn = [picture(prompt) for prompt in GOLDEN_PROMPTS]
    # The second half is damaged: noise, a wrong shape, a fading object.
    drawn[3] = noisy(drawn[3], 0.1)
    drawn[4] = picture(GOLDEN_PROMPTS[4].replace("triangle", "circle"))
    background = np.array(BACKGROUNDS["gray"])
    drawn[5] = background + 0.6 * (drawn[5] - background)
    return drawn


CASES = {
    "redness": Case(
        ladder=[red(share) for share in (1, 0.75, 0.5, 0.25, 0)],
        bounds=dict.fromkeys(ADVERSARIAL, 0.6),
        golden=[0.44974, 0.49215, 0.54233, 0.6263, 0.54286, 0.49529],
    ),
    "shape_margin": Case(
        ladder=[noisy(picture(PROMPT), strength) for strength in (0, 0.05, 0.1, 0.2, 0.4, 0.8)],
        bounds={
            "blank": 0.51,
            "white noise": 0.35,
            "filled ring": 0.52,
            "wrong colour": 0.7,
            "wrong shape": 0.51,
            "wrong background": 0.5,
            "painted all over": 0.51,
            "checkerboard": 0.4,
        },
        golden=[0.99524, 0.96122, 0.92573, 0.87456, 0.5, 0.91525],
        golden_parts={"fit": [1, 1, 1, 0.9616, 0.3911, 0.8509], "texture": [0, 0, 0, 0.1374, 0, 0]},
    ),
    "shape_check": Case(
        ladder=[
            picture(PROMPT) * (1 - w) + w * picture(PROMPT.replace("ring", "circle"))
            for w in (0, 0.2, 0.4, 0.6, 0.8, 1)
        ],
        bounds=dict.fromkeys(ADVERSARIAL, 0.0),
        golden=[1, 1, 1, 1, 0, 1],
        golden_parts={
            "contour": [1, 1, 1, 1, 0, 1],
            "texture": [0.0928, 0.0914, 0.0361, 0.1562, 0.0446, 0.0893],
        },
    ),
}


def score(scorer: Scorer, images, prompts=None, metadata=None):
    batch = (
        images
        if isinstance(images, torch.Tensor)
        else torch.tensor(np.stack(images)).movedim(-1, 1)
    )
    count = len(batch)
    return scorer.score(
        ScoreRequest(
            images=batch.float(),
            prompts=prompts or [PROMPT] * count,
            metadata=metadata or [{}] * count,
        )
    )


def scenes_and_images(count, side=24, seed=2):
    random = np.random.default_rng(seed)
    scenes = [sample_scene(random) for _ in range(count)]
    images = render_batch(scenes, side, random)
    images = np.stack([noisy(image, 0.04 * (i % 4), i) for i, image in enumerate(images)])
    return [s.prompt() for s in scenes], torch.tensor(images).movedim(-1, 1).float()


def tensors(result):
    return {"values": result.values, "raw": result.raw, **result.parts}


def fingerprint(name):
    prompts, images = scenes_and_images(6)
    result = score(FACTORIES[name](), images, prompts)
    return hashlib.sha256(
        b"".join(t.numpy().tobytes() for t in tensors(result).values())
    ).hexdigest()


@pytest.fixture(scope="module", params=list(FACTORIES))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def scorer(name):
    return FACTORIES[name]()


def test_it_is_named_and_shaped(scorer, name):
    prompts, images = scenes_and_images(5)
    result = score(scorer, images, prompts)
    assert scorer.name == name
    assert scorer.version >= 1
    assert result.notes in ((), ("",) * 5)
    for key, tensor in tensors(result).items():
        assert tensor.shape == (5,), key
        assert tensor.dtype == torch.float32, key


@pytest.mark.parametrize(
    "shape",
    [
        (3, 24, 24),
        (3, 32, 32),
        (3, 1, 1),
        (4, 24, 24),
        (3, 8, 200),
        (3, 200, 8),
        (1, 24, 24),
        (3, 65, 65),
    ],
)
@pytest.mark.parametrize("kind", ["uniform", "zeros", "ones", "bits"])
def test_rule_1_values_are_in_range_or_nan(scorer, shape, kind):
    random = torch.Generator().manual_seed(7)
    images = {
        "uniform": torch.rand(2, *shape, generator=random),
        "zeros": torch.zeros(2, *shape),
        "ones": torch.ones(2, *shape),
        "bits": torch.randint(0, 2, (2, *shape), generator=random).float(),
    }[kind]
    result = score(scorer, images)
    finite = result.values[result.values.isfinite()]
    assert ((finite >= 0) & (finite <= 1)).all()
    assert not result.values.isinf().any()
    for value, note in zip(result.values, result.notes, strict=True):
        assert bool(note) == bool(value.isnan())


def test_rule_2_an_unreadable_image_is_nan_and_touches_no_other(scorer):
    prompts, images = scenes_and_images(5)
    clean = tensors(score(scorer, images, prompts))
    broken = images.clone()
    broken[1, 0, 3, 3] = torch.nan
    broken[3, 2, 0, 0] = 7.0
    result = score(scorer, broken, prompts)
    for key, tensor in tensors(result).items():
        assert tensor[[1, 3]].isnan().all(), key
        assert torch.equal(tensor[[0, 2, 4]], clean[key][[0, 2, 4]]), key
    assert result.notes[1]
    assert result.notes[3]


@pytest.mark.parametrize("reader", READS_PROMPTS)
def test_rule_2_an_unknown_prompt_is_nan_and_touches_no_other(reader):
    scorer = FACTORIES[reader]()
    prompts, images = scenes_and_images(3)
    clean = score(scorer, images, prompts)
    result = score(scorer, images, [prompts[0], "a photo of a cat", prompts[2]])
    assert result.values.isnan().tolist() == [False, True, False]
    assert torch.equal(result.values[[0, 2]], clean.values[[0, 2]])
    assert "cat" in result.notes[1]


@pytest.mark.parametrize("reader", READS_PROMPTS)
def test_nothing_drawn_is_a_real_score(reader):
    result = score(FACTORIES[reader](), [paper()])
    assert result.values.isfinite().all()


def test_lengths_must_agree(scorer):
    _, images = scenes_and_images(2)
    with pytest.raises(ShapeError, match="2 images, 1 prompts"):
        scorer.score(ScoreRequest(images=images, prompts=[PROMPT], metadata=[{}, {}]))


def test_rule_4_a_batch_is_its_singles(scorer):
    prompts, images = scenes_and_images(9)
    together = tensors(score(scorer, images, prompts))
    alone = [tensors(score(scorer, images[i : i + 1], [prompts[i]])) for i in range(9)]
    for key, tensor in together.items():
        torch.testing.assert_close(tensor, torch.cat([a[key] for a in alone]), atol=1e-6, rtol=0)


def test_rule_5_the_same_bits_twice_and_after_other_work(scorer):
    prompts, images = scenes_and_images(5)
    first = tensors(score(scorer, images, prompts))
    torch.rand(5)
    np.random.default_rng().random(5)
    score(scorer, images.flip(0), prompts[::-1])
    for key, tensor in tensors(score(scorer, images, prompts)).items():
        assert torch.equal(tensor, first[key]), key


def test_rule_5_the_same_bits_in_another_process():
    code = (
        "import importlib.util, sys, torch; torch.set_num_threads(1);"
        f"spec = importlib.util.spec_from_file_location('contract', {__file__!r});"
        "module = importlib.util.module_from_spec(spec); sys.modules['contract'] = module;"
        "spec.loader.exec_module(module); print(*map(module.fingerprint, module.FACTORIES))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.split() == [fingerprint(name) for name in FACTORIES]


def test_rule_6_permuting_the_batch_permutes_the_scores(scorer):
    prompts, images = scenes_and_images(8)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    straight = tensors(score(scorer, images, prompts))
    permuted = tensors(score(scorer, images[order], [prompts[i] for i in order]))
    for key, tensor in permuted.items():
        torch.testing.assert_close(tensor, straight[key][order], atol=1e-6, rtol=0)


def test_rule_7_stronger_corruption_never_scores_higher(scorer, name):
    values = score(scorer, CASES[name].ladder).values.tolist()
    for weaker, stronger in itertools.pairwise(values):
        assert stronger <= weaker + 0.01
    assert values[-1] < values[0] - 0.3


@pytest.mark.parametrize("trick", list(ADVERSARIAL))
def test_rule_8_tricks_stay_below_their_bound(scorer, name, trick):
    assert score(scorer, [ADVERSARIAL[trick]]).values.item() <= CASES[name].bounds[trick]


@pytest.mark.parametrize("reader", READS_PROMPTS)
def test_rule_8_swapped_objects_stay_below_the_truth(reader):
    scorer = FACTORIES[reader]()
    swapped = picture("a blue circle and a red star on a white background")
    values = score(scorer, [picture(PAIR), swapped], [PAIR, PAIR]).values
    assert values[0] > 0.9
    assert values[1] < 0.5


def test_rule_10_golden_values(scorer, name):
    result = score(scorer, golden_images(), GOLDEN_PROMPTS)
    assert result.values.tolist() == pytest.approx(CASES[name].golden, abs=1e-4)
    for part, values in CASES[name].golden_parts.items():
        assert result.parts[part].tolist() == pytest.approx(values, abs=1e-4), part


def test_rule_12_no_gradient_and_inputs_untouched(scorer):
    prompts, images = scenes_and_images(2)
    before = images.clone()
    images.requires_grad_(True)
    result = score(scorer, images, prompts)
    for key, tensor in tensors(result).items():
        assert not tensor.requires_grad, key
    assert torch.equal(images.detach(), before)


def test_rule_12_networks_keep_their_weights():
    networks = shape_check.load(shape_check.WEIGHTS)
    assert not any(p.requires_grad for p in networks.parameters())
