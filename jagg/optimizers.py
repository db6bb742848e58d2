"""AdamW on a policy's trainable weights, its state by parameter name, and learning-rate schedules."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from jagg.errors import JaggError
from jagg.policy import Policy

Decay = Literal["constant", "linear", "cosine"]


def adamw(
    policy: Policy, *, lr: float, betas: tuple[float, float], weight_decay: float, eps: float
) -> torch.optim.AdamW:
    """AdamW over the trainable weights, in one group and the module's order.

    Raises:
        JaggError: the policy has no trainable weights.
    """
    trainable = list(policy.trainable().values())
    if not trainable:
        msg = "Optimizer: the policy has no trainable weights; set `train` on the model loader."
        raise JaggError(msg)
    return torch.optim.AdamW(trainable, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)


def learning_rate(
    tick: int, *, lr: float, warmup: int, total: int, decay: Decay, final_fraction: float
) -> float:
    """The rate of tick 1..total: rises linearly to `lr` at tick `warmup`, then decays to lr·final_fraction at `total`.

    Later ticks keep the last rate.

    Raises:
        JaggError: an unknown decay.
    """
    if decay not in ("constant", "linear", "cosine"):
        msg = f"learning_rate: no decay {decay!r}. Choices are constant, linear, cosine."
        raise JaggError(msg)
    if tick < warmup:
        return lr * max(tick, 0) / warmup
    if decay == "constant":
        return lr
    passed = min(max((tick - warmup) / (total - warmup), 0.0), 1.0) if total > warmup else 1.0
    shape = 1 - passed if decay == "linear" else 0.5 * (1 + math.cos(math.pi * passed))
    return lr * (final_fraction + (1 - final_fraction) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Moments and step counts by parameter name, copied; a weight without a step yet is left out."""
    result: dict[str, dict[str, Any]] = {}
    for name, parameter in policy.trainable().items():
        entry = optimizer.state.get(parameter)
        if entry:
            result[name] = {
                key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in entry.items()
            }
    return result


def load_optimizer_state(
    policy: Policy, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Put a saved `optimizer_state` back, onto each weight's device; rates and betas stay as they are now.

    Raises:
        JaggError: the state names a weight that is not trained.
    """
    trainable = policy.trainable()
    unknown = sorted(state.keys() - trainable.keys())
    if unknown:
        msg = f"Optimizer: the saved state has weights that are not trained: {', '.join(unknown)}. Load one of the same set-up."
        raise JaggError(msg)
    optimizer.state.clear()
    for name, entry in state.items():
        parameter = trainable[name]
        # AdamW keeps its step count on the CPU; the moments lie beside the weight.
        optimizer.state[parameter] = {
            key: v.detach().clone()
            if key == "step"
            else v.detach().to(parameter.device, copy=True)
            if isinstance(v, Tensor)
            else v
            for key, v in entry.items()
        }
