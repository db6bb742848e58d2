"""Values of links as trees of tensors and JSON values, for those that must outlive a resume.

A node that runs on every N-th tick leaves a value that readers see until it runs again; a checkpoint in between has
to hold it. Frozen dataclasses are written as their class name and fields. Values that hold functions or live objects
cannot be written.
"""

import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

_KIND = "__kind__"


class UnportableValueError(TypeError):
    """A value holds something that a checkpoint cannot, such as a function."""


def encode_value(value: Any) -> Any:
    """The value as a tree of dicts, lists, tensors and JSON values.

    Raises:
        UnportableValueError: part of it cannot be written.
    """
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    if isinstance(value, tuple) and type(value) is tuple:
        return {_KIND: "tuple", "items": [encode_value(item) for item in value]}
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    if isinstance(value, Mapping):
        items = [[encode_value(key), encode_value(item)] for key, item in value.items()]
        return {_KIND: "mapping", "items": items}
    if is_dataclass(value) and not isinstance(value, type) and _is_ours(type(value)):
        cls = type(value)
        held = {entry.name: encode_value(getattr(value, entry.name)) for entry in fields(value)}
        return {_KIND: "dataclass", "class": f"{cls.__module__}:{cls.__qualname__}", "fields": held}
    msg = f"{type(value).__module__}.{type(value).__qualname__} cannot be kept in a checkpoint"
    raise UnportableValueError(msg)


def decode_value(tree: Any) -> Any:
    """The value that `encode_value` was given.

    Raises:
        UnportableValueError: the tree names a class that is not a dataclass of `jagg`.
    """
    if isinstance(tree, list):
        return [decode_value(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree[_KIND] == "tuple":
        return tuple(decode_value(item) for item in tree["items"])
    if tree[_KIND] == "mapping":
        return {decode_value(key): decode_value(item) for key, item in tree["items"]}
    module, _, name = str(tree["class"]).partition(":")
    # A checkpoint may come from elsewhere: it must not be able to name any class that there is.
    cls = (
        getattr(importlib.import_module(module), name, None) if module.startswith("jagg.") else None
    )
    if not isinstance(cls, type) or not _is_ours(cls) or not is_dataclass(cls):
        msg = f"the checkpoint holds a value of the unknown class {tree['class']!r}"
        raise UnportableValueError(msg)
    return cls(**{key: decode_value(item) for key, item in tree["fields"].items()})


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("jagg.")
