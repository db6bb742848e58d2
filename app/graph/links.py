"""The links of a graph as a plain directed graph: what needs what, cycles, and an order."""

from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

from app.graph.model import Graph, Link

Wiring = dict[str, dict[str, Link]]
"""For each node the links of its inputs by name."""


def ancestors(graph: Graph, roots: Iterable[str]) -> set[str]:
    """The roots and every node that they need; links to nodes that do not exist are passed over."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        key = waiting.pop()
        if key in found or key not in graph.nodes:
            continue
        found.add(key)
        waiting.extend(link.node for link in graph.nodes[key].links().values())
    return found


def reachable(edges: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """What can be reached from a node along the edges, the node itself apart."""
    found: set[str] = set()
    waiting = list(edges.get(start, ()))
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting.extend(edges.get(key, ()))
    return found


def upstream(wiring: Wiring) -> dict[str, list[str]]:
    """For each node the nodes that it reads."""
    return {
        key: list(dict.fromkeys(link.node for link in links.values()))
        for key, links in wiring.items()
    }


def downstream(wiring: Wiring) -> dict[str, list[str]]:
    """For each node the nodes that read it."""
    readers: dict[str, list[str]] = {key: [] for key in wiring}
    for key, sources in upstream(wiring).items():
        for source in sources:
            readers[source].append(key)
    return readers


def topological_order(wiring: Wiring) -> list[str]:
    """Every node after what it reads; nodes that are free to go come in the order of the file."""
    place = {key: number for number, key in enumerate(wiring)}
    sorter = TopologicalSorter(upstream(wiring))
    sorter.prepare()
    order = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=place.__getitem__)
        order.extend(ready)
        sorter.done(*ready)
    return order


def cycles(wiring: Wiring) -> list[list[str]]:
    """One cycle, in the direction of the links, for each group of nodes that need one another."""
    readers = downstream(wiring)
    left = {key: len(sources) for key, sources in upstream(wiring).items()}
    free = [key for key, count in left.items() if count == 0]
    while free:
        for reader in readers[free.pop()]:
            left[reader] -= 1
            if left[reader] == 0:
                free.append(reader)
    sources = upstream(wiring)
    stuck = {key for key, count in left.items() if count > 0}  # on a cycle, or after one
    found: list[list[str]] = []
    seen: set[str] = set()
    for start in wiring:
        path: list[str] = []
        key = start
        while key in stuck and key not in seen:
            seen.add(key)
            path.append(key)
            key = next(source for source in sources[key] if source in stuck)
        if key in path:
            found.append(path[path.index(key) :][::-1])
    return found
