"""Outputs of once-nodes, kept for later runs of the same process and found by content.

The key of an output is everything that it depends on: type, version and widgets of its node, the keys of what the
node reads, the device, the content of the files that it opened, and the seed and horizon of the run if it looked at
them. Only nodes whose outputs stay frozen take part, so that a warm run equals a cold one bit for bit.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.storage.files import file_digest, json_digest

_KEPT = 16
"""Outputs kept; the one that was not used for longest goes first."""


@dataclass(kw_only=True, slots=True)
class Observed:
    """What a node looked at beside its inputs while it made its outputs."""

    files: dict[Path, str] = field(default_factory=dict)
    """SHA-256 by file."""
    run: dict[str, Any] = field(default_factory=dict)
    """Facts of the run, such as its seed, by name."""
    told: bool = False
    """Whether the node reported something to the run, which a reused output would leave out."""

    def read(self, path: Path) -> None:
        """Note a file, or every file of a folder, with its content."""
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        self.files |= {file: file_digest(file) for file in files if file.is_file()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    outputs: tuple[Any, ...]
    observed: Observed
    key: str


class OutputCache:
    """Outputs by content, in memory."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, list[_Entry]] = OrderedDict()

    def find(self, base: str, run: Mapping[str, Any]) -> tuple[tuple[Any, ...], str] | None:
        """Outputs made under this base key whose observed files and run facts are unchanged, with their full key."""
        for entry in self._entries.get(base, ()):
            same_run = all(run.get(name) == value for name, value in entry.observed.run.items())
            if same_run and all(
                _digest_or_none(path) == digest for path, digest in entry.observed.files.items()
            ):
                self._entries.move_to_end(base)
                return entry.outputs, entry.key
        return None

    def keep(self, base: str, outputs: tuple[Any, ...], observed: Observed) -> None:
        """Remember outputs and what they depend on."""
        entry = _Entry(outputs=outputs, observed=observed, key=full_key(base, observed))
        self._entries.setdefault(base, []).append(entry)
        self._entries.move_to_end(base)
        while (
            sum(len(entries) for entries in self._entries.values()) > _KEPT
            and len(self._entries) > 1
        ):
            self._entries.popitem(last=False)


def base_key(
    *,
    type_name: str,
    version: int,
    params: Mapping[str, Any],
    upstream: Mapping[str, tuple[str, int]],
    device: str,
) -> str:
    """The key of a node before it has run; `upstream` maps an input to the key and slot that feed it."""
    described = {
        "type": type_name,
        "version": version,
        "params": dict(params),
        "upstream": {name: list(source) for name, source in upstream.items()},
        "device": device,
    }
    return json_digest(described)


def full_key(base: str, observed: Observed) -> str:
    """The key of a node that has run, for the nodes that read it."""
    described = {
        "base": base,
        "files": sorted(observed.files.values()),
        "run": observed.run,
    }
    return json_digest(described)


def _digest_or_none(path: Path) -> str | None:
    try:
        return file_digest(path)
    except OSError:
        return None
