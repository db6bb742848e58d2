"""Rates: which nodes tick, and whether what changes during a tick is read in a defined order."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from app.graph.errors import Problem
from app.graph.links import Wiring, downstream, reachable, upstream
from app.graph.model import Graph, Link
from app.graph.node import NodeSpec
from app.graph.validate import label, title_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """How often the nodes of an acyclic graph run."""

    order: list[str]
    wiring: Wiring
    specs: Mapping[str, NodeSpec]
    every: Mapping[str, int]
    ticking: Mapping[str, bool]
    """Whether a node runs in ticks."""
    paced: frozenset[str]
    """The nodes all of whose outputs tick because of what they read."""

    def ticks(self, link: Link) -> bool:
        """Whether an output is fresh in ticks."""
        return link.node in self.paced or self.specs[link.node].outputs[link.slot].ticks

    def before(self, link: Link) -> Link | None:
        """The output that holds the same object one node earlier, or None."""
        name = self.specs[link.node].same_object(link.slot)
        return None if name is None else self.wiring[link.node].get(name)

    def origin(self, link: Link) -> Link:
        """The output that the object on a link came from, through all nodes that only change it."""
        while (earlier := self.before(link)) is not None:
            link = earlier
        return link

    def before_first_tick(self, links: Mapping[str, Link]) -> dict[str, Link | None]:
        """For each link where its object is found before tick 1; None where it does not exist yet."""
        found: dict[str, Link | None] = {}
        for name, link in links.items():
            place: Link | None = link
            while place is not None and self.ticks(place):
                place = self.before(place)
            found[name] = place
        return found


def rates_of(
    order: list[str], wiring: Wiring, specs: Mapping[str, NodeSpec], every: Mapping[str, int]
) -> Rates:
    """Rates of an acyclic graph: what is reachable from a ticking output runs in ticks, the rest once."""
    paced: set[str] = set()
    for key in order:
        links = wiring[key].values()
        if any(link.node in paced or specs[link.node].outputs[link.slot].ticks for link in links):
            paced.add(key)
    return Rates(
        order=order,
        wiring=wiring,
        specs=specs,
        every=every,
        ticking={key: key in paced or specs[key].source for key in order},
        paced=frozenset(paced),
    )


def check_rates(
    graph: Graph, rates: Rates, baselines: Iterable[str], broken: Iterable[str]
) -> list[Problem]:
    """Two writers of one value, readers out of order, stale values where fresh ones are needed, early baselines.

    What a node with a missing link will read, and when, is not known; neither is it for the nodes after it. These are
    not judged: the missing link is a problem of its own.
    """
    targets = downstream(rates.wiring)
    unsure = set(broken).union(*(reachable(targets, key) for key in broken))
    return [
        *_changes(graph, rates, unsure),
        *_stale_values(graph, rates, unsure),
        *_baselines(graph, rates, [key for key in baselines if key not in unsure]),
    ]


def _changes(graph: Graph, rates: Rates, unsure: Set[str]) -> list[Problem]:
    writers: dict[tuple[Link, bool], list[tuple[str, str]]] = {}
    readers: dict[tuple[Link, bool], list[tuple[str, str]]] = {}
    for key in rates.order:
        for name, link in rates.wiring[key].items():
            port = rates.specs[key].input(name)
            group = writers if port is not None and port.changes else readers
            group.setdefault((rates.origin(link), rates.ticking[key]), []).append((key, name))
    problems = []
    sources, targets = upstream(rates.wiring), downstream(rates.wiring)
    for (origin, ticking), changing in writers.items():
        writer, _ = changing[0]
        for other, field in changing[1:]:
            problems.append(_two_writers(graph, rates, origin, (writer, other, field)))
        ordered = {key for key, _ in changing}.union(
            *(reachable(sources, key) | reachable(targets, key) for key, _ in changing)
        )
        beside = readers.get((origin, ticking), [])
        if ticking:
            # A card with `every` is meant to run again and again; reading the unchanged value, it would run once only.
            once = readers.get((origin, False), [])
            beside = beside + [entry for entry in once if rates.specs[entry[0]].param("every")]
        for reader, field in beside:
            if reader not in ordered and not {reader, writer} & unsure:
                problems.append(_unordered(graph, rates, origin, (reader, field, writer)))
    return problems


def _two_writers(graph: Graph, rates: Rates, origin: Link, names: tuple[str, str, str]) -> Problem:
    first, second, field = names
    value = rates.specs[origin.node].outputs[origin.slot].name
    return _problem(
        graph,
        rates,
        "two_writers",
        (second, field),
        f"{label(graph, rates.specs, first)} and {label(graph, rates.specs, second)} both change "
        f"`{value}` of {label(graph, rates.specs, origin.node)}; only one node may change it. Give each its own.",
    )


def _unordered(graph: Graph, rates: Rates, origin: Link, names: tuple[str, str, str]) -> Problem:
    reader, field, writer = names
    value = rates.specs[origin.node].outputs[origin.slot].name
    changer = label(graph, rates.specs, writer)
    spec = rates.specs[writer]
    same = [
        output.name
        for slot, output in enumerate(spec.outputs)
        if (name := spec.same_object(slot)) is not None
        and name in rates.wiring[writer]
        and rates.origin(rates.wiring[writer][name]) == origin
    ]
    way_out = (
        f"take `{same[0]}` from {changer}"
        if same
        else f"link it so that it runs before or after {changer}"
    )
    return _problem(
        graph,
        rates,
        "unordered_reader",
        (reader, field),
        f"{label(graph, rates.specs, reader)} reads `{value}` of {label(graph, rates.specs, origin.node)} "
        f"while {changer} changes it; {way_out}.",
    )


def _stale_values(graph: Graph, rates: Rates, unsure: Set[str]) -> list[Problem]:
    problems = []
    for key in rates.order:
        if key in unsure:
            continue
        for port in rates.specs[key].inputs:
            link = rates.wiring[key].get(port.name)
            if not port.needs_every or link is None or not rates.ticking[key]:
                continue
            here = label(graph, rates.specs, key)
            giver = label(graph, rates.specs, link.node)
            if not rates.ticks(link):
                text = f"{here}: `{port.name}` needs a fresh value at every tick, but {giver} gives one for the whole run."
                problems.append(_problem(graph, rates, "stale_value", (key, port.name), text))
                continue
            slow = _slow_node(rates, link)
            if slow is not None:
                text = (
                    f"{here}: `{port.name}` needs a fresh value at every tick, but {label(graph, rates.specs, slow)} "
                    f"runs only every {rates.every[slow]} ticks; set its `every` to 1."
                )
                problems.append(_problem(graph, rates, "stale_value", (key, port.name), text))
    return problems


def _slow_node(rates: Rates, link: Link) -> str | None:
    """A node with `every` above 1 that the value depends on; an object that is changed in place is never stale."""
    waiting, seen = [link], set()
    while waiting:
        current = waiting.pop()
        if current in seen or not rates.ticks(current) or rates.before(current) is not None:
            continue
        seen.add(current)
        if rates.every[current.node] > 1:
            return current.node
        waiting.extend(rates.wiring[current.node].values())
    return None


def _baselines(graph: Graph, rates: Rates, baselines: Iterable[str]) -> list[Problem]:
    problems = []
    for key in baselines:
        if not rates.ticking[key]:
            continue
        for name, place in rates.before_first_tick(rates.wiring[key]).items():
            if place is None:
                giver = label(graph, rates.specs, rates.wiring[key][name].node)
                text = (
                    f"{label(graph, rates.specs, key)}: `baseline` runs before tick 1, when `{name}` of {giver} "
                    "does not exist yet; turn `baseline` off or take a value that does not tick."
                )
                problems.append(_problem(graph, rates, "early_baseline", (key, name), text))
    return problems


def _problem(
    graph: Graph, rates: Rates, code: str, place: tuple[str, str], message: str
) -> Problem:
    key, field = place
    title = title_of(graph.nodes[key], rates.specs[key])
    return Problem(code=code, node=key, title=title, field=field, message=message)
