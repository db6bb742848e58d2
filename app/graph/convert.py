"""From a drawing to a graph that can be compiled: the rules by which a front-end of ComfyUI makes a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.graph.drawing import BYPASSED, INPUT_NODE, MUTED, Drawing, DrawnNode
from app.graph.errors import Problem
from app.graph.model import Graph, GraphNode, Link
from app.graph.registry import Registry
from app.graph.stored_values import migrate, read_values, unwrap
from app.graph.subgraphs import Scope, open_instances

REROUTE: Final = "Reroute"
PRIMITIVE: Final = "PrimitiveNode"
NOTES: Final = ("Note", "MarkdownNote")


@dataclass(frozen=True, slots=True)
class Converted:
    """A graph, and what is worth saying about the drawing that it came from."""

    graph: Graph
    warnings: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any


def to_graph(drawing: Drawing, registry: Registry) -> Converted:
    """The graph of a drawing: subgraphs are opened; reroutes, primitives, muted, bypassed and note cards vanish.

    Cards of types that are not installed stay, with the values that are stored by name. Cards inside a subgraph have
    their path as id, such as `194:45`. An instance whose subgraph is missing or contains itself is a problem of the
    graph that names it.

    Raises:
        WorkflowError: a card of an older version cannot be brought to the current one, or subgraphs are absurdly deep.
    """
    opened = open_instances(drawing, registry)
    warnings = list(opened.warnings)
    problems = list(opened.problems)
    nodes: dict[str, GraphNode] = {}
    for scope, key, node in opened.canvas.walk():
        if not _runs(node, drawing):
            continue
        spec = registry.find(node.type)
        stored = read_values(node, spec)
        warnings.extend(stored.warnings)
        inputs: dict[str, Any] = {**stored.values, **scope.own_values(key)}
        for entry in node.inputs:
            if entry.link is None:
                continue
            if entry.link not in scope.cards.starts:
                text = f"{node.label}: `{entry.name}` has link {entry.link}, which does not exist; it is left open."
                warnings.append(_problem("dangling_link", node, entry.name, text))
                continue
            found = _follow(drawing, scope, entry.link, entry.type)
            if isinstance(found, Problem):
                problems.append(found)
            elif isinstance(found, _Constant):
                inputs[entry.widget or entry.name] = found.value
            elif found is not None:
                inputs[entry.widget or entry.name] = found
            elif (reason := _why_open(scope, entry.link)) is not None:
                text = f"{node.label}: `{entry.name}` is linked to {reason}; it is left open."
                warnings.append(_problem("dangling_link", node, entry.name, text))
        inputs, version = migrate(inputs, node.version, spec, node.label)
        nodes[node.id] = GraphNode(
            id=node.id, type=node.type, title=node.title, version=version, inputs=inputs
        )
    return Converted(Graph(nodes=nodes, problems=tuple(dict.fromkeys(problems))), tuple(warnings))


def _runs(node: DrawnNode, drawing: Drawing) -> bool:
    virtual = node.type in (REROUTE, PRIMITIVE, *NOTES) or node.type in drawing.subgraphs
    return not virtual and node.mode not in (MUTED, BYPASSED)


def _follow(
    drawing: Drawing, scope: Scope, link: str | None, wanted: str
) -> Link | _Constant | Problem | None:
    """What a link brings to an input of type `wanted`, through cards that do not run; None for nothing.

    Where it comes in from outside a subgraph and brings nothing, the widget of the outermost instance counts that
    holds a value.
    """
    seen: set[tuple[str, str, int]] = set()
    instead: _Constant | None = None
    while link is not None and link in scope.cards.starts:
        key, slot = scope.cards.starts[link]
        if scope.parent is not None and scope.definition is not None and key == INPUT_NODE:
            names = scope.definition.inputs
            if 0 <= slot < len(names) and names[slot] in scope.values:
                instead = _Constant(scope.values[names[slot]])
            outer = scope.outer(slot)
            link, scope = (outer.link if outer else None), scope.parent
            continue
        node = scope.nodes.get(key)
        if node is None or node.mode == MUTED or node.type in NOTES:
            return instead
        if (scope.path, key, slot) in seen:
            text = f"{node.label}: its links lead back to itself; remove one of them."
            return _problem("dependency_cycle", node, None, text)
        seen.add((scope.path, key, slot))
        if _runs(node, drawing):
            return Link(node.id, slot)
        if key in scope.children:
            scope = scope.children[key]
            link = scope.cards.results.get(slot)
            continue
        if node.mode != BYPASSED and node.type == PRIMITIVE:
            return _primitive_value(node, scope.own_values(key)) or instead
        if node.mode != BYPASSED and node.type != REROUTE:
            return instead  # an instance that could not be opened
        place = 0 if node.type == REROUTE else _way_through(node, slot, wanted)
        link = node.inputs[place].link if place is not None and place < len(node.inputs) else None
    return instead


def _why_open(scope: Scope, link: str | None) -> str | None:
    """The card that a link without effect starts at, and what is the matter with it; None if nothing needs saying."""
    while link is not None:
        if link not in scope.cards.starts:
            return f"link {link}, which does not exist"
        key, slot = scope.cards.starts[link]
        if scope.parent is not None and key == INPUT_NODE:
            outer = scope.outer(slot)
            link, scope = (outer.link if outer else None), scope.parent
            continue
        node = scope.nodes.get(key)
        if node is None:
            inside = f" inside {scope.instance.label}" if scope.instance else ""
            return f"node {key}, which is not in the file{inside}"
        if node.mode == MUTED:
            return f"{node.label}, which is muted"
        if node.mode == BYPASSED:
            return f"{node.label}, which is bypassed and has nothing of that type to hand on"
        if key not in scope.children:
            return None
        scope = scope.children[key]
        link = scope.cards.results.get(slot)
        if link is None:
            return f"output {slot} of {node.label}, which is linked to nothing inside"
    return None


def _way_through(node: DrawnNode, slot: int, wanted: str) -> int | None:
    """The input that a bypassed card hands on at an output."""
    given = node.output_types[slot] if slot < len(node.output_types) else "*"
    types = [entry.type for entry in node.inputs]
    if wanted in ("*", ""):
        return slot if slot < len(types) else 0
    if slot < len(types) and _compatible(types[slot], given) and _compatible(types[slot], wanted):
        return slot
    if wanted in types:
        return types.index(wanted)
    fitting = (
        place
        for place, kind in enumerate(types)
        if _compatible(kind, given) and _compatible(kind, wanted)
    )
    return next(fitting, None)


def _compatible(one: str, other: str) -> bool:
    if "*" in (one, other) or "" in (one, other):
        return True
    left, right = ({part.strip().casefold() for part in kind.split(",")} for kind in (one, other))
    return bool(left & right)


def _primitive_value(node: DrawnNode, shown: Mapping[str, Any]) -> _Constant | None:
    values = list(shown.values()) or node.values or node.named
    if isinstance(values, Mapping):
        values = list(values.values())
    return _Constant(unwrap(values[0])) if values else None


def _problem(code: str, node: DrawnNode, field: str | None, text: str) -> Problem:
    return Problem(
        code=code, node=node.id, title=node.title or node.type, field=field, message=text
    )
