"""Widget values as files hold them: by name, by position, and from older versions of a node."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.graph.drawing import DrawnNode
from app.graph.errors import Problem, WorkflowError
from app.graph.node import NodeSpec
from app.graph.widgets import ParamSpec, describe

# A front-end of ComfyUI keeps one more value after a seed, which says how it changes; it never reaches a node.
CONTROL: Final = "control_after_generate"
CONTROL_VALUES: Final = ("fixed", "increment", "decrement", "randomize")
SEEDS: Final = ("seed", "noise_seed")


@dataclass(frozen=True, slots=True)
class Stored:
    """Widget values of one card by name, and remarks on how they were read."""

    values: dict[str, Any]
    warnings: tuple[Problem, ...] = ()


def read_values(node: DrawnNode, spec: NodeSpec | None) -> Stored:
    """The widget values of a card: those stored by name, else those stored by position.

    Without a specification positions mean nothing, and only names are read.
    """
    by_name = node.named
    if by_name is None and isinstance(node.values, Mapping):
        by_name = node.values
    warnings: list[Problem] = []
    by_position: dict[str, Any] = {}
    if spec is not None and isinstance(node.values, list):
        by_position = _by_position(node, node.values, spec, warnings if by_name is None else [])
    if by_name is None:
        return Stored(by_position, tuple(warnings))
    known = {param.name for param in spec.params} if spec else set()
    values = {
        name: unwrap(value) for name, value in by_name.items() if name != CONTROL or name in known
    }
    for name, value in values.items():
        if name in by_position and not same(by_position[name], value):
            text = (
                f"{node.label}: `{name}` is {describe(value)} by name, but {describe(by_position[name])} by position; "
                "the value by name is used."
            )
            warnings.append(_warning(node, name, text))
    return Stored(values, tuple(warnings))


def positional(spec: NodeSpec, values: Mapping[str, Any]) -> list[Any]:
    """Widget values in the order that a front-end of ComfyUI expects, with its own value after a seed."""
    row: list[Any] = []
    for param in spec.params:
        row.append(values.get(param.name, param.default))
        if param.wire == "INT" and param.name in SEEDS:
            row.append("fixed")
    return row


def migrate(
    inputs: Mapping[str, Any], version: int | None, spec: NodeSpec | None, where: str
) -> tuple[dict[str, Any], int | None]:
    """Inputs of an older version of a node brought to the current one; the version is that after it.

    Raises:
        WorkflowError: there is no way from that version, or a migration fails.
    """
    current = dict(inputs)
    if spec is None or version is None or version >= spec.version:
        return current, version
    for step in range(version, spec.version):
        change = spec.cls.migrations.get(step)
        if change is None:
            msg = f"{where}: it was written by version {step} of {spec.title}, which cannot be brought to version {spec.version}."
            raise WorkflowError(msg)
        try:
            current = change(current)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            msg = f"{where}: bringing it from version {step} to {step + 1} failed: {type(error).__name__}: {error}."
            raise WorkflowError(msg) from error
    return current, spec.version


def unwrap(value: Any) -> Any:
    """A list that was wrapped so that it is not taken for a link."""
    if isinstance(value, dict) and isinstance(value.get("__value__"), list):
        return value["__value__"]
    return value


def wrap(value: Any) -> Any:
    """A list in the form in which it is not taken for a link."""
    return {"__value__": value} if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    """Whether two stored values mean the same: 1 and 1.0 do, 1 and true do not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _by_position(
    node: DrawnNode, row: list[Any], spec: NodeSpec, warnings: list[Problem]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    place = 0
    for number, param in enumerate(spec.params):
        if place >= len(row):
            names = ", ".join(f"`{late.name}`" for late in spec.params[number:])
            text = f"{node.label}: {len(row)} values are stored for {len(spec.params)} widgets; {names} keep their defaults."
            warnings.append(_warning(node, param.name, text))
            break
        values[param.name] = unwrap(row[place])
        place += 1
        following = spec.params[number + 1 :]
        spare = len(row) - place > len(following)
        if param.name in SEEDS and place < len(row) and row[place] in CONTROL_VALUES:
            place += spare or not _takes(following, row[place])
    if place < len(row):
        extra = ", ".join(describe(value) for value in row[place:])
        text = f"{node.label}: {len(row)} values are stored for {len(spec.params)} widgets; not used: {extra}."
        warnings.append(_warning(node, None, text))
    return values


def _takes(following: tuple[ParamSpec, ...], value: Any) -> bool:
    return bool(following) and following[0].problem(value) is None


def _warning(node: DrawnNode, field: str | None, text: str) -> Problem:
    return Problem(
        code="stored_values", node=node.id, title=node.title or node.type, field=field, message=text
    )
