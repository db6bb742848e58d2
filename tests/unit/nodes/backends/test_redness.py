"""Redness against colours whose redness is known."""

import pytest
import torch

from jagg.values import ScoreRequest
from nodes.backends import redness


def score(*colours: tuple[float, float, float]):
    images = torch.tensor(colours)[:, :, None, None].expand(-1, 3, 4, 5)
    return redness.scorer().score(
        ScoreRequest(
            images=images, prompts=["anything"] * len(colours), metadata=[{}] * len(colours)
        )
    )


def test_known_colours():
    result = score((1, 0, 0), (0, 1, 1), (0.5, 0.5, 0.5), (0.6, 0.2, 0.4))
    assert result.raw.tolist() == pytest.approx([1, -1, 0, 0.3])
    assert result.values.tolist() == pytest.approx([1, 0, 0.5, 0.65])


def test_it_is_a_mean_over_pixels():
    image = torch.zeros(1, 3, 2, 2)
    image[0, 0, 0, 0] = 1
    request = ScoreRequest(images=image, prompts=["a"], metadata=[{}])
    assert redness.scorer().score(request).raw.item() == pytest.approx(0.25)


def test_an_unreadable_image_is_nan_with_a_note():
    image = torch.full((1, 3, 2, 2), torch.inf)
    result = redness.scorer().score(ScoreRequest(images=image, prompts=["a"], metadata=[{}]))
    assert result.values.isnan().all()
    assert "infinite" in result.notes[0]
