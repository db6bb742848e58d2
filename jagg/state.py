"""Nested state on disk: tensors in a safetensors file, everything else in a JSON file beside it. No pickle."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from jagg.errors import JaggError

FORMAT = 1
_TENSOR, _TUPLE, _FLOAT = "$tensor", "$tuple", "$float"


def _files(path: Path) -> tuple[Path, Path]:
    """The two files of a path without suffix; a dot in its name is not taken for one."""
    return path.with_name(path.name + ".safetensors"), path.with_name(path.name + ".json")


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON form of a value; its tensors move to `tensors`."""
    if isinstance(value, Tensor):
        name = where
        while name in tensors:  # {"a/b": ..., "a": {"b": ...}} gives two places one name
            name += "'"
        # A copy of its own: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key.startswith("$")]
        if wrong:
            msg = f"save_state: key {wrong[0]!r} at {where or 'the top'}; keys must be text that does not start with '$'."
            raise JaggError(msg)
        return {
            key: _pack(entry, f"{where}/{key}" if where else key, tensors)
            for key, entry in value.items()
        }
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(entry, f"{where}/{i}", tensors) for i, entry in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(entry, f"{where}/{i}", tensors) for i, entry in enumerate(value)]
    msg = (
        f"save_state: {type(value).__name__} at {where or 'the top'}; "
        "expected tensors, numbers, text, None, and lists, tuples and dicts of them."
    )
    raise JaggError(msg)


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_unpack(entry, tensors) for entry in value[_TUPLE])
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {key: _unpack(entry, tensors) for key, entry in value.items()}


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state` to `path`.safetensors and `path`.json; the caller makes the pair atomic.

    Tensors keep dtype, shape and bits; integers, text and floats come back exactly, NaN and infinities included; tuples stay
    tuples and dicts keep their order.

    Raises:
        JaggError: a value or key that has no such form; nothing is written.
    """
    tensors: dict[str, Tensor] = {}
    packed = _pack(state, "", tensors)
    text = json.dumps(
        {"format": FORMAT, "state": packed}, allow_nan=False, ensure_ascii=False, indent=1
    )
    weights, values = _files(Path(path))
    save_file(tensors, weights)
    values.write_text(text + "\n", encoding="utf-8")


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` wrote to `path`, tensors on the CPU.

    Raises:
        JaggError: the file has a format that this version does not know.
    """
    weights, values = _files(Path(path))
    document = json.loads(values.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        msg = f"load_state: {values.name} has format {document.get('format')!r}, expected {FORMAT}; update the studio."
        raise JaggError(msg)
    result: dict[str, Any] = _unpack(document["state"], load_file(weights))
    return result
