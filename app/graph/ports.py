"""Ports of a node: what may travel on a link, and the flags that decide when a node runs."""

import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.graph.errors import NodeError
from app.graph.widgets import WIRE_OF_PLAIN_TYPE


@dataclass(frozen=True, slots=True)
class Ticks:
    """Output flag: the value is fresh at every tick by itself; the node is a source and has a clock."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Input flag: this node changes the value in place. An output of the same name is the same object."""


@dataclass(frozen=True, slots=True)
class NeedsEvery:
    """Input flag: a value that was already seen at an earlier tick must not come here again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """An input that is fed by a link."""

    name: str
    wire: str
    required: bool
    changes: bool
    needs_every: bool
    tooltip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """An output; its position among its node's outputs is its slot."""

    name: str
    wire: str
    ticks: bool
    tooltip: str


def wire_name(cls: type) -> str:
    """The name of a type on the wire: `PromptBatch` is `PROMPT_BATCH`, int is `INT`."""
    plain = WIRE_OF_PLAIN_TYPE.get(cls)
    if plain:
        return plain
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__)
    return words.upper()


def accept_table(classes: Iterable[type]) -> dict[str, frozenset[str]]:
    """For each wire name the wire names that may feed it; the only table that validators use.

    A type takes itself and its subclasses; INT feeds FLOAT, and strings and choices feed one another (whether the
    string is one of the choices is checked when it arrives).
    """
    known = [cls for cls in classes if cls not in WIRE_OF_PLAIN_TYPE]
    table = {
        wire_name(wide): frozenset(
            wire_name(narrow) for narrow in known if issubclass(narrow, wide)
        )
        for wide in known
    }
    return table | {
        "INT": frozenset({"INT"}),
        "FLOAT": frozenset({"FLOAT", "INT"}),
        "BOOLEAN": frozenset({"BOOLEAN"}),
        "STRING": frozenset({"STRING", "COMBO"}),
        "COMBO": frozenset({"COMBO", "STRING"}),
    }


def accepts(table: Mapping[str, frozenset[str]], wanted: str, given: str) -> bool:
    """Whether an output of wire type `given` may feed an input of wire type `wanted`."""
    return given in table.get(wanted, frozenset({wanted}))


def input_spec(where: str, name: str, hint: object, *, has_default: bool) -> tuple[InputSpec, type]:
    """An input port from the annotation of a parameter of `run`, and its class.

    Raises:
        NodeError: the annotation is no class, or optional without a default of None (or the reverse).
    """
    plain, extras = _split(hint)
    optional = False
    if typing.get_origin(plain) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(plain) if member is not types.NoneType]
        optional = len(members) < len(typing.get_args(plain))
        if len(members) != 1:
            msg = f"{where}: input `{name}` has several types; use one optional input for each, or a common base class."
            raise NodeError(msg)
        plain, more = _split(members[0])
        extras = (*more, *extras)
    if optional != has_default:
        msg = f"{where}: write an optional input as `{name}: Type | None = None`."
        raise NodeError(msg)
    cls = _port_class(where, name, plain)
    spec = InputSpec(
        name=name,
        wire=wire_name(cls),
        required=not optional,
        changes=_has(extras, Changes),
        needs_every=_has(extras, NeedsEvery),
        tooltip=_tooltip(extras),
    )
    return spec, cls


def output_spec(where: str, name: str, hint: object) -> tuple[OutputSpec, type]:
    """An output port from a field of `Outputs`, and its class.

    Raises:
        NodeError: the annotation is no class.
    """
    plain, extras = _split(hint)
    cls = _port_class(where, name, plain)
    return OutputSpec(
        name=name, wire=wire_name(cls), ticks=_has(extras, Ticks), tooltip=_tooltip(extras)
    ), cls


def _split(hint: object) -> tuple[object, tuple[object, ...]]:
    if typing.get_origin(hint) is typing.Annotated:
        plain, *extras = typing.get_args(hint)
        return plain, tuple(extras)
    return hint, ()


def _port_class(where: str, name: str, plain: object) -> type:
    if not isinstance(plain, type) or typing.get_origin(plain) is not None:
        msg = f"{where}: port `{name}` has type {plain!r}; ports need a concrete class or a marker class."
        raise NodeError(msg)
    if getattr(plain, "_is_protocol", False):
        msg = f"{where}: port `{name}` has the protocol {plain.__name__} as type; ports need a concrete class."
        raise NodeError(msg)
    return plain


def _has(extras: Iterable[object], flag: type) -> bool:
    return any(isinstance(extra, flag) or extra is flag for extra in extras)


def _tooltip(extras: Iterable[object]) -> str:
    return next((extra for extra in extras if isinstance(extra, str)), "")
