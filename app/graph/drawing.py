"""A drawn workflow, UI format 0.4 or version 1, brought into one shape; nothing of it is interpreted here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.graph.errors import WorkflowError

ALWAYS: Final = 0
MUTED: Final = 2
BYPASSED: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnInput:
    """An input slot of a card: a port, or a widget that was turned into one."""

    name: str
    type: str
    link: str | None
    widget: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnNode:
    """One card."""

    id: str
    type: str
    title: str
    mode: int
    version: int | None
    inputs: tuple[DrawnInput, ...]
    output_types: tuple[str, ...]
    values: list[Any] | Mapping[str, Any] | None
    """`widgets_values`: by position, or by name in some files."""
    named: Mapping[str, Any] | None
    """`widgets_values_named`."""

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.title or self.type} ({self.id})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """The cards by id, the start of every link by link id, and the names of the subgraphs by id."""

    nodes: Mapping[str, DrawnNode]
    starts: Mapping[str, tuple[str, int]]
    subgraphs: Mapping[str, str]


def read_drawing(document: Mapping[str, Any], name: str) -> Drawing:
    """The cards and links of a UI workflow.

    Raises:
        WorkflowError: a part of it has not the shape that it must have; `name` says where.
    """
    nodes: dict[str, DrawnNode] = {}
    for number, raw in enumerate(_list(document.get("nodes"), f"{name}: `nodes`")):
        node = _node(raw, f"{name}: node number {number + 1} of `nodes`")
        if node.id in nodes:
            msg = f"{name}: two nodes have the id {node.id}."
            raise WorkflowError(msg)
        nodes[node.id] = node
    starts = {}
    for number, raw in enumerate(_list(document.get("links") or [], f"{name}: `links`")):
        if raw is None:
            continue  # old files have holes
        key, start = _link(raw, f"{name}: link number {number + 1} of `links`")
        starts[key] = start
    return Drawing(nodes=nodes, starts=starts, subgraphs=_subgraphs(document))


def _node(raw: Any, where: str) -> DrawnNode:
    node = _mapping(raw, where)
    key = _id(node.get("id"), f"{where}: `id`")
    where = f"{where} (id {key})"
    kind = node.get("type")
    if not isinstance(kind, str) or not kind:
        msg = f"{where}: `type` is {kind!r}, expected the name of a node type."
        raise WorkflowError(msg)
    properties = _mapping(node.get("properties") or {}, f"{where}: `properties`")
    version = properties.get("jagg_version")
    if version is not None and type(version) is not int:
        msg = f"{where}: `properties.jagg_version` is {version!r}, expected an integer."
        raise WorkflowError(msg)
    values = node.get("widgets_values")
    if values is not None and not isinstance(values, list | dict):
        msg = f"{where}: `widgets_values` is {type(values).__name__}, expected a list or an object."
        raise WorkflowError(msg)
    named = node.get("widgets_values_named")
    outputs = _list(node.get("outputs") or [], f"{where}: `outputs`")
    title = node.get("title")
    mode = ALWAYS if node.get("mode") is None else node["mode"]
    if type(mode) is not int or not ALWAYS <= mode <= BYPASSED:
        msg = f"{where}: `mode` is {mode!r}, expected {ALWAYS} (runs), {MUTED} (muted) or {BYPASSED} (bypassed)."
        raise WorkflowError(msg)
    return DrawnNode(
        id=key,
        type=kind,
        title=title if isinstance(title, str) else "",
        mode=mode,
        version=version,
        inputs=tuple(
            _input(entry, f"{where}: input number {number + 1}")
            for number, entry in enumerate(_list(node.get("inputs") or [], f"{where}: `inputs`"))
        ),
        output_types=tuple(
            _type(_mapping(entry, f"{where}: output number {number + 1}").get("type"))
            for number, entry in enumerate(outputs)
        ),
        values=values,
        named=None if named is None else _mapping(named, f"{where}: `widgets_values_named`"),
    )


def _input(raw: Any, where: str) -> DrawnInput:
    entry = _mapping(raw, where)
    name = entry.get("name")
    if not isinstance(name, str):
        msg = f"{where}: `name` is {name!r}, expected a text."
        raise WorkflowError(msg)
    link = entry.get("link")
    widget = entry.get("widget")
    widget_name = widget.get("name") if isinstance(widget, dict) else None
    return DrawnInput(
        name=name,
        type=_type(entry.get("type")),
        link=None if link is None else _id(link, f"{where} (`{name}`): `link`"),
        widget=widget_name if isinstance(widget_name, str) else None,
    )


def _link(raw: Any, where: str) -> tuple[str, tuple[str, int]]:
    if isinstance(raw, list):  # [id, origin, origin slot, target, target slot, type]
        if len(raw) < 5:
            msg = f"{where}: it has {len(raw)} entries, expected 6."
            raise WorkflowError(msg)
        key, origin, slot = raw[0], raw[1], raw[2]
    else:
        entry = _mapping(raw, where)
        key, origin, slot = entry.get("id"), entry.get("origin_id"), entry.get("origin_slot")
    return _id(key, f"{where}: its id"), (
        _id(origin, f"{where}: the node that it starts at"),
        _slot(slot, where),
    )


def _slot(value: Any, where: str) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int:
        msg = f"{where}: the slot that it starts at is {value!r}, expected an integer."
        raise WorkflowError(msg)
    return value


def _type(value: Any) -> str:
    if isinstance(value, list):
        return "COMBO"  # older files hold the choices themselves
    return value if isinstance(value, str) else "*"  # 0 stands for "any"


def _subgraphs(document: Mapping[str, Any]) -> dict[str, str]:
    definitions = document.get("definitions")
    entries = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    found = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            found[entry["id"]] = str(entry.get("name") or "without a name")
    return found


def _id(value: Any, where: str) -> str:
    if type(value) is int or (isinstance(value, str) and value):
        return str(value)
    msg = f"{where} is {value!r}, expected an integer or a text."
    raise WorkflowError(msg)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    msg = f"{where} is {_kind(value)}, expected an object."
    raise WorkflowError(msg)


def _list(value: Any, where: str) -> list[Any]:
    if isinstance(value, list):
        return value
    msg = f"{where} is {_kind(value)}, expected a list."
    raise WorkflowError(msg)


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
