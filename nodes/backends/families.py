"""Model families by name: which backend reads which weights file."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from jagg.errors import JaggError
from jagg.policy import Family, Policy
from nodes.backends.tiny_dit import TinyDiT

_EMBEDDED = Path(__file__).parent / "weights"
_FAMILIES = {TinyDiT.family: TinyDiT}
SHIPPED = ("embedded/noisy", "embedded/clean", "embedded/random")
"""Names of the models that come with the studio."""


def load_family(
    model: str, resolve: Callable[[str, str], Path], seed: int, device: torch.device
) -> Family:
    """The family of `model`, on `device`, with its weights.

    `model` is a shipped name, or a safetensors file that `resolve("models", model)` finds. `seed` is that of the
    weights of embedded/random.

    Raises:
        JaggError: the shipped name is unknown, the file is missing or no safetensors file, or its family is unknown.
    """
    if model == "embedded/random":
        return TinyDiT.build(seed=seed).to(device)
    if model.startswith("embedded/"):
        if model not in SHIPPED:
            msg = f"DiT Loader: `model` is {model!r}; shipped are {', '.join(SHIPPED)}."
            raise JaggError(msg)
        return TinyDiT.load(_EMBEDDED / f"{model.removeprefix('embedded/')}.safetensors").to(device)
    path = resolve("models", model)
    if not path.is_file():
        msg = f"DiT Loader: `model` is {model!r}, but there is no such file in the models folder. Shipped are {', '.join(SHIPPED)}."
        raise JaggError(msg)
    try:
        with safe_open(path, framework="pt") as file:
            family = (file.metadata() or {}).get("family")
    except Exception as error:  # safetensors raises a type of its own per release
        msg = f"DiT Loader: {model!r} is no safetensors file ({error})."
        raise JaggError(msg) from error
    if family not in _FAMILIES:
        msg = f"DiT Loader: {model!r} is of family {family!r}; known are {', '.join(_FAMILIES)}."
        raise JaggError(msg)
    return _FAMILIES[family].load(path).to(device)


def save_policy(
    policy: Policy, path: Path, weights: Mapping[str, Tensor] | None, metadata: Mapping[str, str]
) -> None:
    """Write the policy's weights as a safetensors file that `load_family` reads again.

    `weights` replace the policy's own by parameter name, such as its running average; None writes the raw weights.

    Raises:
        JaggError: the policy is of a family that has no file format here.
    """
    family = policy.family
    if not isinstance(family, TinyDiT):
        msg = f"Checkpoint Saver: policies of family {family.name!r} cannot be exported; known are {', '.join(_FAMILIES)}."
        raise JaggError(msg)
    family.save(path, weights, metadata)
