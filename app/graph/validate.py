"""What is wrong with single nodes: unknown types, inputs that do not exist, links and values that do not fit."""

from collections.abc import Mapping
from typing import Final

from app.graph.errors import Problem, quoted, suggestion
from app.graph.model import Graph, GraphNode, Link
from app.graph.node import NodeSpec
from app.graph.ports import accepts
from app.graph.registry import Registry
from app.graph.widgets import RESERVED, ParamsError, build_params, describe

Specs = Mapping[str, NodeSpec]

# Other cards that could feed an input are named up to this many, so that a message stays one line.
OFFERS: Final = 3


def label(graph: Graph, specs: Specs, key: str) -> str:
    """How messages name a node: its title and its id."""
    node = graph.nodes[key]
    return f"{title_of(node, specs.get(key))} ({key})"


def title_of(node: GraphNode, spec: NodeSpec | None) -> str:
    """What the user named a node, else the title of its class, else its type."""
    return node.title or (spec.title if spec else node.type)


def validate_types(graph: Graph, registry: Registry) -> list[Problem]:
    """Nodes whose type is not installed, or written by a newer version of it."""
    problems = []
    reported = {problem.node for problem in graph.problems if problem.code == "missing_node_type"}
    known = [spec.type for spec in registry]
    for key, node in graph.nodes.items():
        spec = registry.find(node.type)
        title = title_of(node, spec)
        if spec is None and key not in reported:
            text = f"{title} ({key}): no node of type `{node.type}` is installed.{suggestion(node.type, known)}"
            problems.append(
                Problem(code="missing_node_type", node=key, title=title, field=None, message=text)
            )
        elif spec is not None and node.version is not None and node.version > spec.version:
            text = (
                f"{title} ({key}): it was written by version {node.version} of {spec.title}, "
                f"and version {spec.version} is installed; update JAGG Studio."
            )
            problems.append(
                Problem(code="newer_node_version", node=key, title=title, field=None, message=text)
            )
    return problems


def validate_node(
    node: GraphNode, graph: Graph, specs: Specs, registry: Registry
) -> tuple[dict[str, Link], list[Problem]]:
    """The links of a node that hold, and what is wrong with its inputs."""
    spec = specs[node.id]
    check = _Check(node, spec, graph, specs, registry)
    for name, value in node.inputs.items():
        port, param = spec.input(name), spec.param(name)
        if port is None and param is None:
            check.unknown(name)
        elif isinstance(value, Link):
            if param is not None and name in RESERVED:
                check.add("invalid_input_type", name, f"`{name}` cannot be linked; type a value.")
            else:
                check.link(name, port.wire if port else param.wire if param else "", value)
        elif port is not None and value is not None:
            check.add(
                "invalid_input_type",
                name,
                f"`{name}` is {describe(value)}, expected a link of type {port.wire}.",
            )
    for port in spec.inputs:
        if port.required and node.inputs.get(port.name) is None:
            check.missing(port.name, port.wire)
    check.values()
    return check.links, check.problems


class _Check:
    def __init__(
        self, node: GraphNode, spec: NodeSpec, graph: Graph, specs: Specs, registry: Registry
    ) -> None:
        self.node, self.spec, self.graph, self.specs = node, spec, graph, specs
        self.table = registry.accept_table()
        self.links: dict[str, Link] = {}
        self.problems: list[Problem] = []
        self.title = title_of(node, spec)

    def add(self, code: str, field: str | None, text: str) -> None:
        message = f"{self.title} ({self.node.id}): {text}"
        self.problems.append(
            Problem(code=code, node=self.node.id, title=self.title, field=field, message=message)
        )

    def unknown(self, name: str) -> None:
        known = self.spec.input_names()
        inputs = f"Inputs are {quoted(known)}." if known else "It has no inputs."
        self.add(
            "unknown_input", name, f"no input named `{name}`. {inputs}{suggestion(name, known)}"
        )

    def link(self, name: str, wire: str, link: Link) -> None:
        """Keep a link that holds, report one that does not; a source of an unknown type is reported elsewhere."""
        if link.node not in self.graph.nodes:
            text = f"`{name}` is linked to node {link.node}, which is not in the graph."
            self.add("bad_linked_input", name, text)
            return
        source = self.specs.get(link.node)
        if source is None:
            return
        giver = label(self.graph, self.specs, link.node)
        if not 0 <= link.slot < len(source.outputs):
            outputs = quoted(output.name for output in source.outputs)
            has = f"its outputs are {outputs}, counted from 0" if outputs else "it has no outputs"
            text = (
                f"`{name}` is linked to output {link.slot} of {giver}, which does not exist; {has}."
            )
            self.add("bad_linked_input", name, text)
            return
        output = source.outputs[link.slot]
        if accepts(self.table, wire, output.wire):
            self.links[name] = link
            return
        text = f"`{name}` takes {wire}, but `{output.name}` of {giver} gives {output.wire}."
        fitting = [
            port.name for port in self.spec.inputs if accepts(self.table, port.wire, output.wire)
        ]
        if fitting:
            text += f" Did you mean input `{fitting[0]}`?"
        else:
            text += self._offers(wire)
        self.add("return_type_mismatch", name, text)

    def missing(self, name: str, wire: str) -> None:
        text = f"`{name}` is not linked; it needs a {wire}.{self._offers(wire)}"
        self.add("required_input_missing", name, text)

    def values(self) -> None:
        """Check the widgets; a rule between fields is left to the run where one of them is linked."""
        linked = self.node.links()
        widgets = {param.name for param in self.spec.params}
        values = {name: value for name, value in self.node.values().items() if name in widgets}
        try:
            build_params(self.spec.params_class, values)
        except ParamsError as error:
            for issue in error.issues:
                across = issue.code == "custom_validation_failed"
                if not (across and (set(issue.fields) & set(linked))):
                    self.add(issue.code, issue.fields[0] if issue.fields else None, issue.text)

    def _offers(self, wire: str) -> str:
        givers = [
            f"`{output.name}` of {label(self.graph, self.specs, key)}"
            for key, spec in self.specs.items()
            if key != self.node.id
            for output in spec.outputs
            if accepts(self.table, wire, output.wire)
        ]
        return f" It could be {' or '.join(givers[:OFFERS])}." if givers else ""
