"""The shapes world: a grammar of captions, what each caption looks like, and which compositions are kept from training.

Lengths are fractions of the canvas side, x to the right and y down; colours are RGB in [0, 1].
Axes: B scenes; H, W height and width in pixels.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagg.errors import JaggError

Array = npt.NDArray[np.float64]

COLOURS: Mapping[str, tuple[float, float, float]] = {
    "red": (0.87, 0.12, 0.12),
    "green": (0.12, 0.63, 0.20),
    "blue": (0.13, 0.30, 0.88),
    "yellow": (0.96, 0.85, 0.12),
    "purple": (0.53, 0.17, 0.68),
    "orange": (0.97, 0.52, 0.06),
}
# White and black are the ends of the range: decoding clamps there, so small errors of a policy leave no texture.
BACKGROUNDS: Mapping[str, tuple[float, float, float]] = {
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "gray": (0.55, 0.55, 0.55),
    "pink": (0.99, 0.74, 0.82),
}
SHAPES = ("circle", "square", "triangle", "ring", "cross", "star")
RADII: Mapping[str, float] = {"small": 0.20, "large": 0.38}
# A small shape, jittered, stays in its half of the canvas.
POSITIONS: Mapping[str, tuple[float, float]] = {
    "left": (0.26, 0.5),
    "right": (0.74, 0.5),
    "top": (0.5, 0.26),
    "bottom": (0.5, 0.74),
    "center": (0.5, 0.5),
}

_POSITION_JITTER = 0.02
_RADIUS_JITTER = 0.07
_HELD_OUT_PAIRS = 8
# At most this many held-out pairs share a colour or a shape, so that each is trained in at least 4 of its 6 pairs.
_PAIRS_PER_WORD = 2

_RING_INNER = 0.5
_SQUARE_HALF_SIDE = 0.84
_CROSS_HALF_WIDTH = 0.32
_TRIANGLE_CIRCUMRADIUS = 1.15
_STAR_RADII = (1.05, 0.45)

_COLOUR = "|".join(COLOURS)
_SHAPE = "|".join(SHAPES)
_TAIL = rf" on an? ({'|'.join(BACKGROUNDS)}) background"
_SINGLE = re.compile(
    rf"an? ({'|'.join(RADII)}) ({_COLOUR}) ({_SHAPE})(?: at the ({'|'.join(POSITIONS)}))?{_TAIL}"
)
_DOUBLE = re.compile(rf"an? ({_COLOUR}) ({_SHAPE}) and an? ({_COLOUR}) ({_SHAPE}){_TAIL}")

Pair = tuple[str, str]
"""A colour and a shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeObject:
    """One coloured shape at its place."""

    colour: str
    shape: str
    size: str
    position: str

    @property
    def pair(self) -> Pair:
        """Colour and shape."""
        return self.colour, self.shape

    @property
    def centre(self) -> tuple[float, float]:
        """(x, y) in canvas sides."""
        return POSITIONS[self.position]

    @property
    def radius(self) -> float:
        """Nominal radius in canvas sides; pointed shapes reach a little beyond it."""
        return RADII[self.size]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One object, or two small ones left and right, on a plain background."""

    objects: tuple[ShapeObject, ...]
    background: str

    def prompt(self) -> str:
        """The caption; `parse_prompt` reads it back as an equal scene."""
        if len(self.objects) == 1:
            only = self.objects[0]
            place = "" if only.size == "large" else f" at the {only.position}"
            what = f"a {only.size} {only.colour} {only.shape}{place}"
        else:
            what = " and ".join(f"{_article(o.colour)} {o.colour} {o.shape}" for o in self.objects)
        return f"{what} on a {self.background} background"

    def to_metadata(self) -> dict[str, Any]:
        """JSON values that `from_metadata` reads back as an equal scene."""
        return {
            "objects": [
                {"colour": o.colour, "shape": o.shape, "size": o.size, "position": o.position}
                for o in self.objects
            ],
            "background": self.background,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Scene":
        """The scene of `to_metadata`.

        Raises:
            JaggError: a key is missing or a word is not in the vocabulary.
        """
        try:
            objects = tuple(
                ShapeObject(
                    colour=o["colour"], shape=o["shape"], size=o["size"], position=o["position"]
                )
                for o in metadata["objects"]
            )
            background = metadata["background"]
        except (KeyError, TypeError) as error:
            msg = f"Shapes: metadata {dict(metadata)!r} is no scene; expected `objects` (colour, shape, size, position) and `background`."
            raise JaggError(msg) from error
        words = [w for o in objects for w in (o.colour, o.shape, o.size, o.position)]
        known = all(isinstance(w, str) for w in (*words, background)) and all(
            o.colour in COLOURS
            and o.shape in SHAPES
            and o.size in RADII
            and o.position in POSITIONS
            for o in objects
        )
        if not known or background not in BACKGROUNDS or len(objects) not in (1, 2):
            msg = f"Shapes: metadata {dict(metadata)!r} has words outside the vocabulary; see `COLOURS`, `SHAPES`, `RADII`, `POSITIONS` and `BACKGROUNDS`."
            raise JaggError(msg)
        return cls(objects=objects, background=background)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompositionSplit:
    """Which colour × shape pairs are never trained on."""

    held_out: frozenset[Pair]

    def trains(self, scene: Scene) -> bool:
        """Whether no object of the scene is a held-out pair."""
        return not any(o.pair in self.held_out for o in scene.objects)


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneMix:
    """Shares of the kinds of scene; the rest are single large shapes."""

    two_objects: float = 0.4
    small_single: float = 0.3


def parse_prompt(text: str) -> Scene | None:
    """The scene that a caption of the grammar describes; None for any other text.

    A small shape without a position is centred. Case and repeated spaces do not matter.
    """
    words = " ".join(text.lower().split()).removesuffix(".")
    if match := _SINGLE.fullmatch(words):
        size, colour, shape, position, background = match.groups()
        if size == "large" and position not in (None, "center"):
            return None
        only = ShapeObject(colour=colour, shape=shape, size=size, position=position or "center")
        return Scene(objects=(only,), background=background)
    if match := _DOUBLE.fullmatch(words):
        *named, background = match.groups()
        return Scene(
            objects=_side_by_side((named[0], named[1]), (named[2], named[3])), background=background
        )
    return None


def sample_scene(random: np.random.Generator, mix: SceneMix | None = None) -> Scene:
    """A scene with every word drawn uniformly, of a kind drawn by `mix`."""
    shares = mix or SceneMix()
    kind = random.random()
    first, second = _sample_pair(random), _sample_pair(random)
    position = _choice(random, tuple(POSITIONS))
    background = _choice(random, tuple(BACKGROUNDS))
    if kind < shares.two_objects:
        return Scene(objects=_side_by_side(first, second), background=background)
    small = kind < shares.two_objects + shares.small_single
    only = ShapeObject(
        colour=first[0],
        shape=first[1],
        size="small" if small else "large",
        position=position if small else "center",
    )
    return Scene(objects=(only,), background=background)


def composition_split(seed: int) -> CompositionSplit:
    """Eight of the 36 colour × shape pairs, at most two of one colour or shape; the same for the same seed."""
    random = np.random.default_rng(seed)
    pairs = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    chosen: list[Pair] = []
    for index in random.permutation(len(pairs)):
        colour, shape = pairs[index]
        same = (sum(c == colour for c, _ in chosen), sum(s == shape for _, s in chosen))
        if max(same) < _PAIRS_PER_WORD and len(chosen) < _HELD_OUT_PAIRS:
            chosen.append((colour, shape))
    return CompositionSplit(held_out=frozenset(chosen))


def training_scenes(
    count: int, split: CompositionSplit, random: torch.Generator, mix: SceneMix | None = None
) -> tuple[Scene, ...]:
    """Scenes without any held-out pair; they depend on the state of `random`, which advances by one draw."""
    return _scenes(count, numpy_generator(random), mix, lambda scene: split.trains(scene))


def held_out_scenes(
    count: int, split: CompositionSplit, seed: int, mix: SceneMix | None = None
) -> tuple[Scene, ...]:
    """Distinct scenes with at least one held-out pair each; a longer list starts with the shorter one.

    Raises:
        JaggError: more scenes are asked for than can be found.
    """
    # 1: keeps these draws apart from those of `composition_split`, which uses the bare seed.
    return _scenes(
        count,
        np.random.default_rng([seed, 1]),
        mix,
        lambda scene: not split.trains(scene),
        distinct=True,
    )


def training_prompts(
    count: int, split: CompositionSplit, random: torch.Generator
) -> tuple[str, ...]:
    """Captions of `training_scenes`."""
    return tuple(scene.prompt() for scene in training_scenes(count, split, random))


def held_out_prompts(count: int, split: CompositionSplit, seed: int) -> tuple[str, ...]:
    """Captions of `held_out_scenes`."""
    return tuple(scene.prompt() for scene in held_out_scenes(count, split, seed))


def corrupt_caption(
    scene: Scene, random: np.random.Generator, *, wrong_shape: float, wrong_colour: float
) -> str:
    """The scene's caption with each shape and colour word replaced, with these probabilities, by another one.

    The other word is uniform over the rest of its kind. Background, size and position words stay.
    """
    objects = tuple(
        ShapeObject(
            colour=_other(random, o.colour, tuple(COLOURS), wrong_colour),
            shape=_other(random, o.shape, SHAPES, wrong_shape),
            size=o.size,
            position=o.position,
        )
        for o in scene.objects
    )
    return Scene(objects=objects, background=scene.background).prompt()


def numpy_generator(random: torch.Generator) -> np.random.Generator:
    """A numpy generator seeded by one draw from `random`."""
    return np.random.default_rng(
        int(torch.randint(2**63 - 1, (), generator=random, device=random.device))
    )


def signed_distance(shape: str, x: npt.ArrayLike, y: npt.ArrayLike) -> Array:
    """Signed distance to the outline of a shape of radius 1 at the origin, negative inside; y points down.

    Exact outside squares and polygons and for discs; inside a cross it is a lower bound of the depth.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if shape == "circle":
        return np.asarray(np.hypot(xs, ys) - 1)
    if shape == "ring":
        middle, half = (1 + _RING_INNER) / 2, (1 - _RING_INNER) / 2
        return np.asarray(np.abs(np.hypot(xs, ys) - middle) - half)
    if shape == "square":
        return _box(xs, ys, _SQUARE_HALF_SIDE, _SQUARE_HALF_SIDE)
    if shape == "cross":
        return np.asarray(
            np.minimum(_box(xs, ys, 1.0, _CROSS_HALF_WIDTH), _box(xs, ys, _CROSS_HALF_WIDTH, 1.0))
        )
    if shape == "triangle":
        return _polygon(xs, ys, _spokes((_TRIANGLE_CIRCUMRADIUS,), 3))
    if shape == "star":
        return _polygon(xs, ys, _spokes(_STAR_RADII, 10))
    msg = f"Shapes: {shape!r} is no shape; known are {', '.join(SHAPES)}."
    raise JaggError(msg)


