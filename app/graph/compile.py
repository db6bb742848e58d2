"""From a graph to something that can run: everything that is wrong with it, or an order and a rate for every node."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.graph.errors import GraphError, Problem
from app.graph.links import Wiring, ancestors, cycles, topological_order
from app.graph.model import Graph, GraphNode, Link
from app.graph.node import NodeSpec
from app.graph.rates import runs_on
from app.graph.registry import Registry
from app.graph.timing import Rates, check_rates, rates_of
from app.graph.validate import validate_node, validate_types
from app.graph.widgets import Params, ParamsError, build_params


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledNode:
    """A node that will run: what it is, what feeds it and when."""

    id: str
    title: str
    spec: NodeSpec
    values: Mapping[str, Any]
    """The widgets that hold a value of their own, checked."""
    links: Mapping[str, Link]
    """Where every linked port takes its value from."""
    widget_links: Mapping[str, Link]
    """Where every linked widget takes its value from."""
    ticking: bool
    """Runs in ticks; otherwise once, before tick 1."""
    every: int
    baseline: bool
    """Runs at tick 0 too, with `baseline_links` in place of `links`."""
    primed: bool
    """A source that must run at tick 0 too, because an output of it that does not tick is needed before tick 1.
    Its ticking outputs of that call are not used."""
    baseline_links: Mapping[str, Link]
    """Where ports take their values from at tick 0: links through nodes that have not run yet lead to the object that
    those nodes will change. Empty unless `baseline`."""

    @property
    def params(self) -> Params:
        """The widgets as they are without what is linked."""
        return self.params_with({})

    def params_with(self, linked: Mapping[str, Any]) -> Params:
        """The widgets with the values that came over `widget_links`.

        Raises:
            ParamsError: a value does not fit.
        """
        return build_params(self.spec.params_class, {**self.values, **linked})

    def runs_at(self, tick: int, total: int) -> bool:
        """Whether the node runs at a tick of a run of `total` ticks; the once-region runs at tick 0."""
        if not self.ticking:
            return tick == 0
        if tick == 0:
            return self.primed or self.baseline
        return self.spec.source or runs_on(tick, self.every, total, baseline=self.baseline)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledGraph:
    """The nodes that outputs need, each after all that it reads."""

    graph: Graph
    order: tuple[CompiledNode, ...]
    iterations: int
    """Ticks of the run: the shortest of the sources; 0 where nothing ticks."""
    seed: int
    """Seed of the run: that of the first source; 0 where there is none."""

    def node(self, name: str) -> CompiledNode:
        """The node of that id.

        Raises:
            KeyError: it does not run.
        """
        for node in self.order:
            if node.id == name:
                return node
        raise KeyError(name)

    @property
    def once(self) -> tuple[CompiledNode, ...]:
        """The nodes that run once, in order."""
        return tuple(node for node in self.order if not node.ticking)

    @property
    def ticking(self) -> tuple[CompiledNode, ...]:
        """The nodes that run in ticks, in order."""
        return tuple(node for node in self.order if node.ticking)

    @property
    def sources(self) -> tuple[CompiledNode, ...]:
        """The nodes with a clock, in order."""
        return tuple(node for node in self.order if node.spec.source)

    def readers(self, source: Link) -> tuple[str, ...]:
        """Ids of the nodes that read an output, in order."""
        return tuple(
            node.id
            for node in self.order
            if source in (*node.links.values(), *node.widget_links.values())
        )


def compile_graph(graph: Graph, registry: Registry) -> CompiledGraph:
    """Check a graph and order it; only output nodes and what they need will run.

    Raises:
        GraphError: it cannot run; every problem is in the error.
    """
    compiled, problems = _compile(graph, registry)
    if problems or compiled is None:
        raise GraphError(problems)
    return compiled


def problems_of(graph: Graph, registry: Registry) -> tuple[Problem, ...]:
    """Everything that keeps a graph from running; empty when it can."""
    return _compile(graph, registry)[1]


def _compile(graph: Graph, registry: Registry) -> tuple[CompiledGraph | None, tuple[Problem, ...]]:
    known = {
        key: spec
        for key, node in graph.nodes.items()
        if (spec := registry.find(node.type)) is not None
    }
    problems = [*graph.problems, *validate_types(graph, registry)]
    roots = [key for key, spec in known.items() if spec.output]
    if not roots:
        problems.append(_no_outputs(graph, registry))
    needed = ancestors(graph, roots or graph.nodes)
    wiring: Wiring = {}
    for key, node in graph.nodes.items():
        if key in needed and key in known:
            links, found = validate_node(node, graph, known, registry)
            wiring[key] = links
            problems.extend(found)
    broken = [
        key for key, links in wiring.items() if _is_broken(graph.nodes[key], known[key], links)
    ]
    loops = cycles(wiring)
    problems.extend(_cycle(graph, known, loop) for loop in loops)
    if loops:
        return None, tuple(problems)
    order = topological_order(wiring)
    rates = rates_of(
        order,
        wiring,
        {key: known[key] for key in wiring},
        {key: _every(graph.nodes[key], known[key]) for key in wiring},
    )
    baselines = {
        key
        for key in order
        if graph.nodes[key].inputs.get("baseline", _default(known[key], "baseline")) is True
    }
    problems.extend(check_rates(graph, rates, baselines, broken))
    if problems:
        return None, tuple(problems)
    return _build(graph, rates, baselines), ()


def _build(graph: Graph, rates: Rates, baselines: Iterable[str]) -> CompiledGraph:
    nodes = []
    early = {key for key in baselines if rates.ticking[key]}
    starting = {key: rates.before_first_tick(rates.wiring[key]) for key in early}
    used_early = {
        link
        for key in rates.order
        if key in early or not rates.ticking[key]
        for link in (starting[key] if key in early else rates.wiring[key]).values()
        if link is not None
    }
    for key in rates.order:
        node, spec, links = graph.nodes[key], rates.specs[key], rates.wiring[key]
        widgets = {param.name for param in spec.params}
        at_zero = {name: link for name, link in starting.get(key, {}).items() if link is not None}
        nodes.append(
            CompiledNode(
                id=key,
                title=node.title or spec.title,
                spec=spec,
                values={name: value for name, value in node.values().items() if name in widgets},
                links={name: link for name, link in links.items() if name not in widgets},
                widget_links={name: link for name, link in links.items() if name in widgets},
                ticking=rates.ticking[key],
                every=rates.every[key],
                baseline=key in early,
                primed=spec.source and any(link.node == key for link in used_early),
                baseline_links={
                    name: link for name, link in at_zero.items() if name not in widgets
                },
            )
        )
    clocks = [node.params for node in nodes if node.spec.source]
    return CompiledGraph(
        graph=graph,
        order=tuple(nodes),
        iterations=min((getattr(clock, "iterations", 1) for clock in clocks), default=0),
        seed=getattr(clocks[0], "seed", 0) if clocks else 0,
    )


def _is_broken(node: GraphNode, spec: NodeSpec, links: Mapping[str, Link]) -> bool:
    missing = any(port.required and port.name not in links for port in spec.inputs)
    return missing or len(links) < len(node.links())


def _every(node: GraphNode, spec: NodeSpec) -> int:
    value = node.inputs.get("every", _default(spec, "every"))
    return (
        value if type(value) is int and value >= 1 else 1
    )  # what does not fit is reported with the widgets


def _default(spec: NodeSpec, name: str) -> Any:
    param = spec.param(name)
    return None if param is None else param.default


def _no_outputs(graph: Graph, registry: Registry) -> Problem:
    if not graph.nodes:
        text = "The graph is empty; add an output node to it."
    else:
        titles = sorted(spec.title for spec in registry if spec.output)
        known = f", such as {', '.join(titles[:4])}" if titles else ""
        text = f"The graph has no output node, so nothing would run; add one{known}."
    return Problem(code="prompt_no_outputs", node=None, title="", field=None, message=text)


def _cycle(graph: Graph, known: Mapping[str, NodeSpec], loop: list[str]) -> Problem:
    names = [f"{graph.nodes[key].title or known[key].title} ({key})" for key in loop]
    text = f"The links form a cycle: {' → '.join([*names, names[0]])}; remove one of them."
    first = graph.nodes[loop[0]]
    return Problem(
        code="dependency_cycle",
        node=first.id,
        title=first.title or known[first.id].title,
        field=None,
        message=text,
    )


__all__ = ["CompiledGraph", "CompiledNode", "ParamsError", "compile_graph", "problems_of"]
