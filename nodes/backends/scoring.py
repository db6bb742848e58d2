"""What every scorer does around its formula: refuse images that it cannot read and mark those samples NaN."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jagg.errors import ShapeError
from jagg.values import Scorer, ScoreRequest, ScoreResult

# Decoders clamp to [0, 1]; float32 rounding may leave this much beyond.
_RANGE_SLACK = 1e-4

_log = logging.getLogger(__name__)


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


def score_each(scorer: Scorer, request: ScoreRequest) -> ScoreResult:
    """The scorer's answer; where it raises, samples are scored one by one and those that raise are NaN with a note.

    A failed reward is NaN, never 0, and one bad sample must not end a run.
    """
    try:
        return scorer.score(request)
    except Exception:  # noqa: BLE001  the border to the code of scorers, which may be anybody's
        _log.exception("Scorer %s raised; scoring its samples one by one.", scorer.name)
    answers = [_score_alone(scorer, request, n) for n in range(len(request.prompts))]
    names = sorted({name for answer, _ in answers if answer is not None for name in answer.parts})
    blank = torch.full((1,), torch.nan)
    return ScoreResult(
        values=torch.cat([blank if a is None else a.values for a, _ in answers]),
        raw=torch.cat([blank if a is None else a.raw for a, _ in answers]),
        parts={
            name: torch.cat([blank if a is None else a.parts.get(name, blank) for a, _ in answers])
            for name in names
        },
        notes=tuple(note for _, note in answers),
    )


def _score_alone(
    scorer: Scorer, request: ScoreRequest, sample: int
) -> tuple[ScoreResult | None, str]:
    """The answer for one sample and its note; None where the scorer raised."""
    one = ScoreRequest(
        images=request.images[sample : sample + 1],
        prompts=request.prompts[sample : sample + 1],
        metadata=request.metadata[sample : sample + 1],
    )
    try:
        answer = scorer.score(one)
    except Exception as error:  # noqa: BLE001  the same border; the error goes into the note
        return None, f"{scorer.name} raised {type(error).__name__}: {error}"
    return answer, answer.notes[0] if answer.notes else ""
