"""One object of a picture seen without templates: Lab segmentation, its crop for a network, its outline in numbers.

Used by the independent scorer; nothing here is shared with the training reward.
Axes: H, W height and width in pixels. Images here are numpy (H, W, 3), float in [0, 1].
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from skimage.color import rgb2lab
from skimage.filters import threshold_otsu
from skimage.measure import (
    approximate_polygon,
    find_contours,
    label,
    moments_central,
    moments_hu,
    moments_normalized,
)

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

CROP = 20
"""Side of an object's crop in pixels."""
CONTOUR_FEATURES = 30
"""Length of `contour_features`."""

# Below this Lab distance nothing stands out: about ten just-noticeable differences, under any two colour names here.
_LEAST_CONTRAST = 10.0
# Fewer pixels than this are a speck, not an object (a small ring covers about 35 of 24x24).
_LEAST_AREA = 6
# Share of the crop's half side that the object's longer side fills: leaves about two pixels of background around.
_FILL = 0.8
_ANGLES = 64
_HARMONICS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreground:
    """The one object found in a region: how far each pixel stands off the background, and where the object is.

    Shape: coverage (H, W) of the region, 0 = background, 1 = object; mask (H, W).
    """

    coverage: Array
    mask: Mask
    rest: Mask
    """Pixels that stand out elsewhere in the region; shape (H, W)."""
    colour: Array
    """Median colour of the object's inner pixels, RGB in [0, 1]; shape (3,)."""
    centre: tuple[float, float]
    """Centroid (x, y) in pixels of the region."""
    area: float
    """Sum of coverage, in pixels."""


def border_colour(image: Array) -> Array:
    """The median colour of the outermost pixels; shape (3,)."""
    border = np.concatenate((image[0], image[-1], image[1:-1, 0], image[1:-1, -1]))
    return np.asarray(np.median(border, axis=0))


def find_foreground(image: Array, background: Array) -> Foreground | None:
    """The largest connected patch that differs from `background`; None where nothing stands out.

    The threshold is Otsu's over Lab distances. Shape: image (H, W, 3); background (3,).
    """
    lab = rgb2lab(np.concatenate((image.reshape(-1, 3), background[None]))[None])[0]
    distance = np.linalg.norm(lab[:-1] - lab[-1], axis=1).reshape(image.shape[:2])
    if distance.max() < _LEAST_CONTRAST:
        return None
    threshold = max(float(threshold_otsu(distance)), _LEAST_CONTRAST / 2)
    labels = label(distance > threshold, connectivity=1)
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    mask = labels == int(sizes.argmax())
    if sizes.max() < _LEAST_AREA:
        return None
    inner = mask & (distance >= np.median(distance[mask]))
    coverage = np.clip(distance / np.median(distance[inner]), 0, 1)
    coverage[~_grown(mask)] = 0
    area = float(coverage.sum())
    rows, columns = np.indices(coverage.shape)
    return Foreground(
        coverage=coverage,
        mask=mask,
        rest=(labels > 0) & ~mask,
        colour=np.asarray(np.median(image[inner], axis=0)),
        centre=(float((columns * coverage).sum()) / area, float((rows * coverage).sum()) / area),
        area=area,
    )


def crop_object(foreground: Foreground) -> Array:
    """The object's coverage on a CROP x CROP grid, its box centred and scaled to a fixed share of the crop."""
    rows = np.flatnonzero(foreground.mask.any(1))
    columns = np.flatnonzero(foreground.mask.any(0))
    middle_y, middle_x = (rows[0] + rows[-1]) / 2, (columns[0] + columns[-1]) / 2
    half = (max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1) / 2 / _FILL
    offsets = (np.arange(CROP) + 0.5) / CROP * 2 - 1
    return _bilinear(foreground.coverage, middle_y + offsets * half, middle_x + offsets * half)


def contour_features(crop: Array) -> Array:
    """Thirty numbers of an object's crop: holes, solidity, fills, corners, Hu moments and radial Fourier amplitudes.

    Shape: crop (CROP, CROP); result (CONTOUR_FEATURES,).
    """
    mask = crop > 0.5
    area = float(mask.sum())
    outline = _outline(crop)
    if outline is None or area == 0:
        return np.zeros(CONTOUR_FEATURES)
    enclosed, perimeter = (
        _polygon_area(outline),
        float(np.linalg.norm(np.diff(outline, axis=0), axis=1).sum()),
    )
    hull = _hull(outline)
    hull_area = _polygon_area(hull)
    low, high = outline.min(0), outline.max(0)
    sides = high - low
    normal: Any = moments_normalized(moments_central(crop, order=3), order=3)
    hu = moments_hu(normal)
    spread = np.array([[normal[0, 2], normal[1, 1]], [normal[1, 1], normal[2, 0]]])
    axes = np.linalg.eigvalsh(spread)
    centre = _centroid(outline)
    corners = approximate_polygon(outline, 1.0)
    features = [
        max(0.0, enclosed - float(crop.sum())) / max(enclosed, 1.0),
        float(label(~mask, connectivity=1).max() - 1),
        enclosed / max(hull_area, 1.0),
        enclosed / max(float(sides.prod()), 1.0),
        float(sides.min() / max(sides.max(), 1e-6)),
        4 * math.pi * enclosed / max(perimeter, 1e-6) ** 2,
        float(axes[0] / max(axes[1], 1e-9)),
        len(corners) / 10,
        len(approximate_polygon(corners, 1.8)) / 10,
        *_grid_fills(crop),
        *(math.copysign(math.log1p(abs(h) * 1e3), h) for h in hu[:4]),
        # Signed skew along the vertical axis: tells up from down, which Hu moments do not.
        float(normal[3, 0]) * 10,
        *_radial_amplitudes(outline, centre),
    ]
    return np.asarray(features)


