"""Redness: a reward that ignores the prompt, for showing what reward hacking looks like."""

import torch

from jagg.values import Scorer, ScoreRequest, ScoreResult
from nodes.backends.scoring import image_problems, score_result

NAME = "redness"


def scorer() -> Scorer:
    """A scorer of mean redness R - (G + B) / 2, the same for every prompt.

    `raw` is in [-1, 1]: 1 for a pure red image, 0 for grays, -1 for cyan. `values` is (raw + 1) / 2.
    """
    return Scorer(name=NAME, version=1, score=_score)


def _score(request: ScoreRequest) -> ScoreResult:
    problems = image_problems(NAME, request)
    images = request.images.detach().double().cpu()
    if any(problems):
        readable = torch.tensor([not problem for problem in problems], dtype=torch.bool)
        images = images.where(readable[:, None, None, None], 0.0)
    if images.shape[1] != 3:
        images = images.new_zeros(len(images), 3, 1, 1)
    red, green, blue = images.clamp(0, 1).flatten(2).mean(2).unbind(1)
    raw = red - (green + blue) / 2
    return score_result(raw, (raw + 1) / 2, {}, problems)