def shape_mask(
    shape: str, cx: npt.ArrayLike, cy: npt.ArrayLike, radius: npt.ArrayLike, size_px: int
) -> Array:
    """How much of each pixel the shape covers, with soft edges one pixel wide.

    Shape: cx, cy and radius broadcast to (...); result (..., H, W) with H = W = size_px, in [0, 1].
    """
    pixels = (np.arange(size_px) + 0.5) / size_px
    centre_x, centre_y, scale = (
        np.asarray(v, dtype=np.float64)[..., None, None] for v in (cx, cy, radius)
    )
    x, y = np.broadcast_arrays(
        (pixels[None, :] - centre_x) / scale, (pixels[:, None] - centre_y) / scale
    )
    return np.asarray(np.clip(0.5 - signed_distance(shape, x, y) * scale * size_px, 0, 1))


def render(scene: Scene, size_px: int, random: np.random.Generator | None = None) -> Array:
    """The picture of a scene; shape (H, W, 3), in [0, 1]. See `render_batch`."""
    return np.asarray(render_batch((scene,), size_px, random)[0])


def render_batch(
    scenes: Sequence[Scene], size_px: int, random: np.random.Generator | None = None
) -> Array:
    """Pictures of scenes; shape (B, H, W, 3), in [0, 1].

    With `random`, every object is moved by up to 0.02 of the canvas in x and y and its radius changed by up to 7 %,
    uniformly; without, it stands where its caption says.
    """
    backgrounds = np.array([BACKGROUNDS[scene.background] for scene in scenes])
    images = np.broadcast_to(backgrounds[:, None, None], (len(scenes), size_px, size_px, 3)).copy()
    owners = [(index, o) for index, scene in enumerate(scenes) for o in scene.objects]
    jitter = (
        np.zeros((len(owners), 3)) if random is None else random.uniform(-1, 1, (len(owners), 3))
    )
    centres = np.array([o.centre for _, o in owners]) + _POSITION_JITTER * jitter[:, :2]
    radii = np.array([o.radius for _, o in owners]) * (1 + _RADIUS_JITTER * jitter[:, 2])
    masks = np.empty((len(owners), size_px, size_px, 1))
    for shape in SHAPES:
        own = [i for i, (_, o) in enumerate(owners) if o.shape == shape]
        if own:
            masks[own, ..., 0] = shape_mask(
                shape, centres[own, 0], centres[own, 1], radii[own], size_px
            )
    for mask, (index, o) in zip(masks, owners, strict=True):
        images[index] += mask * (np.array(COLOURS[o.colour]) - images[index])
    return images


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _side_by_side(first: Pair, second: Pair) -> tuple[ShapeObject, ShapeObject]:
    return (
        ShapeObject(colour=first[0], shape=first[1], size="small", position="left"),
        ShapeObject(colour=second[0], shape=second[1], size="small", position="right"),
    )


