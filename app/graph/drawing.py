"""A drawn workflow, UI format 0.4 or version 1, brought into one shape; nothing of it is interpreted here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.graph.errors import WorkflowError

ALWAYS: Final = 0
MUTED: Final = 2
BYPASSED: Final = 4

# Links inside a subgraph that come in start at the one, and those that go out end at the other.
INPUT_NODE: Final = "-10"
OUTPUT_NODE: Final = "-20"

Proxy = tuple[str, str, str | None]
"""A widget of a card inside a subgraph: card, widget, and the card further inside that is meant."""


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
    proxies: tuple[Proxy, ...] = ()
    """`properties.proxyWidgets`: how older files list the widgets that an instance of a subgraph shows."""

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.title or self.type} ({self.id})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cards:
    """Cards by id, and the start of every link by link id."""

    nodes: Mapping[str, DrawnNode]
    starts: Mapping[str, tuple[str, int]]
    results: Mapping[int, str]
    """The link that brings the value of an output, by slot; empty outside of subgraphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A subgraph: what is inside, and the names of its inputs by slot."""

    name: str
    cards: Cards
    inputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """The cards of the canvas, and the subgraphs by id: the type of a card that is an instance of one."""

    cards: Cards
    subgraphs: Mapping[str, Definition]


def read_drawing(document: Mapping[str, Any], name: str) -> Drawing:
    """The cards, links and subgraphs of a UI workflow.

    Raises:
        WorkflowError: a part of it has not the shape that it must have; `name` says where.
    """
    raws: dict[str, dict[str, Any]] = {}
    subgraphs = {}
    for where, key, raw in definitions_of(document, name):
        if key in raws:
            if raws[key] != raw:
                msg = f"{where}: another subgraph has the id {key} too."
                raise WorkflowError(msg)
            continue
        raws[key] = raw
        inputs = _list(raw.get("inputs") or [], f"{where}: `inputs`")
        subgraphs[key] = Definition(
            name=str(raw.get("name") or "without a name"),
            cards=read_cards(raw, where),
            inputs=tuple(
                _port_name(entry, f"{where}: input number {number + 1}")
                for number, entry in enumerate(inputs)
            ),
        )
    return Drawing(cards=read_cards(document, name), subgraphs=subgraphs)


def definitions_of(
    document: Mapping[str, Any], name: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every subgraph of a UI workflow as it is written, those inside of others too: where it is, its id and itself.

    Raises:
        WorkflowError: one of them has not the shape that it must have.
    """
    holder = _mapping(document.get("definitions") or {}, f"{name}: `definitions`")
    entries = _list(holder.get("subgraphs") or [], f"{name}: `definitions.subgraphs`")
    for number, entry in enumerate(entries):
        where = f"{name}: subgraph number {number + 1}"
        raw = _mapping(entry, where)
        key = _id(raw.get("id"), f"{where}: `id`")
        where = f"{name}: subgraph `{raw.get('name') or key}`"
        yield where, key, raw
        yield from definitions_of(raw, where)


def read_cards(document: Mapping[str, Any], name: str) -> Cards:
    """The cards and links of a UI workflow, or of one of its subgraphs.

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
    results = {}
    for number, raw in enumerate(_list(document.get("links") or [], f"{name}: `links`")):
        if raw is None:
            continue  # old files have holes
        where = f"{name}: link number {number + 1} of `links`"
        key, start = _link(raw, where)
        starts[key] = start
        target, place = (
            raw[3:5]
            if isinstance(raw, list)
            else (
                raw.get("target_id"),
                raw.get("target_slot"),
            )
        )
        if str(target) == OUTPUT_NODE:
            results[_slot(place, where, "ends")] = key
    return Cards(nodes=nodes, starts=starts, results=results)


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
        proxies=_proxies(properties.get("proxyWidgets")),
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


def _slot(value: Any, where: str, verb: str = "starts") -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int:
        msg = f"{where}: the slot that it {verb} at is {value!r}, expected an integer."
        raise WorkflowError(msg)
    return value


def _type(value: Any) -> str:
    if isinstance(value, list):
        return "COMBO"  # older files hold the choices themselves
    return value if isinstance(value, str) else "*"  # 0 stands for "any"


def _port_name(raw: Any, where: str) -> str:
    name = _mapping(raw, where).get("name")
    if not isinstance(name, str):
        msg = f"{where}: `name` is {name!r}, expected a text."
        raise WorkflowError(msg)
    return name


def _proxies(raw: Any) -> tuple[Proxy, ...]:
    entries = raw if isinstance(raw, list) else []
    if not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
        return ()  # a property of that name which means something else
    return tuple(
        (str(entry[0]), str(entry[1]), str(entry[2]) if len(entry) > 2 else None)
        for entry in entries
    )


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
