"""Subgraphs: a drawing with every instance opened, and what the widgets of an instance say about the cards inside."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from app.graph.drawing import (
    BYPASSED,
    INPUT_NODE,
    MUTED,
    Cards,
    Definition,
    Drawing,
    DrawnInput,
    DrawnNode,
    Proxy,
)
from app.graph.errors import Problem, WorkflowError, quoted
from app.graph.registry import Registry
from app.graph.stored_values import CONTROL, CONTROL_VALUES, SEEDS, same, unwrap
from app.graph.widgets import describe

# Far above any real drawing: a few subgraphs that hold one another twice could otherwise fill the memory.
MOST_CARDS: Final = 20_000
DEEPEST_LEVEL: Final = 100

# Types of instances; no class of nodes is named like that.
UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)

# Stands for the subgraph itself in a list of widgets: the widget is an input of it.
ITSELF: Final = "-1"


@dataclass(kw_only=True, slots=True)
class Scope:
    """The canvas, or one instance of a subgraph with the cards inside.

    Cards are found by their id inside of the scope; the `id` of a card is its path from the canvas (`194:45`), and the
    `title` of one inside a subgraph starts with that of the instance.
    """

    cards: Cards
    parent: "Scope | None" = None
    instance: DrawnNode | None = None
    """The card in `parent` that this is."""
    definition: Definition | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the widgets of the instance say, by input of the subgraph."""
    overrides: Mapping[Proxy, Any] = field(default_factory=dict)
    """What the widgets of the instance say, by widget of a card inside."""
    nodes: dict[str, DrawnNode] = field(default_factory=dict)
    children: dict[str, "Scope"] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Id of the instance; empty for the canvas."""
        return self.instance.id if self.instance else ""

    def walk(self) -> Iterator[tuple["Scope", str, DrawnNode]]:
        """Every card here and inside, with its scope and its id there; instances that were opened are left out."""
        for key, node in self.nodes.items():
            if key in self.children:
                yield from self.children[key].walk()
            else:
                yield self, key, node

    def own_values(self, key: str) -> dict[str, Any]:
        """What the instance says about the widgets of a card inside."""
        return {name: value for (card, name, _), value in self.overrides.items() if card == key}

    def outer(self, slot: int) -> DrawnInput | None:
        """The input of the instance that feeds an input of the subgraph."""
        if self.instance is None or self.definition is None:
            return None
        names, entries = self.definition.inputs, self.instance.inputs
        if not 0 <= slot < len(names):
            return None
        # Slots of the two differ: front-ends leave out widgets of the instance that have no link.
        found = next((entry for entry in entries if entry.name == names[slot]), None)
        return found or (entries[slot] if len(entries) == len(names) else None)


@dataclass(frozen=True, slots=True)
class Opened:
    """A drawing with its instances opened."""

    canvas: Scope
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def open_instances(drawing: Drawing, registry: Registry) -> Opened:
    """Open every instance of a subgraph that is neither muted nor bypassed, those inside of others too.

    Raises:
        WorkflowError: the drawing is absurdly large or deep, or the paths of two cards are the same.
    """
    opener = _Opener(drawing.subgraphs, registry)
    canvas = Scope(cards=drawing.cards)
    opener.fill(canvas, ())
    paths: set[str] = set()
    for _, _, node in canvas.walk():
        if node.id in paths:
            msg = (
                f"{node.label}: another card has the id {node.id} too; give one of them another id."
            )
            raise WorkflowError(msg)
        paths.add(node.id)
    return Opened(canvas, tuple(opener.problems), tuple(opener.warnings))


class _Opener:
    def __init__(self, subgraphs: Mapping[str, Definition], registry: Registry) -> None:
        self.subgraphs = subgraphs
        self.registry = registry
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self._count = 0
        self._widget_slots: dict[str, frozenset[int]] = {}

    def fill(self, scope: Scope, trail: tuple[str, ...]) -> None:
        """Give a scope its cards and the scopes inside; `trail` holds the subgraphs that it lies in."""
        for key, raw in scope.cards.nodes.items():
            self._count += 1
            if self._count > MOST_CARDS:
                msg = f"With every subgraph opened, the workflow has more than {MOST_CARDS} cards; that is no workflow."
                raise WorkflowError(msg)
            definition = self.subgraphs.get(raw.type)
            node = self._placed(raw, scope, definition)
            scope.nodes[key] = node
            if node.mode in (MUTED, BYPASSED):
                continue
            if definition is not None:
                self._open(scope, key, definition, trail)
            elif UUID.fullmatch(node.type) and self.registry.find(node.type) is None:
                text = (
                    f"{node.label}: it is an instance of the subgraph `{node.type}`, which is not in the file; "
                    "save the workflow again in the editor that made it."
                )
                self.problems.append(_remark("missing_node_type", node, text))

    def _placed(self, raw: DrawnNode, scope: Scope, definition: Definition | None) -> DrawnNode:
        title = raw.title or (definition.name if definition else "")
        if scope.instance is None:
            return replace(raw, title=title)
        spec = self.registry.find(raw.type)
        title = title or (spec.title if spec else raw.type)
        return replace(raw, id=f"{scope.path}:{raw.id}", title=f"{scope.instance.title} / {title}")

    def _open(self, scope: Scope, key: str, definition: Definition, trail: tuple[str, ...]) -> None:
        node = scope.nodes[key]
        if node.type in trail:
            loop = [*trail[trail.index(node.type) :], node.type]
            names = " → ".join(f"`{self.subgraphs[part].name}`" for part in loop)
            text = (
                f"{node.label}: the subgraph `{definition.name}` contains itself ({names}); "
                "remove one of these instances."
            )
            self.problems.append(_remark("circular_subgraph", node, text))
            return
        if len(trail) >= DEEPEST_LEVEL:
            msg = (
                f"Subgraphs are nested more than {DEEPEST_LEVEL} levels deep; that is no workflow."
            )
            raise WorkflowError(msg)
        handed_on = {
            (name, further): value
            for (card, name, further), value in scope.overrides.items()
            if card == key
        }
        values, overrides = self._widgets(node, definition, handed_on)
        child = Scope(
            cards=definition.cards,
            parent=scope,
            instance=node,
            definition=definition,
            values=values,
            overrides=overrides,
        )
        scope.children[key] = child
        self.fill(child, (*trail, node.type))

    def _widgets(
        self,
        node: DrawnNode,
        definition: Definition,
        handed_on: Mapping[tuple[str, str | None], Any],
    ) -> tuple[dict[str, Any], dict[Proxy, Any]]:
        """What the widgets of an instance say: by input of the subgraph, and by widget inside.

        Values by name win over those by position, and what the instance around says wins over both.
        """
        shown = self._shown(node, definition)
        by_position = self._by_position(node, shown)
        found = dict(by_position)
        by_name = node.named
        if by_name is None and isinstance(node.values, Mapping):
            by_name = node.values
        inputs: list[Proxy] = [(ITSELF, name, None) for name in definition.inputs]
        taken: set[str] = set()
        for proxy in dict.fromkeys([*inputs, *node.proxies]):
            name = proxy[1]
            value = None if by_name is None or name in taken else unwrap(by_name.get(name))
            taken.add(name)
            if value is None:
                continue
            if proxy in by_position and not same(by_position[proxy], value):
                text = (
                    f"{node.label}: `{name}` is {describe(value)} by name, but {describe(by_position[proxy])} by "
                    "position; the value by name is used."
                )
                self.warnings.append(_remark("stored_values", node, text, name))
            found[proxy] = value
        for (name, further), value in handed_on.items():
            meant = [
                proxy
                for proxy in (*inputs, *node.proxies)
                if proxy[1] == name and further in (None, ITSELF, proxy[0])
            ]
            if meant:
                found[meant[0]] = value
            elif name in definition.inputs:
                found[ITSELF, name, None] = value
        values = {proxy[1]: value for proxy, value in found.items() if proxy[0] == ITSELF}
        inside = {
            proxy: value
            for proxy, value in found.items()
            if proxy[0] != ITSELF and proxy[1] != CONTROL
        }
        return values, inside

    def _shown(self, node: DrawnNode, definition: Definition) -> list[list[Proxy]]:
        """The orders in which an instance may list its widgets, likeliest first."""
        slots = self._slots_of(node.type, 0)
        inputs: list[Proxy] = [
            (ITSELF, name, None) for slot, name in enumerate(definition.inputs) if slot in slots
        ]
        proxies = list(node.proxies)
        if any(proxy[0] == ITSELF for proxy in proxies):
            return [proxies]
        return [[*inputs, *proxies], proxies, inputs] if proxies else [inputs]

    def _by_position(self, node: DrawnNode, orders: Sequence[list[Proxy]]) -> dict[Proxy, Any]:
        row = node.values
        if not isinstance(row, list) or all(value is None for value in row):
            return {}
        for order in orders:
            fitting = _fit(row, order)
            if fitting is not None:
                return {
                    proxy: unwrap(value)
                    for proxy, value in zip(order, fitting, strict=True)
                    if value is not None
                }
        if node.named is None:
            names = [proxy[1] for proxy in orders[0]]
            known = f"({quoted(names)})" if names else "at all"
            text = (
                f"{node.label}: {len(row)} values are stored for {len(names)} widgets {known}; none of them is used, "
                "and the cards inside keep theirs."
            )
            self.warnings.append(_remark("stored_values", node, text))
        return {}

    def _slots_of(self, kind: str, level: int) -> frozenset[int]:
        """The inputs of a subgraph that are widgets: those that lead to a widget inside."""
        if kind in self._widget_slots:
            return self._widget_slots[kind]
        self._widget_slots[kind] = frozenset()  # the answer while a circle is gone through
        if level > DEEPEST_LEVEL:
            return frozenset()
        cards = self.subgraphs[kind].cards
        slots = range(len(self.subgraphs[kind].inputs))
        found = set()
        for node in cards.nodes.values():
            spec = self.registry.find(node.type)
            nested = self.subgraphs.get(node.type)
            inside = self._slots_of(node.type, level + 1) if nested else frozenset()
            names = {nested.inputs[slot] for slot in inside} if nested else set()
            for entry in node.inputs:
                start = cards.starts.get(entry.link) if entry.link is not None else None
                if start is None or start[0] != INPUT_NODE or start[1] not in slots:
                    continue
                param = spec is not None and spec.param(entry.name) is not None
                if entry.widget is not None or param or entry.name in names:
                    found.add(start[1])
        self._widget_slots[kind] = frozenset(found)
        return self._widget_slots[kind]


def _fit(row: list[Any], order: Sequence[Proxy]) -> list[Any] | None:
    """The values of a row without what front-ends keep after a seed; None if their number is not that of the widgets."""
    if len(row) == len(order):
        return row
    kept: list[Any] = []
    for value in row:
        after_seed = 0 < len(kept) <= len(order) and order[len(kept) - 1][1] in SEEDS
        if after_seed and value in CONTROL_VALUES and isinstance(kept[-1], int):
            continue
        kept.append(value)
    return kept if len(kept) == len(order) else None


def _remark(code: str, node: DrawnNode, text: str, name: str | None = None) -> Problem:
    return Problem(code=code, node=node.id, title=node.title, field=name, message=text)
