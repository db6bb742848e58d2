"""The independent scorer of the shapes world: is every word of the prompt right?

Kept apart from the training reward: it finds objects by Lab distance and Otsu's threshold, and names their shapes by
classifiers that learnt from distorted drawings. The two share only the world that they judge (outlines, colours, places,
sizes and captions of `shapes`) and the refusal of unreadable images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from skimage.color import rgb2lab
from skimage.measure import label

from jagg.errors import JaggError
from jagg.values import Scorer, ScoreRequest, ScoreResult
from nodes.backends.scoring import image_problems, score_result
from nodes.backends.shape_classifiers import ShapeClassifiers, load
from nodes.backends.shape_contours import (
    Array,
    Foreground,
    border_colour,
    contour_features,
    crop_object,
    find_foreground,
)
from nodes.backends.shapes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    RADII,
    SHAPES,
    Scene,
    ShapeObject,
    parse_prompt,
    signed_distance,
)

NAME = "shape_check"
WEIGHTS = Path(__file__).parent / "weights" / "shape_check.safetensors"

_ASPECTS = ("shape", "contour", "colour", "background", "position")
# The least side at which a small ring keeps its hole after segmentation.
_LEAST_SIDE = 16
# A second patch of at least this share of the object's pixels is a second object; specks are not.
_SECOND_OBJECT = 0.3


@dataclass(kw_only=True, slots=True)
class _Finding:
    """What was seen in one picture; aspects are right only if they are right for every object."""

    colour: bool = True
    background: bool = True
    position: bool = True
    texture: float = 0.0
    crops: list[Array]
    kinds: list[int]
    """The prompted shape of every crop."""
    missing: bool = False
    """Whether an object was not found."""


def scorer(weights: Path | None = None) -> Scorer:
    """A scorer that is 1 where shape, colour, background, position and size of every object are right, else 0.

    `raw` is the share of right aspects among shape, colour, background and position. Parts, each 1 or 0:
    contour (fully right with the shapes named by outline instead of by the network), shape (by the network), colour,
    background, position (with size, and nothing else in the picture); and texture, the root mean square RGB distance
    of pixels to the nearest named colour.

    Raises:
        JaggError: the weights are not there.
    """
    path = weights or WEIGHTS
    if not path.is_file():
        msg = f"Shape Check: no weights at {path}. Train them with the Shape Check trainer, or get the file from the repository."
        raise JaggError(msg)
    classifiers = load(path)

    def score(request: ScoreRequest) -> ScoreResult:
        return _score(request, classifiers)

    return Scorer(name=NAME, version=1, score=score)


def _score(request: ScoreRequest, classifiers: ShapeClassifiers) -> ScoreResult:
    problems = image_problems(NAME, request, least_side=_LEAST_SIDE, square=True)
    images = request.images.detach().cpu().double().movedim(1, -1).numpy()
    findings: dict[int, _Finding] = {}
    for i, image in enumerate(images):
        if problems[i]:
            continue
        scene = _scene(request.prompts[i], request.metadata[i])
        if isinstance(scene, str):
            problems[i] = scene
        else:
            findings[i] = _look(np.clip(image, 0, 1), scene)
    named = _name_shapes(findings, classifiers)
    columns = {name: torch.full((len(images),), torch.nan) for name in (*_ASPECTS, "texture")}
    for i, finding in findings.items():
        shape, outline = named[i]
        others = finding.colour and finding.background and finding.position
        seen = {
            "shape": shape,
            "contour": outline and others,
            "colour": finding.colour,
            "background": finding.background,
            "position": finding.position,
            "texture": finding.texture,
        }
        for name, value in seen.items():
            columns[name][i] = float(value)
    right = torch.stack([columns[name] for name in ("shape", "colour", "background", "position")])
    return score_result(right.mean(0), right.prod(0), columns, problems)


def _scene(prompt: str, metadata: Mapping[str, Any]) -> Scene | str:
    """The scene that was asked for, or why it is unknown."""
    if "objects" in metadata:
        try:
            return Scene.from_metadata(metadata)
        except JaggError as error:
            return str(error)
    return parse_prompt(prompt) or f"prompt {prompt!r} is not in the grammar of the shapes world"


def _look(image: Array, scene: Scene) -> _Finding:
    """Segment one picture and compare it with the scene, shapes aside. Shape: image (H, W, 3)."""
    side = image.shape[0]
    background = border_colour(image)
    finding = _Finding(crops=[], kinds=[], background=_nearest_name(background) == scene.background)
    finding.texture = _texture(image)
    starts = (0,) if len(scene.objects) == 1 else (0, side // 2)
    for item, start, stop in zip(scene.objects, starts, (*starts[1:], side), strict=True):
        found = find_foreground(image[:, start:stop], background)
        if found is None:
            finding.missing = True
            finding.colour = finding.position = False
            continue
        finding.colour &= _nearest_name(found.colour) == item.colour
        finding.position &= _at_place(found, item, start, side) and not _second_object(found)
        finding.crops.append(crop_object(found))
        finding.kinds.append(SHAPES.index(item.shape))
    return finding


def _name_shapes(
    findings: Mapping[int, _Finding], classifiers: ShapeClassifiers
) -> dict[int, tuple[bool, bool]]:
    """For each picture: are all its shapes right by the network, and by their outlines?"""
    crops = [crop for finding in findings.values() for crop in finding.crops]
    if not crops:
        return dict.fromkeys(findings, (False, False))
    features = np.stack([contour_features(crop) for crop in crops])
    with torch.no_grad():
        by_network = classifiers.shape_logits(torch.from_numpy(np.stack(crops)).float()).argmax(1)
        by_outline = classifiers.contour_logits(torch.from_numpy(features).float()).argmax(1)
    votes = iter(zip(by_network.tolist(), by_outline.tolist(), strict=True))
    result = {}
    for i, finding in findings.items():
        right = [
            (network == kind, outline == kind)
            for kind, (network, outline) in zip(finding.kinds, votes, strict=False)
        ]
        network_right, outline_right = (
            (all(column) for column in zip(*right, strict=True)) if right else (False, False)
        )
        result[i] = (network_right and not finding.missing, outline_right and not finding.missing)
    return result


def _at_place(found: Foreground, item: ShapeObject, start: int, side: int) -> bool:
    """Whether the centroid is nearest to the prompted position, and the area fits the prompted size best."""
    x, y = ((start + found.centre[0] + 0.5) / side, (found.centre[1] + 0.5) / side)
    nearest = min(
        POSITIONS, key=lambda name: (POSITIONS[name][0] - x) ** 2 + (POSITIONS[name][1] - y) ** 2
    )
    radius = (found.area / _unit_area(item.shape)) ** 0.5 / side
    size = min(RADII, key=lambda name: abs(np.log(RADII[name] / radius)))
    return nearest == item.position and size == item.size


def _second_object(found: Foreground) -> bool:
    """Whether the rest of the region holds another patch that is large enough to be an object."""
    sizes = np.bincount(label(found.rest, connectivity=1).ravel())[1:]
    return bool(len(sizes)) and float(sizes.max()) > _SECOND_OBJECT * float(found.mask.sum())


@lru_cache(maxsize=len(SHAPES))
def _unit_area(shape: str) -> float:
    """Area of a shape of radius 1, by counting points."""
    points = np.linspace(-1.5, 1.5, 601)
    x, y = np.meshgrid(points, points)
    return float((signed_distance(shape, x, y) < 0).mean()) * 9


@lru_cache(maxsize=1)
def _named_colours() -> tuple[tuple[str, ...], Array, Array]:
    """All colour names with their RGB and Lab values; shapes (n, 3)."""
    names = {**COLOURS, **BACKGROUNDS}
    rgb = np.array(list(names.values()))
    return tuple(names), rgb, rgb2lab(rgb[None])[0]


def _nearest_name(colour: Array) -> str:
    names, _, lab = _named_colours()
    return names[int(np.linalg.norm(lab - rgb2lab(colour[None, None])[0, 0], axis=1).argmin())]


def _texture(image: Array) -> float:
    _, rgb, _ = _named_colours()
    squares = np.square(image.reshape(-1, 1, 3) - rgb).sum(2).min(1)
    return float(np.sqrt(squares.mean()))
