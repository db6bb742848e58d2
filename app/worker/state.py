"""State of a run between two ticks: copying it, and its checkpoint on disk."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from app.storage.checkpoints import CheckpointEntry, CheckpointStore
from jagg.state import load_state, save_state

_FILE = "state"
"""Name, without suffix, of the files in a checkpoint that hold the state."""


def copy_state(state: Any) -> Any:
    """The state with tensors cloned and containers rebuilt, so that later training does not reach it."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: copy_state(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(copy_state(value) for value in state)
    if isinstance(state, list):
        return [copy_state(value) for value in state]
    return state


def state_bytes(state: Any) -> int:
    """Bytes that the tensors of the state take."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(state_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(state_bytes(value) for value in state)
    return 0


def write_checkpoint(
    store: CheckpointStore, tick: int, state: Mapping[str, Any], *, about: Mapping[str, Any]
) -> CheckpointEntry:
    """Write the state after `tick`.

    Raises:
        StorageError: it cannot be written.
    """
    return store.write(tick, lambda folder: save_state(folder / _FILE, dict(state)), about=about)


def read_checkpoint(entry: CheckpointEntry) -> dict[str, Any]:
    """The state that a checkpoint holds."""
    state: dict[str, Any] = load_state(entry.path / _FILE)
    return state
