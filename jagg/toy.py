"""A policy small enough for a notebook cell: a two-layer perceptron over 4x4 grey latents.

It is untrained: it shows how the pieces fit, and lets tests run in milliseconds on real code.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jagg.policy import Policy
from jagg.randomness import generator
from jagg.values import Conditioning


class ToyFamily:
    """A model family whose transformer is a perceptron and whose text encoder is a hash of the prompt."""

    name = "toy"

    def __init__(
        self, *, seed: int, latent_shape: tuple[int, ...], width: int, dtype: torch.dtype
    ) -> None:
        """Draw the weights from `seed`."""
        self.latent_shape = latent_shape
        self.dtype = dtype
        elements = torch.Size(latent_shape).numel()
        self.transformer: nn.Module = nn.Sequential(
            nn.Linear(elements + 4 + 1, width), nn.SiLU(), nn.Linear(width, elements)
        )
        self.text_encoder: nn.Module = nn.Identity()
        source = generator(seed, "toy")
        with torch.no_grad():
            for parameter in self.transformer.parameters():
                scale = parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=source) * scale)
        self.transformer.to(dtype)

    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Four numbers per prompt, drawn from its text."""
        rows = [torch.randn(4, generator=generator(0, "prompt", text)) for text in prompts]
        return {"text": torch.stack(rows)}

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Velocity of the perceptron; latents and result (N, *latent), sigma (N,)."""
        parts = (latents.flatten(1), conditioning["text"], sigma[:, None])
        features = torch.cat([part.to(self.dtype) for part in parts], 1)
        result: Tensor = self.transformer(features)
        return result.view(latents.shape)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (N, 1, H, W) around 0 to grey images (N, 3, H, W) around 0.5."""
        return (latents.float() * 0.25 + 0.5).clamp(0, 1).expand(-1, 3, -1, -1)


def toy_policy(
    *,
    seed: int = 0,
    latent_shape: tuple[int, ...] = (1, 4, 4),
    width: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """A fresh toy policy with every weight trainable; the same seed always the same weights."""
    family = ToyFamily(seed=seed, latent_shape=latent_shape, width=width, dtype=dtype)
    return Policy(family=family)
