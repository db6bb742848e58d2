"""The policy: one object that samples, learns and lends its weights.

Axes: N samples; `*latent` is the shape of one sample's latent.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from jagg.errors import JaggError
from jagg.values import Conditioning

Weights = Literal["raw", "ema", "reference"]


class Family(Protocol):
    """What the backend of a model family supplies: one forward path for sampling and for training.

    The canonical state is (x, sigma, v) with sigma in [0, 1], 1 = noise, and v = noise - x0. Sign, time
    direction, timestep scale and packing stay inside the family.
    """

    name: str
    transformer: nn.Module
    text_encoder: nn.Module
    latent_shape: tuple[int, ...]

    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Conditioning of prompts: tensors with the prompt on axis 0. Builds a graph where grad is enabled."""
        ...

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Velocity at (latents, sigma); shape latents and result (N, *latent), sigma (N,) in [0, 1]."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images of latents; shape (N, *latent) to (N, C, H, W), float in [0, 1]."""
        ...


class _VelocityModule(nn.Module):
    """A family's velocity as a module, so that other weights can be lent to it without touching its own."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.transformer = family.transformer
        self.text_encoder = family.text_encoder
        self._family = family

    def forward(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._family.velocity(latents, sigma, conditioning)


class _EncodingModule(nn.Module):
    """A family's text encoding as a module, for the same reason."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.text_encoder = family.text_encoder
        self._family = family

    def forward(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        return self._family.encode(prompts)


@dataclass(kw_only=True)
class Policy:
    """A model being trained. It is the one mutable value on a graph's links.

    `version` rises by one per optimizer step. Parameter names are `transformer.*` and `text_encoder.*`.
    """

    family: Family
    version: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    """Notes of the optimizer to the next rollout, JSON values; part of checkpoints."""
    ema: dict[str, Tensor] | None = None
    """Averaged trainable weights by parameter name; None while no average is kept."""
    compute_dtype: torch.dtype = torch.float32
    """What forwards compute in, as the executor's autocast sets it; gates and guards are as wide as it needs."""
    reference: dict[str, Tensor] | None = None
    """Trainable weights as they were before training; None until `keep_reference`."""

    def __post_init__(self) -> None:
        """Wrap the family's velocity so that weights can be lent."""
        self._module = _VelocityModule(self.family)
        self._lent: Mapping[str, Tensor] | None = None

    @property
    def module(self) -> nn.Module:
        """The module that holds every parameter of the policy, for optimizers and executors."""
        return self._module

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that require grad, by name, in the module's order."""
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Conditioning of prompts by the weights now in force, without a graph; one entry per prompt on axis 0."""
        lent = {
            name: tensor
            for name, tensor in (self._lent or {}).items()
            if name.startswith("text_encoder.")
        }
        with torch.no_grad():
            if not lent:
                return self.family.encode(prompts)
            result: dict[str, Tensor] = functional_call(
                _EncodingModule(self.family), lent, (prompts,)
            )
            return result

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The velocity v = noise - x0 of the weights now in force, float32 (float64 from a float64 model).

        Shape: latents (N, *latent); sigma (N,); every conditioning tensor has N on axis 0; result (N, *latent).
        """
        if self._lent is None:
            result: Tensor = self._module(latents, sigma, conditioning)
        else:
            result = functional_call(self._module, dict(self._lent), (latents, sigma, conditioning))
        return result if result.dtype == torch.float64 else result.float()

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        guidance_scale: float,
    ) -> Tensor:
        """v_u + guidance_scale · (v_c - v_u) in one forward of a doubled batch; plain v where `unconditional` is None.

        Gradients flow through both branches. Shape as in `velocity`.
        """
        if unconditional is None:
            return self.velocity(latents, sigma, conditioning)
        both = {
            name: torch.cat((unconditional[name], tensor)) for name, tensor in conditioning.items()
        }
        v_u, v_c = self.velocity(
            torch.cat((latents, latents)), torch.cat((sigma, sigma)), both
        ).chunk(2)
        return v_u + guidance_scale * (v_c - v_u)

    def keep_reference(self) -> None:
        """Remember the trainable weights as the reference of KL terms; a second call changes nothing."""
        if self.reference is None:
            self.reference = {name: p.detach().clone() for name, p in self.trainable().items()}

    @contextmanager
    def weights(self, which: Weights) -> Iterator[None]:
        """Lend raw, averaged or reference weights to `velocity` and `encode` inside the block.

        Nothing is written in place, so graphs built on the raw weights stay valid.

        Raises:
            JaggError: weights are asked for that the policy does not keep.
        """
        lent = {"raw": None, "ema": self.ema, "reference": self.reference}[which]
        if which != "raw" and lent is None:
            advice = {
                "ema": "set `ema_decay` above 0 on the optimizer, or read raw weights",
                "reference": "call `keep_reference()` before the first update",
            }[which]
            msg = f"Policy: it keeps no {which} weights; {advice}."
            raise JaggError(msg)
        before, self._lent = self._lent, lent
        try:
            yield
        finally:
            self._lent = before

    def load_trainable(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the trainable parameters, bit for bit.

        Raises:
            JaggError: the names or shapes differ from those of the trainable parameters.
        """
        own = self.trainable()
        if own.keys() != weights.keys():
            missing, extra = (
                sorted(own.keys() - weights.keys())[:3],
                sorted(weights.keys() - own.keys())[:3],
            )
            msg = (
                "Policy: the weights to load are not those that train here "
                f"(missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(extra) or 'none'}). "
                "Use the same model and `train` setting as the run that saved them."
            )
            raise JaggError(msg)
        for name, parameter in own.items():
            if parameter.shape != weights[name].shape:
                msg = f"Policy: {name} has shape {tuple(parameter.shape)}, the loaded one {tuple(weights[name].shape)}."
                raise JaggError(msg)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
