"""Random generators keyed by what they are for, never by order of use.

A generator's stream depends on the run's seed and on a key of names and numbers alone. Rank, world size and
micro-batch never enter a key, so that the same run draws the same numbers however its work is split.
"""

import hashlib
from collections.abc import Callable

import torch


def derive_seed(seed: int, *key: str | int) -> int:
    """A 63-bit seed that depends on `seed` and every part of `key`, and on their order.

    Parts are length-prefixed before hashing, so ("ab", "c") and ("a", "bc") differ; so do 1 and "1".
    """
    digest = hashlib.sha256()
    for part in (seed, *key):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "big"))
        digest.update(text)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def generator(seed: int, *key: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator on `device`, seeded by `derive_seed(seed, *key)`."""
    result = torch.Generator(device=device)
    result.manual_seed(derive_seed(seed, *key))
    return result


GeneratorFactory = Callable[[str, tuple[int, ...]], torch.Generator]
"""Gives the generator of a purpose and an index such as (prompt, member); the same key always the same stream."""


def generator_factory(
    seed: int, *key: str | int, device: torch.device | str = "cpu"
) -> GeneratorFactory:
    """A factory whose streams depend on `seed`, `key`, the purpose and the index alone."""

    def make(name: str, index: tuple[int, ...]) -> torch.Generator:
        return generator(seed, *key, name, *index, device=device)

    return make
