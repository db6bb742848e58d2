"""The training reward of the shapes world: does the picture match its prompted shape better than any other shape?

Every object is compared with rendered templates of all shapes at its place, moved and resized a little; paint off the
line between background and object colour costs as texture.
Axes: K shapes; V variants of a template (shift and radius); H, W height and width in pixels; X pixels of a region.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagg.errors import JaggError
from jagg.values import Scorer, ScoreRequest, ScoreResult
from nodes.backends.scoring import image_problems, score_result
from nodes.backends.shapes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    RADII,
    SHAPES,
    Scene,
    parse_prompt,
    shape_mask,
)

NAME = "shape_margin"
_PARTS = ("margin", "colour", "fit", "texture")

# Drawings move by up to .02 and grow by up to 7 %; thirds of that on both sides leave the least error in between.
_SHIFTS = (-0.0133, 0.0, 0.0133)
_SCALES = (0.953, 1.0, 1.047)
# A small ring is 2 pixels wide at 16x16; below that shapes cannot be told apart.
_LEAST_SIDE = 16

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeMargin:
    """Constants of the reward R = p · fit - texture_weight · texture."""

    temperature: float = 0.05
    """Of the softmax over shapes, in units of squared error relative to a blank region's."""
    texture_weight: float = 1.5
    """Raised until paint outside the two prompted colours fell by the end of training."""
    colour_temperature: float = 0.03
    """Of the softmax over colours, in squared RGB distance; halfway between orange and yellow, the nearest two, is 0.11 / 4."""
    colour_margin: bool = False
    """Whether R pays sqrt(p · q) in place of p. Without it a small shape loses only about 0.1 by a neighbouring colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Templates:
    """Every variant of every shape at one place. Shape: coverage (K·V, X); energy (K·V,) = Σt²."""

    coverage: Array
    energy: Array


def scorer(settings: ShapeMargin | None = None) -> Scorer:
    """A scorer of R = p · fit - 1.5 · texture; `raw` is R and `values` is (R + 1) / 2 clipped to [0, 1].

    With m the share of the prompted colour in each pixel (its projection on the line from background to object colour
    in RGB, clamped to [0, 1]): E_k is the least Σ(m - template)² / Σtemplate² over variants of shape k, so that a
    blank picture has an E of 1 for every shape; p is softmax(-E / temperature) at the prompted shape; fit is 1 - E of
    the prompted shape, at least 0; texture is the root mean square distance of pixels from that line. Two objects are scored on their own halves of the picture, p
    and fit combined by geometric means, texture over the whole. A rendered prompt has an R of about .9, not 1.

    q, the margin of colour, is the softmax of -‖c - colour‖² / colour_temperature over all object colours, at the prompted
    one; c is the object's mean colour under its best template. It is reported, and paid where `colour_margin` is set.

    The scene is read from metadata where they describe one, else from the prompt. Parts: margin (p), colour (q), fit, texture.
    """
    constants = settings or ShapeMargin()

    def score(request: ScoreRequest) -> ScoreResult:
        return _score(request, constants)

    return Scorer(name=NAME, version=1, score=score)


def _score(request: ScoreRequest, settings: ShapeMargin) -> ScoreResult:
    problems = image_problems(NAME, request, least_side=_LEAST_SIDE, square=True)
    images = request.images.detach().cpu().double().movedim(1, -1).numpy()
    measured = np.full((len(images), len(_PARTS)), np.nan)
    for i, image in enumerate(images):
        if problems[i]:
            continue
        scene = _scene(request.prompts[i], request.metadata[i])
        if isinstance(scene, str):
            problems[i] = scene
        else:
            measured[i] = _measure(np.clip(image, 0, 1), scene, settings)
    parts = dict(zip(_PARTS, torch.from_numpy(measured).unbind(1), strict=True))
    margin = (
        (parts["margin"] * parts["colour"]).sqrt() if settings.colour_margin else parts["margin"]
    )
    raw = margin * parts["fit"] - settings.texture_weight * parts["texture"]
    return score_result(raw, ((raw + 1) / 2).clamp(0, 1), parts, problems)


def _scene(prompt: str, metadata: Mapping[str, Any]) -> Scene | str:
    """The scene to look for, or why there is none."""
    if "objects" in metadata:
        try:
            return Scene.from_metadata(metadata)
        except JaggError as error:
            return str(error)
    return parse_prompt(prompt) or f"prompt {prompt!r} is not in the grammar of the shapes world"


def _measure(image: Array, scene: Scene, settings: ShapeMargin) -> Array:
    """Margin, colour, fit and texture of one picture. Shape: image (H, W, 3); result (4,)."""
    side = image.shape[0]
    background = np.array(BACKGROUNDS[scene.background])
    regions = _regions(side, len(scene.objects))
    product, off_line = np.ones(3), 0.0
    for item, (start, stop) in zip(scene.objects, regions, strict=True):
        offset = image[:, start:stop].reshape(-1, 3) - background
        line = np.array(COLOURS[item.colour]) - background
        share = np.clip(offset @ line / (line @ line), 0, 1)
        off_line += float(np.square(offset - share[:, None] * line).sum())
        templates = _templates(item.size, item.position, side, start, stop)
        errors, best = _errors(share, templates)
        prompted = SHAPES.index(item.shape)
        template = templates.coverage[best[prompted]]
        paint = background + template @ offset / templates.energy[best[prompted]]
        distances = np.square(_colours() - paint).sum(1)
        margin = _softmax(-errors / settings.temperature)[prompted]
        colour = _softmax(-distances / settings.colour_temperature)[
            list(COLOURS).index(item.colour)
        ]
        product *= (margin, colour, min(1.0, max(0.0, 1 - float(errors[prompted]))))
    means = product ** (1 / len(scene.objects))
    return np.array([*means, (off_line / (side * side)) ** 0.5])


def _errors(share: Array, templates: _Templates) -> tuple[Array, npt.NDArray[np.int64]]:
    """E_k, the least squared error of each shape relative to a blank region's, and the variants that reach it; (K,)."""
    squares = share @ share - 2 * (templates.coverage @ share) + templates.energy
    relative = (squares / templates.energy).reshape(len(SHAPES), -1)
    best = relative.argmin(1)
    variants = best + np.arange(len(SHAPES)) * relative.shape[1]
    return np.asarray(relative.min(1)), variants


def _softmax(logits: Array) -> Array:
    odds = np.exp(logits - logits.max())
    return np.asarray(odds / odds.sum())


@lru_cache(maxsize=1)
def _colours() -> Array:
    """RGB of every object colour; shape (6, 3)."""
    return np.array(list(COLOURS.values()))


def _regions(side: int, objects: int) -> tuple[tuple[int, int], ...]:
    """Half-open column ranges, one per object: the whole picture, or its halves."""
    return ((0, side),) if objects == 1 else ((0, side // 2), (side // 2, side))


@lru_cache(maxsize=64)  # 8 places (5 small, 1 large, 2 halves) at up to 8 image sizes
def _templates(size: str, position: str, side: int, start: int, stop: int) -> _Templates:
    centre_x, centre_y = POSITIONS[position]
    grid = np.array([(dx, dy, s) for dx in _SHIFTS for dy in _SHIFTS for s in _SCALES])
    masks = np.stack(
        [
            shape_mask(
                shape, centre_x + grid[:, 0], centre_y + grid[:, 1], RADII[size] * grid[:, 2], side
            )
            for shape in SHAPES
        ]
    )
    coverage = np.ascontiguousarray(masks[..., start:stop].reshape(len(SHAPES) * len(grid), -1))
    return _Templates(coverage=coverage, energy=np.square(coverage).sum(1))
