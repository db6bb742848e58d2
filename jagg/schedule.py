"""Noise levels of a denoising trajectory."""

from itertools import pairwise

import torch
from torch import Tensor

from jagg.errors import JaggError


def sigma_schedule(steps: int, *, shift: float) -> Tensor:
    """The noise levels sigma = shift·s / (1 + (shift - 1)·s) of s = linspace(1, 0, steps + 1).

    Shape: (steps+1,), float32, falling from exactly 1 (noise) to exactly 0 (image). A shift above 1 spends more
    steps at high noise. Source: the flow-matching shift of SD3 (arXiv 2403.03206, section 5.3.2).

    Raises:
        JaggError: `steps` is below 1 or `shift` is not positive.
    """
    if steps < 1:
        msg = f"sigma_schedule: `steps` is {steps}, expected 1 or more."
        raise JaggError(msg)
    if not shift > 0:
        msg = f"sigma_schedule: `shift` is {shift}, expected a number above 0 (1 leaves the steps evenly spaced)."
        raise JaggError(msg)
    s = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (shift * s / (1 + (shift - 1) * s)).float()


def check_schedule(sigmas: Tensor, *, where: str) -> None:
    """Refuse noise levels that do not fall strictly from 1 to 0.

    Raises:
        JaggError: the first level is not 1, the last is not 0, or two neighbours do not fall.
    """
    levels = [float(level) for level in sigmas.tolist()]
    falls = all(after < before for before, after in pairwise(levels))
    if len(levels) < 2 or levels[0] != 1.0 or levels[-1] != 0.0 or not falls:
        msg = (
            f"{where}: `sigmas` is {levels}, expected at least two levels that fall strictly from 1 to 0. "
            "Make it with `sigma_schedule(steps, shift=...)`."
        )
        raise JaggError(msg)
