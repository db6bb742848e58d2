"""An average of the trainable weights over optimizer steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jagg.errors import JaggError
from jagg.policy import Policy


class Ema:
    """Averages trainable weights and lends them as `policy.weights("ema")`.

    The decay in force after n updates is min((1 + n)/(10 + n), decay), so that early weights are forgotten fast. The average
    is float32 whatever the weights' dtype: small steps would vanish in bfloat16.
    """

    def __init__(self, policy: Policy, *, decay: float) -> None:
        """Start from the weights as they are.

        Raises:
            JaggError: `decay` is not in [0, 1).
        """
        if not 0 <= decay < 1:
            msg = f"Ema: `decay` is {decay}, expected at least 0 and below 1."
            raise JaggError(msg)
        self.decay = decay
        self.updates = 0
        self._average = {name: p.detach().float().clone() for name, p in policy.trainable().items()}
        self._lend(policy)

    def update(self, policy: Policy) -> None:
        """Move the average towards the weights as they are."""
        decay = min((1 + self.updates) / (10 + self.updates), self.decay)
        self.updates += 1
        for name, parameter in policy.trainable().items():
            self._average[name].lerp_(parameter.detach().float(), 1 - decay)
        self._lend(policy)

    def _lend(self, policy: Policy) -> None:
        trainable = policy.trainable()
        # Copies: a graph built on the averaged weights stays valid when the average moves on.
        policy.ema = {
            name: tensor.to(trainable[name].dtype, copy=True)
            for name, tensor in self._average.items()
        }

    def state(self) -> dict[str, Any]:
        """What `load_state` needs, for `save_state`."""
        return {
            "decay": self.decay,
            "updates": self.updates,
            "average": {name: tensor.clone() for name, tensor in self._average.items()},
        }

    def load_state(self, policy: Policy, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with the decay given now.

        Raises:
            JaggError: the state averages other parameters than the policy trains.
        """
        average: Mapping[str, Tensor] = state["average"]
        if average.keys() != self._average.keys():
            missing = sorted(self._average.keys() ^ average.keys())
            msg = f"Ema: saved and trained parameters differ by {', '.join(missing)}; load a state of the same training set-up."
            raise JaggError(msg)
        self.updates = int(state["updates"])
        with torch.no_grad():
            for name, tensor in average.items():
                self._average[name].copy_(tensor)
        self._lend(policy)
