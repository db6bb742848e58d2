"""Widgets of a node: a frozen dataclass whose annotations carry range, unit, choices and tooltip."""

import ast
import dataclasses
import inspect
import itertools
import math
import re
import textwrap
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeVar, dataclass_transform

from app.graph.errors import NodeError, quoted, suggestion

Value = int | float | str | bool
"""What a widget holds."""

WIRE_OF_PLAIN_TYPE: Final[Mapping[type, str]] = {
    int: "INT",
    float: "FLOAT",
    str: "STRING",
    bool: "BOOLEAN",
}

# Names with a meaning of their own, and the wire type each must have.
RESERVED: Final[Mapping[str, str]] = {
    "every": "INT",
    "iterations": "INT",
    "seed": "INT",
    "baseline": "BOOLEAN",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """What a widget accepts and how it is shown; goes into `Annotated[type, Field(...)]`."""

    minimum: float | None = None
    """Smallest value, itself allowed."""
    maximum: float | None = None
    """Largest value, itself allowed."""
    step: float | None = None
    """What one click of an arrow adds; it does not restrict the value."""
    unit: str = ""
    choices: tuple[str, ...] = ()
    """The only values that a string may take; makes the widget a COMBO."""
    tooltip: str = ""
    multiline: bool = False
    advanced: bool = False
    """Shown only when advanced widgets are."""
    live: bool = False
    """May change while a run is going on, between two ticks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One widget: its name, its type on the wire, its default and what it accepts."""

    name: str
    wire: str
    default: Value
    field: Field

    def problem(self, value: object) -> "Issue | None":
        """Why `value` does not fit this widget, or None. Nothing is converted: 5.7 is no INT, "False" no BOOLEAN."""
        if not _has_wire_type(value, self.wire):
            expected = (
                f"one of {quoted(self.field.choices)}"
                if self.wire == "COMBO"
                else _article(self.wire)
            )
            return Issue(
                "invalid_input_type",
                (self.name,),
                f"`{self.name}` is {describe(value)}, expected {expected}.",
            )
        if self.wire == "COMBO" and value not in self.field.choices:
            text = (
                f"`{self.name}` is {describe(value)}, expected one of {quoted(self.field.choices)}."
            )
            return Issue(
                "value_not_in_list", (self.name,), text + suggestion(str(value), self.field.choices)
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not math.isfinite(value):
            return Issue(
                "invalid_input_type",
                (self.name,),
                f"`{self.name}` is {value}, expected a finite number.",
            )
        if self.field.minimum is not None and value < self.field.minimum:
            text = f"`{self.name}` is {value}, expected {self.field.minimum} or more."
            return Issue("value_smaller_than_min", (self.name,), text)
        if self.field.maximum is not None and value > self.field.maximum:
            text = f"`{self.name}` is {value}, expected {self.field.maximum} or less."
            return Issue("value_bigger_than_max", (self.name,), text)
        return None


@dataclass(frozen=True, slots=True)
class Issue:
    """Why widget values do not fit; the text is a sentence that names the fields but not the node."""

    code: str
    fields: tuple[str, ...]
    text: str


class ParamsError(ValueError):
    """Widget values do not fit their node; `issues` holds every reason."""

    def __init__(self, issues: typing.Sequence[Issue]) -> None:
        self.issues = tuple(issues)
        super().__init__(" ".join(issue.text for issue in self.issues))


class Params:
    """Base of every node's widgets; subclasses are decorated with `params` and may define `__post_init__`.

    `__post_init__` checks fields against one another and raises ValueError with the names of the fields in
    backticks; types, ranges and choices have been checked before it is called.
    """

    __slots__ = ()
    _param_specs: ClassVar[tuple[ParamSpec, ...]]


P = TypeVar("P", bound=Params)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def params(cls: type[P]) -> type[P]:
    """Class decorator: a frozen, keyword-only dataclass with slots that checks its values strictly.

    Raises:
        NodeError: a field has no default, a type that is no widget, or a default that does not fit.
    """
    cross_check = cls.__dict__.get("__post_init__")

    def check_fields(self: Params) -> None:
        issues = []
        for spec in param_specs(type(self)):
            value = getattr(self, spec.name)
            issue = spec.problem(value)
            if issue:
                issues.append(issue)
            elif spec.wire == "FLOAT" and type(value) is int:
                object.__setattr__(self, spec.name, float(value))
        if issues:
            raise ParamsError(issues)
        if cross_check is not None:
            cross_check(self)

    cls.__post_init__ = check_fields  # type: ignore[attr-defined]
    checked: type[P] = dataclass(frozen=True, kw_only=True, slots=True)(cls)
    hints = typing.get_type_hints(checked, include_extras=True)
    checked._param_specs = tuple(
        _param_spec(checked, field, hints[field.name])
        for field in dataclasses.fields(checked)  # type: ignore[arg-type]
    )
    for spec in checked._param_specs:
        issue = spec.problem(spec.default)
        if issue:
            msg = f"{cls.__name__}: the default of {issue.text}"
            raise NodeError(msg)
    return checked


def param_specs(cls: type[Params]) -> tuple[ParamSpec, ...]:
    """The widgets of a params class, in the order of its fields.

    Raises:
        NodeError: the class is not decorated with `params`.
    """
    if "_param_specs" not in cls.__dict__:
        msg = f"{cls.__name__}: decorate it with `@params` (from app.graph)."
        raise NodeError(msg)
    return cls._param_specs


def build_params(cls: type[P], values: Mapping[str, object]) -> P:
    """Checked params from plain values; fields that are not given take their defaults.

    Raises:
        ParamsError: unknown names, values that do not fit, or fields that do not fit together; all of them.
    """
    known = [spec.name for spec in param_specs(cls)]
    issues = [_unknown(name, known) for name in values if name not in known]
    try:
        built = cls(**{name: value for name, value in values.items() if name in known})
    except ParamsError as error:
        raise ParamsError([*issues, *error.issues]) from error
    except ValueError as error:
        named = tuple(name for name in re.findall(r"`(\w+)`", str(error)) if name in known)
        issues.append(
            Issue("custom_validation_failed", tuple(dict.fromkeys(named)), _sentence(str(error)))
        )
        raise ParamsError(issues) from error
    if issues:
        raise ParamsError(issues)
    return built


def parse_value(spec: ParamSpec, text: str) -> Value:
    """A widget's value from what a person typed on the command line.

    Raises:
        ParamsError: the text is not a value that the widget accepts.
    """
    value: Value = text
    if spec.wire == "BOOLEAN":
        words = {"true": True, "false": False}
        value = words.get(text.strip().casefold(), text)
    elif spec.wire in ("INT", "FLOAT"):
        # Python's own spellings of numbers ("1_0", " 4 ") are nobody's intent on a command line.
        for number in (int, float) if not re.search(r"[\s_]", text) else ():
            try:
                value = number(text)
                break
            except ValueError:
                continue
    issue = spec.problem(value)
    if issue:
        raise ParamsError([issue])
    return float(value) if spec.wire == "FLOAT" else value


def default_of(cls: type, name: str) -> Any:
    """The default of a dataclass field, so that a widget can share it and it lives once.

    Raises:
        NodeError: the class has no such field, or the field has no default.
    """
    field = _field_of(cls, name)
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    msg = f"{cls.__name__}: the field `{name}` has no default."
    raise NodeError(msg)


def doc_of(cls: type, name: str) -> str:
    """The docstring under a dataclass field as one line, for a tooltip; empty where there is none.

    Raises:
        NodeError: the class has no such field.
    """
    _field_of(cls, name)
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    for statement, following in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.target) != name:
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return " ".join(str(following.value.value).split())
    return ""


def describe(value: object) -> str:
    """A value with its wire type, for an error message; long ones are cut."""
    text = repr(value) if not isinstance(value, bool) else str(value)
    text = text if len(text) <= 60 else text[:57] + "..."  # a sentence stays readable
    wire = WIRE_OF_PLAIN_TYPE.get(type(value))
    return (
        f"{text} ({wire})"
        if wire
        else f"{text} ({'null' if value is None else type(value).__name__})"
    )


def _param_spec(cls: type[Params], field: "dataclasses.Field[Any]", hint: object) -> ParamSpec:
    where = f"{cls.__name__}.{field.name}"
    plain, details = hint, Field()
    if typing.get_origin(hint) is typing.Annotated:
        plain, *extras = typing.get_args(hint)
        found = [extra for extra in extras if isinstance(extra, Field)]
        details = found[0] if found else details
    if typing.get_origin(plain) is Literal:
        choices = typing.get_args(plain)
        if not all(isinstance(choice, str) for choice in choices):
            msg = f"{where}: the choices of a Literal must be strings."
            raise NodeError(msg)
        plain, details = str, dataclasses.replace(details, choices=choices)
    wire = WIRE_OF_PLAIN_TYPE.get(plain) if isinstance(plain, type) else None
    if wire is None:
        msg = f"{where}: {plain!r} is no widget type; use int, float, str, bool or a Literal of strings."
        raise NodeError(msg)
    if details.choices:
        if wire != "STRING":
            msg = f"{where}: only a str may have choices."
            raise NodeError(msg)
        wire = "COMBO"
    if field.name in RESERVED and wire != RESERVED[field.name]:
        msg = f"{where}: this name is reserved and must be {_article(RESERVED[field.name])}."
        raise NodeError(msg)
    if field.name in ("every", "iterations") and (details.minimum is None or details.minimum < 1):
        msg = f"{where}: this name is reserved and needs Field(minimum=1)."
        raise NodeError(msg)
    if field.default is dataclasses.MISSING:
        msg = f"{where}: every widget needs a plain default."
        raise NodeError(msg)
    default = (
        float(field.default) if wire == "FLOAT" and type(field.default) is int else field.default
    )
    return ParamSpec(name=field.name, wire=wire, default=default, field=details)


def _has_wire_type(value: object, wire: str) -> bool:
    if wire == "BOOLEAN":
        return isinstance(value, bool)
    if wire == "INT":
        return type(value) is int
    if wire == "FLOAT":
        return type(value) is float or (
            type(value) is int and abs(value) <= 2**1023
        )  # a float can hold it
    return isinstance(value, str)


def _field_of(cls: type, name: str) -> "dataclasses.Field[Any]":
    if not dataclasses.is_dataclass(cls):
        msg = f"{cls.__name__} is no dataclass, so it has no field defaults."
        raise NodeError(msg)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if name not in fields:
        msg = f"{cls.__name__} has no field `{name}`; fields are {quoted(fields)}.{suggestion(name, fields)}"
        raise NodeError(msg)
    return fields[name]


def _unknown(name: str, known: list[str]) -> Issue:
    inputs = f"Inputs are {quoted(known)}." if known else "There are no inputs."
    return Issue(
        "unknown_input", (name,), f"no input named `{name}`. {inputs}{suggestion(name, known)}"
    )


def _article(wire: str) -> str:
    return f"an {wire}" if wire == "INT" else f"a {wire}"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


@params
class NoParams(Params):
    """Widgets of a node that has none."""