def _grown(mask: Mask) -> Mask:
    """The mask and its direct neighbours, diagonals included: soft edges belong to the object."""
    padded = np.pad(mask, 1)
    grown = padded.copy()
    for axis in (0, 1):
        grown = grown | np.roll(grown, 1, axis) | np.roll(grown, -1, axis)
    return grown[1:-1, 1:-1]


def _bilinear(image: Array, y: Array, x: Array) -> Array:
    """Values at the grid y by x by bilinear interpolation, 0 outside; shape (len(y), len(x))."""
    height, width = image.shape

    def weights(positions: Array, size: int) -> Array:
        return np.asarray(np.maximum(0, 1 - np.abs(positions[:, None] - np.arange(size)[None])))

    return np.asarray(weights(y, height) @ image @ weights(x, width).T)


def _outline(crop: Array) -> Array | None:
    """The longest closed iso-line at one half, as (y, x) points; None where there is none."""
    lines = find_contours(np.pad(crop, 1), 0.5)
    return max(lines, key=len) - 1 if lines else None


def _polygon_area(points: Array) -> float:
    y, x = points[:, 0], points[:, 1]
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def _centroid(points: Array) -> Array:
    """Centre of mass of the area inside a closed polygon (shoelace formula); shape (2,)."""
    following = np.roll(points, -1, axis=0)
    cross = points[:, 0] * following[:, 1] - following[:, 0] * points[:, 1]
    total = float(cross.sum())
    if abs(total) < 1e-9:
        return np.asarray(points.mean(0))
    return np.asarray(((points + following) * cross[:, None]).sum(0) / (3 * total))


def _hull(points: Array) -> Array:
    """Convex hull by Andrew's monotone chain; shape (n, 2)."""
    ordered = sorted(map(tuple, points.tolist()))

    def chain(sequence: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
        kept: list[tuple[float, ...]] = []
        for p in sequence:
            while len(kept) > 1 and _turn(kept[-2], kept[-1], p) <= 0:
                kept.pop()
            kept.append(p)
        return kept[:-1]

    return np.asarray(chain(ordered) + chain(ordered[::-1]))


def _turn(a: tuple[float, ...], b: tuple[float, ...], c: tuple[float, ...]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _grid_fills(crop: Array) -> list[float]:
    """Mean coverage of the nine cells of a 3 x 3 grid, from six numbers: left and right halves are averaged.

    Every shape here is symmetric about its vertical axis, so mirrored cells say the same.
    """
    bounds = (0, 7, 13, CROP)
    cells = [
        [float(crop[bounds[i] : bounds[i + 1], bounds[j] : bounds[j + 1]].mean()) for j in range(3)]
        for i in range(3)
    ]
    return [value for row in cells for value in ((row[0] + row[2]) / 2, row[1])]


def _radial_amplitudes(outline: Array, centre: Array) -> list[float]:
    """Relative amplitudes of harmonics 2..8 of the outline's radius over the angle, and its spread.

    Amplitudes ignore rotation. Source: Zahn and Roskies, Fourier Descriptors for Plane Closed Curves (1972), with
    the radius in place of the tangent angle.
    """
    offsets = outline - centre
    angle = np.arctan2(offsets[:, 0], offsets[:, 1])
    radius = np.linalg.norm(offsets, axis=1)
    order = np.argsort(angle)
    grid = np.linspace(-math.pi, math.pi, _ANGLES, endpoint=False)
    even = np.interp(grid, angle[order], radius[order], period=2 * math.pi)
    mean = max(float(even.mean()), 1e-6)
    amplitudes = np.abs(np.fft.rfft(even))[2 : 2 + _HARMONICS] * 2 / _ANGLES / mean
    centre_gap = float(even.min() / mean)
    return [
        *(float(a) * 5 for a in amplitudes),
        centre_gap,
        float(even.std() / mean),
        float(even.max() / mean),
    ]