def _choice(random: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(random.integers(len(words)))]


def _sample_pair(random: np.random.Generator) -> Pair:
    return _choice(random, tuple(COLOURS)), _choice(random, SHAPES)


def _other(random: np.random.Generator, word: str, words: Sequence[str], probability: float) -> str:
    if random.random() >= probability:
        return word
    return _choice(random, tuple(w for w in words if w != word))


def _scenes(
    count: int,
    random: np.random.Generator,
    mix: SceneMix | None,
    accept: Any,
    *,
    distinct: bool = False,
) -> tuple[Scene, ...]:
    found: list[Scene] = []
    seen: set[Scene] = set()
    # A draw is accepted with probability .2 or more; 100 per scene asked for fail only where scenes run out.
    for _ in range(100 * count + 1000):
        if len(found) == count:
            return tuple(found)
        scene = sample_scene(random, mix)
        if accept(scene) and not (distinct and scene in seen):
            found.append(scene)
            seen.add(scene)
    msg = f"Shapes: only {len(found)} of {count} scenes could be drawn; ask for fewer, or hold out other compositions."
    raise JaggError(msg)


def _box(x: Array, y: Array, half_width: float, half_height: float) -> Array:
    dx, dy = np.abs(x) - half_width, np.abs(y) - half_height
    return np.asarray(
        np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0)
    )


def _spokes(radii: Sequence[float], count: int) -> list[tuple[float, float]]:
    """Corners around the origin from the top on, their distances taken from `radii` in turn."""
    angles = [-math.pi / 2 + 2 * math.pi * i / count for i in range(count)]
    return [
        (radii[i % len(radii)] * math.cos(a), radii[i % len(radii)] * math.sin(a))
        for i, a in enumerate(angles)
    ]


def _polygon(x: Array, y: Array, corners: Sequence[tuple[float, float]]) -> Array:
    """Signed distance to a simple polygon: nearest edge, sign by crossings."""
    nearest = np.full(x.shape, np.inf)
    inside = np.zeros(x.shape, dtype=np.bool_)
    for (ax, ay), (bx, by) in zip(corners, [*corners[1:], corners[0]], strict=True):
        ex, ey = bx - ax, by - ay
        along = np.clip(((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey), 0, 1)
        nearest = np.minimum(nearest, (x - ax - along * ex) ** 2 + (y - ay - along * ey) ** 2)
        if ay != by:
            inside ^= ((ay > y) != (by > y)) & (x < ax + (y - ay) * ex / ey)
    return np.asarray(np.where(inside, -1, 1) * np.sqrt(nearest))
