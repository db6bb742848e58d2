"""From the arguments of a command to a graph: nodes, files, values set on the command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.cli.output import tell
from app.graph.edit import SetError, set_source_value, set_value, split_assignment
from app.graph.model import Graph, GraphNode, Link
from app.graph.registry import Registry, load_registry
from app.graph.validate import title_of
from app.graph.workflow import Workflow, read_workflow
from app.paths import CUSTOM_NODES


class InvalidInputError(Exception):
    """What was asked for cannot be done; `problems` holds one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def add_custom_nodes(parser: argparse.ArgumentParser) -> None:
    """The option that names the folder of a user's own nodes."""
    parser.add_argument(
        "--custom-nodes",
        type=Path,
        default=CUSTOM_NODES,
        metavar="DIR",
        help="folder of your own nodes (default: custom_nodes in the checkout)",
    )


def nodes_for(options: argparse.Namespace) -> Registry:
    """All installed nodes; those that cannot be loaded are told of and left out. Imports torch."""
    if options.custom_nodes != CUSTOM_NODES and not options.custom_nodes.is_dir():
        tell(f"Warning: custom nodes: there is no folder {options.custom_nodes}.")
    registry = load_registry(options.custom_nodes)
    for failure in registry.failures.values():
        tell(f"Warning: custom nodes: {failure}")
    return registry


def check_readable(path: Path) -> None:
    """Read a workflow without knowing any node: what is no workflow at all is found before torch is imported.

    Raises:
        WorkflowError: the file holds no workflow.
    """
    read_workflow(path, Registry())


def read(path: Path, registry: Registry) -> Workflow:
    """The workflow of a file; what is worth saying about it is told.

    Raises:
        WorkflowError: the file holds no workflow.
    """
    workflow = read_workflow(path, registry)
    for warning in workflow.warnings:
        tell(f"Warning: {warning.message}")
    return workflow


def with_settings(
    graph: Graph,
    registry: Registry,
    *,
    assignments: Sequence[str] = (),
    iterations: int | None = None,
    seed: int | None = None,
) -> Graph:
    """The graph with the values of `--set`, `--iterations` and `--seed`.

    Raises:
        InvalidInputError: some of them cannot be set.
    """
    problems = []
    for assignment in assignments:
        try:
            node, name, text = split_assignment(assignment)
            graph = set_value(graph, f"{node}.{name}", text, registry)
        except SetError as error:
            problems.append(f"--set {assignment}: {error}")
    for field, value in (("iterations", iterations), ("seed", seed)):
        if value is not None:
            try:
                graph = set_source_value(graph, field, value, registry)
            except SetError as error:
                problems.append(f"--{field} {value}: {error}")
    if problems:
        raise InvalidInputError(problems)
    return graph


def first_difference(given: Graph, stored: Graph, registry: Registry) -> str | None:
    """The first thing in which two graphs differ, as a sentence about `given`; None where they would run the same.

    Titles and positions do not count, nor does how many ticks the sources make.
    """
    for name, node in given.nodes.items():
        label = f"{title_of(node, registry.find(node.type))} ({name})"
        other = stored.nodes.get(name)
        if other is None:
            return f"{label} is not in the run's graph."
        if other.type != node.type:
            return f"{label} is a {node.type}, the run has a {other.type}."
        mine, theirs = _inputs(node, registry), _inputs(other, registry)
        for field in sorted(mine.keys() | theirs.keys()):
            one, two = mine.get(field), theirs.get(field)
            if one != two or type(one) is not type(two):
                return f"{label}: `{field}` is {_worded(one)}, the run has {_worded(two)}."
    missing = next((name for name in stored.nodes if name not in given.nodes), None)
    if missing is not None:
        node = stored.nodes[missing]
        return f"{title_of(node, registry.find(node.type))} ({missing}) is missing; the run's graph has it."
    return None


def source_iterations(graph: Graph, registry: Registry) -> list[int]:
    """The `iterations` of the graph's sources."""
    return [
        _inputs(node, registry, leave_out=())["iterations"]
        for node in graph.nodes.values()
        if (spec := registry.find(node.type)) is not None
        and spec.source
        and spec.param("iterations")
    ]


def _inputs(
    node: GraphNode, registry: Registry, leave_out: tuple[str, ...] = ("iterations",)
) -> dict[str, Any]:
    spec = registry.find(node.type)
    if spec is None:
        return dict(node.inputs)
    values = {param.name: param.default for param in spec.params} | dict(node.inputs)
    for param in spec.params:
        if param.wire == "FLOAT" and type(values[param.name]) is int:
            values[param.name] = float(values[param.name])
    return {
        name: value for name, value in values.items() if not (spec.source and name in leave_out)
    }


def _worded(value: Any) -> str:
    if isinstance(value, Link):
        return f"linked to output {value.slot} of node {value.node}"
    return "not set" if value is None else repr(value)
