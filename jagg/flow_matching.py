"""Flow matching: what a policy learns from images before any reward.

Axes: N samples; `*latent` is the shape of one sample's latent.
"""

import torch
from torch import Tensor

from jagg.errors import ShapeError
from jagg.policy import Policy
from jagg.values import Conditioning


def flow_matching_loss(
    policy: Policy, latents: Tensor, conditioning: Conditioning, *, sigma: Tensor, noise: Tensor
) -> Tensor:
    """Mean squared error of the policy's velocity at x = (1 - sigma) x0 + sigma noise against v = noise - x0.

    It is zero exactly where the policy knows both ends of every path. Gradients flow to the policy and, where it
    carries a graph, to the conditioning. Source: Lipman et al., Flow Matching for Generative Modeling, eq. 23, with
    sigma = 1 - t and a straight path.

    Shape: latents (clean, x0) and noise (N, *latent); sigma (N,) in [0, 1]; result (), unitless.

    Raises:
        ShapeError: the shapes do not fit together.
    """
    if noise.shape != latents.shape or sigma.shape != latents.shape[:1]:
        msg = (
            f"flow_matching_loss: latents have shape {tuple(latents.shape)}, noise {tuple(noise.shape)} and sigma "
            f"{tuple(sigma.shape)}; expected noise like latents and sigma of shape ({len(latents)},)."
        )
        raise ShapeError(msg)
    s = sigma.view(-1, *(1,) * (latents.ndim - 1))
    velocity = policy.velocity((1 - s) * latents + s * noise, sigma, conditioning)
    return (velocity - (noise - latents)).square().mean()


def logit_normal_sigma(
    count: int, *, mean: float, std: float, generator: torch.Generator
) -> Tensor:
    """Noise levels whose logit is normal, one in each of `count` equally likely strata, in rising order.

    Strata lower the variance of a batch's loss; each level alone is distributed as an independent draw would be.
    Source: Esser et al., Scaling Rectified Flow Transformers, section 3.1 (rf/lognorm).

    Shape: result (count,), float32 in (0, 1).
    """
    uniform = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
    quantile = (torch.arange(count, device=generator.device) + uniform) / count
    # Keeps a draw of exactly 0 from becoming minus infinity.
    normal = torch.special.ndtri(quantile.clamp(1e-9, 1 - 1e-9))
    return torch.sigmoid(mean + std * normal).float()
