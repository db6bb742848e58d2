"""What every scorer does around its formula: refuse images that it cannot read and mark those samples NaN."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jagg.errors import ShapeError
from jagg.values import ScoreRequest, ScoreResult

# Decoders clamp to [0, 1]; float32 rounding may leave this much beyond.
_RANGE_SLACK = 1e-4


def image_problems(
    name: str, request: ScoreRequest, *, least_side: int = 1, square: bool = False
) -> list[str]:
    """Why each sample cannot be scored; an empty string for a readable image.

    Shape: request.images (N, C, H, W); result length N.

    Raises:
        ShapeError: images are not 4-dimensional, or prompts or metadata differ from N in length.
    """
    images = request.images
    if images.ndim != 4:
        msg = f"{name}: images have shape {tuple(images.shape)}, expected (N, C, H, W)."
        raise ShapeError(msg)
    count, channels, height, width = images.shape
    if len(request.prompts) != count or len(request.metadata) != count:
        msg = (
            f"{name}: {count} images, {len(request.prompts)} prompts and {len(request.metadata)} metadata "
            "entries, expected the same number of each."
        )
        raise ShapeError(msg)
    if channels != 3:
        return [
            f"image has {channels} channels, expected 3; composite it over a background first"
        ] * count
    if min(height, width) < least_side or (square and height != width):
        form = "a square image" if square else "an image"
        return [
            f"image is {width}x{height} pixels, expected {form} of at least {least_side} pixels a side"
        ] * count
    flat = images.detach().flatten(1)
    finite = torch.isfinite(flat).all(1)
    inside = ((flat >= -_RANGE_SLACK) & (flat <= 1 + _RANGE_SLACK)).all(1)
    return [
        "image has values that are NaN or infinite"
        if not f
        else ""
        if i
        else "image has values outside [0, 1]"
        for f, i in zip(finite.tolist(), inside.tolist(), strict=True)
    ]


def score_result(
    raw: Tensor,
    values: Tensor,
    parts: Mapping[str, Tensor],
    problems: Sequence[str],
    notes: Sequence[str] = (),
) -> ScoreResult:
    """A result whose samples with a problem are NaN everywhere, with the problem as their note.

    Shape: raw, values and every part (N,); problems length N; notes empty or length N.
    """
    failed = torch.tensor([bool(problem) for problem in problems], dtype=torch.bool)
    remarks = tuple(p or n for p, n in zip(problems, notes or [""] * len(problems), strict=True))
    return ScoreResult(
        values=values.float().masked_fill(failed, torch.nan),
        raw=raw.float().masked_fill(failed, torch.nan),
        parts={name: part.float().masked_fill(failed, torch.nan) for name, part in parts.items()},
        notes=remarks,
    )
