"""Settings of a run that are not part of its graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.graph.errors import Cancelled

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What flags, request, file and user settings came to; recorded in `run.json`."""

    device: Literal["auto", "cpu"] = "auto"
    """Where to compute: the first accelerator there is, or the processor."""
    precision: Precision = "fp32"
    """What forwards compute in; weights, trajectories and log-probs are float32 either way."""
    threads: int | None = None
    """Threads of one torch operation; None takes torch's own number on a new run, and the recorded one on resume."""
    checkpoint_every: int = 50
    """Ticks between checkpoints where no node sets them."""
    checkpoint_keep: int = 2
    """Checkpoints kept where no node says how many; 0 keeps all."""
    embed_metadata: bool = True
    """Whether images and exported weights carry `prompt` and `workflow`."""
    input_roots: Mapping[str, Path] = field(default_factory=dict)
    """Folders in which nodes may read files, by the name that `ctx.resolve` takes."""


class CancelToken:
    """Whether the run was asked to stop; may be set from a signal handler or another thread."""

    def __init__(self) -> None:
        self._requested = False

    def request(self) -> None:
        """Ask the run to stop at the next safe point."""
        self._requested = True

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._requested

    def check(self) -> None:
        """Leave the current work if the run was asked to stop.

        Raises:
            Cancelled: it was.
        """
        if self._requested:
            msg = "The run was asked to stop."
            raise Cancelled(msg)


Clock = Callable[[], float]
"""Seconds; only differences count."""
