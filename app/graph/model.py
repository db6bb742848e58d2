"""A graph as data: nodes by id, each with plain values and links by input name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from app.graph.errors import Problem


@dataclass(frozen=True, slots=True)
class Link:
    """Where an input takes its value from: output `slot` of node `node`."""

    node: str
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphNode:
    """One node of a graph; it need not be of a type that is installed."""

    id: str
    type: str
    title: str = ""
    """What the user named it; empty = the title of its class."""
    version: int | None = None
    """Version of its class when it was written; None = the current one."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """A `Link` or a plain JSON value by input name; what is absent takes its default."""

    def links(self) -> dict[str, Link]:
        """The inputs that are linked."""
        return {name: value for name, value in self.inputs.items() if isinstance(value, Link)}

    def values(self) -> dict[str, Any]:
        """The inputs that hold a value of their own."""
        return {name: value for name, value in self.inputs.items() if not isinstance(value, Link)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Nodes by id, in the order of the file; a graph may be wrong in any way until it is compiled."""

    nodes: Mapping[str, GraphNode] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """What was found while reading it and keeps it from running; compiling reports it with the rest."""

    def with_input(self, node: str, name: str, value: Any) -> "Graph":
        """The same graph with one input replaced."""
        old = self.nodes[node]
        return self.with_node(replace(old, inputs={**old.inputs, name: value}))

    def with_node(self, node: GraphNode) -> "Graph":
        """The same graph with one node added or replaced."""
        return replace(self, nodes={**self.nodes, node.id: node})
