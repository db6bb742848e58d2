"""Advantages: rewards of a prompt group, centred and scaled.

Axes: N samples, G members of one prompt group.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from jagg.errors import JaggError, ShapeError

Normalise = Literal["group_std", "global_std", "none"]


def group_advantages(
    rewards: Tensor, group: Tensor, *, normalise: Normalise, epsilon: float, clamp: float | None
) -> Tensor:
    """Rewards centred within each prompt group, scaled, clamped to ±`clamp` (None: not clamped); float32.

    Shape: rewards (N,), group (N,) integer prompt index; result (N,), unitless. See `normalised_rewards`.

    Raises:
        ShapeError: rewards and group differ in length.
        JaggError: an unknown `normalise`, or a clamp that is not positive.
    """
    if clamp is not None and not clamp > 0:
        msg = f"group_advantages: `clamp` is {clamp}, expected a number above 0, or None for no bound."
        raise JaggError(msg)
    result = normalised_rewards(rewards, group, normalise=normalise, epsilon=epsilon)
    return (result if clamp is None else result.clamp(-clamp, clamp)).float()


def normalised_rewards(
    rewards: Tensor, group: Tensor, *, normalise: Normalise, epsilon: float
) -> Tensor:
    """Advantages before the clamp; float64, shape (N,), on the CPU.

    `group_std` divides by the population standard deviation of the group plus epsilon (GRPO), `global_std` by that of all
    scored samples (Flow-GRPO), `none` leaves the centred reward (Dr. GRPO, arXiv 2503.20783). A reward that is not finite
    could not be scored: its sample gets 0 and does not count for its group. A group with fewer finite rewards than
    max(2, G/2) is left out whole, and a group of equal rewards gives exactly 0 (tested by maximum = minimum, since a mean
    of equal numbers can round).
    """
    if rewards.shape != group.shape or rewards.dim() != 1:
        msg = (
            f"group_advantages: `rewards` has shape {tuple(rewards.shape)} and `group` {tuple(group.shape)}, "
            "expected both (N,)."
        )
        raise ShapeError(msg)
    if normalise not in ("group_std", "global_std", "none"):
        msg = f"group_advantages: no `normalise` {normalise!r}. Choices are group_std, global_std, none."
        raise JaggError(msg)
    values_N = rewards.detach().double().cpu()
    group_N = group.cpu()
    result_N = torch.zeros_like(values_N)
    scored_N = torch.zeros_like(values_N, dtype=torch.bool)
    for key in torch.unique(group_N).tolist():
        member_N = group_N == key
        finite_N = member_N & values_N.isfinite()
        if int(finite_N.sum()) < max(2, math.ceil(int(member_N.sum()) / 2)):
            continue
        scored_N |= finite_N
        members = values_N[finite_N]
        if members.max() == members.min():
            continue
        centred = members - members.mean()
        scale = members.std(correction=0) + epsilon if normalise == "group_std" else 1.0
        result_N[finite_N] = centred / scale
    if normalise == "global_std" and bool(scored_N.any()):
        result_N /= values_N[scored_N].std(correction=0) + epsilon
    return result_N


def shuffled_advantages(
    advantages: Tensor, group: Tensor, generators: dict[int, torch.Generator]
) -> Tensor:
    """Advantages permuted inside each prompt group: the control that keeps their sizes and destroys their meaning.

    Shape: advantages (N,), group (N,); `generators` holds one per group.
    """
    result = advantages.clone()
    for key in torch.unique(group).tolist():
        index = (group == key).nonzero().squeeze(1)
        order = torch.randperm(len(index), generator=generators[key])
        result[index] = advantages[index[order]]
    return result
