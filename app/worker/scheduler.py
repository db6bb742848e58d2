"""Executes a compiled graph: the once-region, then one tick after another.

A tick runs its due nodes in the compiled order. A value is dropped after its last reader; the value of a node that
runs on every N-th tick only stays until the node runs again. At tick 0 the nodes with `baseline` run, with what they
read; there, the weights that a training node hands on are those that it was given.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.graph.compile import CompiledGraph, CompiledNode
from app.graph.errors import Cancelled, quoted, suggestion
from app.graph.model import Link
from app.graph.node import Node
from app.graph.widgets import Params, Value, parse_value
from app.storage.events import Event, Metric, NodeFinished, NodeStarted, TickFinished
from app.worker.cache import Observed, OutputCache, base_key, full_key
from app.worker.context import NodeContext
from app.worker.settings import CancelToken, Clock
from app.worker.state import copy_state
from app.worker.values import UnportableValueError, decode_value, encode_value

_logger = logging.getLogger(__name__)

_SAME_OBJECT = "same object"
"""What a checkpoint holds in place of an output that is an input handed on."""

_TIME_OF_CATEGORY = {"sampling": "rollout", "rewards": "reward"}
"""Metric names that differ from the category they sum up."""


class NodeFailure(Exception):  # noqa: N818 - it wraps the error, which says what is wrong
    """A node raised; `__cause__` is its error."""

    def __init__(self, node: CompiledNode, tick: int | None, error: BaseException) -> None:
        when = "" if tick is None else f" at tick {tick}"
        text = str(error).strip() or type(error).__name__
        if isinstance(error, KeyError | AttributeError | IndexError | AssertionError):
            text = f"{type(error).__name__}: {text}"
        # Many messages begin with the card's title, which stands in front already.
        text = text.removeprefix(f"{node.spec.title}: ")
        super().__init__(f"{node.title} ({node.id}){when}: {text}")
        self.node = node
        self.tick = tick


class RefusedChangeError(Exception):
    """A widget cannot be changed while the run goes on; the message says why."""


class Scheduler:
    """The nodes of one run and the values between them."""

    def __init__(
        self,
        graph: CompiledGraph,
        *,
        make_context: Callable[[CompiledNode, Observed], NodeContext],
        emit: Callable[[Event], None],
        cancel: CancelToken,
        clock: Clock,
        cache: OutputCache,
        device: str,
        run_facts: Mapping[str, Any],
    ) -> None:
        """Make the nodes; nothing runs yet.

        `run_facts` are what a cached output may depend on beside its inputs: seed and horizon.
        """
        self._graph = graph
        self._compiled = {node.id: node for node in graph.order}
        self._emit = emit
        self._cancel = cancel
        self._clock = clock
        self._cache = cache
        self._device = device
        self._run_facts = run_facts
        self._observed = {node.id: Observed() for node in graph.order}
        self._contexts = {
            node.id: make_context(node, self._observed[node.id]) for node in graph.order
        }
        self._nodes: dict[str, Node[Any]] = {
            node.id: node.spec.cls(node.params) for node in graph.order
        }
        self._opened: list[str] = []
        self._values: dict[str, tuple[Any, ...]] = {}
        self._keys: dict[str, str] = {}
        self._changed: dict[str, dict[str, Value]] = {}
        self._cacheable = _cacheable(graph)
        read = {link.node for node in graph.ticking for link in _all_links(node)}
        self._read_in_ticks = read
        self._held = [
            node
            for node in graph.ticking
            if not node.spec.source and node.every > 1 and node.id in read
        ]
        self._unheld = {node.id for node in graph.ticking} - {node.id for node in self._held}

    def run_once(self) -> None:
        """Run the once-region, then open the ticking nodes.

        Raises:
            Cancelled: the run was asked to stop.
            NodeFailure: a node raised.
        """
        early = [node for node in self._graph.order if not node.ticking or node.primed]
        last_readers = _last_readers(early)
        for node in early:
            self._cancel.check()
            key = self._cache_key(node)
            found = self._cache.find(key, {**self._run_facts, "node": node.id}) if key else None
            if found is not None:
                self._values[node.id], self._keys[node.id] = found
                self._emit(NodeStarted(node=node.id, title=node.title))
                self._emit(NodeFinished(node=node.id, title=node.title, seconds=0.0, cached=True))
            else:
                self._call(node, None)
                if key:
                    self._remember(node, key)
            done = {link.node for link in _all_links(node) if last_readers[link.node] == node.id}
            self._drop(done - self._read_in_ticks)
        for node in self._graph.ticking:
            self._open(node, None)

    def run_tick(self, tick: int, last: int, *, aside: Sequence[CompiledNode] = ()) -> None:
        """Run the due nodes of a tick; at tick 0 those with `baseline`. What `aside` will read is kept.

        Raises:
            Cancelled: the run was asked to stop; the state is that of the middle of the tick.
            NodeFailure: a node raised.
        """
        started = self._clock()
        due = [
            node
            for node in self._graph.ticking
            if (node.baseline if tick == 0 else node.runs_at(tick, last))
        ]
        last_readers = _last_readers([*due, *aside])
        spent: dict[str, float] = {}
        for node in due:
            self._cancel.check()
            name = time_metric(node)
            spent[name] = spent.get(name, 0.0) + self._call(node, tick)
            done = {link.node for link in _all_links(node) if last_readers[link.node] == node.id}
            self._drop(done & self._unheld)
        self._drop(self._unheld - {link.node for node in aside for link in _all_links(node)})
        for name, seconds in spent.items():
            self._emit(Metric(name=name, value=seconds, unit="s", tick=tick))
        total = self._clock() - started
        self._emit(Metric(name="time/tick", value=total, unit="s", tick=tick))
        peak = peak_memory(self._device)
        if peak is not None:
            self._emit(Metric(name="memory/peak", value=peak, unit="bytes", tick=tick))
        self._emit(TickFinished(tick=tick, total=last, seconds=total))

    @property
    def evaluating(self) -> list[CompiledNode]:
        """The nodes that look at training now and then: outputs with `every` that neither change a value nor save."""
        return [
            node
            for node in self._graph.ticking
            if node.spec.output
            and node.spec.param("every") is not None
            and not any(port.changes for port in node.spec.inputs)
            and not getattr(node.spec.cls, "sets_checkpoint_cadence", False)
        ]

    def aside(self, tick: int, last: int) -> list[CompiledNode]:
        """The evaluating nodes that are not due at the tick."""
        return [node for node in self.evaluating if not node.runs_at(tick, last)]

    def run_aside(self, tick: int, nodes: Sequence[CompiledNode]) -> None:
        """Run nodes out of their turn after a tick that was run with them as `aside`.

        Each runs as a fresh instance with a copy of the state, and what it returns is dropped: no later tick can tell
        that it ran. A value of a node that runs on every N-th tick only is the last one.

        Raises:
            Cancelled: the run was asked to stop.
            NodeFailure: a node raised.
        """
        import torch

        try:
            for node in nodes:
                self._cancel.check()
                # Nodes draw from generators of their own; one that does not must not move the others on.
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    self._call_aside(node, tick)
        finally:
            self._drop(self._unheld)

    def set_param(self, name: Any, param: Any, value: Any) -> tuple[CompiledNode, Value, Value]:
        """Change a live widget of a ticking node from its next call on; the node, the old and the new value.

        `name` is the node's id, or its title where only one has it; a text is read by the widget's type.

        Raises:
            RefusedChangeError: there is no such widget, it is not live, or the value does not fit.
        """
        node = self._named(name)
        label = f"{node.title} ({node.id})"
        spec = node.spec.param(str(param))
        if spec is None:
            known = [entry.name for entry in node.spec.params]
            msg = f"{label}: no widget named `{param}`. Widgets are {quoted(known)}.{suggestion(str(param), known)}"
            raise RefusedChangeError(msg)
        if not spec.field.live or not node.ticking:
            live = [entry.name for entry in node.spec.params if entry.field.live and node.ticking]
            can = f"those that can are {quoted(live)}" if live else "this card has none that can"
            msg = f"{label}: `{param}` cannot change while a run goes on; {can}."
            raise RefusedChangeError(msg)
        if spec.name in node.widget_links:
            msg = f"{label}: `{param}` is fed by a link, it cannot be set."
            raise RefusedChangeError(msg)
        instance = self._nodes[node.id]
        params: Params = instance.params
        try:
            read = parse_value(spec, value) if isinstance(value, str) else value
            new_params = replace(params, **{spec.name: read})  # type: ignore[type-var]
        except ValueError as error:
            msg = f"{label}: {error}"
            raise RefusedChangeError(msg) from error
        refusal = instance.refuse_live(new_params)
        if refusal is not None:
            msg = f"{label}: {refusal}"
            raise RefusedChangeError(msg)
        instance.params = new_params
        old, new = getattr(params, spec.name), getattr(new_params, spec.name)
        self._changed.setdefault(node.id, {})[spec.name] = new
        return node, old, new

    def _named(self, given: Any) -> CompiledNode:
        name = str(given)
        if name in self._compiled:
            return self._compiled[name]
        titled = [node for node in self._graph.order if node.title == name]
        if len(titled) == 1:
            return titled[0]
        if titled:
            ids = ", ".join(node.id for node in titled)
            msg = f"{len(titled)} nodes have the title `{name}`: {ids}. Name one of them by its id."
            raise RefusedChangeError(msg)
        known = ", ".join(f"{node.id} ({node.title})" for node in self._graph.order)
        hint = suggestion(name, [node.title for node in self._graph.order])
        msg = f"No node that runs has the id or title `{name}`. Nodes are {known}.{hint}"
        raise RefusedChangeError(msg)

    @property
    def has_baseline(self) -> bool:
        """Whether anything runs at tick 0."""
        return any(node.baseline for node in self._graph.ticking)

    def state(self) -> dict[str, Any]:
        """The state between two ticks; tensors in it are the nodes' own and will change.

        Raises:
            NodeFailure: a node raised.
            UnportableValueError: a value that a later tick reads cannot be written; see `portable_at`.
        """
        nodes = {}
        for node in self._graph.order:
            if node.id not in self._opened:
                continue
            try:
                node_state = self._nodes[node.id].state()
            except Exception as error:
                raise NodeFailure(node, None, error) from error
            if node_state:
                nodes[node.id] = node_state
        held = {
            node.id: [
                _SAME_OBJECT if node.spec.same_object(slot) else [encode_value(value)]
                for slot, value in enumerate(self._values[node.id])
            ]
            for node in self._held
            if node.id in self._values
        }
        changed = {node: dict(values) for node, values in self._changed.items()}
        return {"nodes": nodes, "held": held, **({"params": changed} if changed else {})}

    def portable_at(self, tick: int, last: int) -> bool:
        """Whether the state after `tick` can be written: no later reader needs a value that cannot.

        Where it cannot, forget nothing and ask again after the next tick.
        """
        for node in self._held:
            for slot, value in enumerate(self._values.get(node.id, ())):
                try:
                    if not node.spec.same_object(slot):
                        encode_value(value)
                except UnportableValueError:
                    # What is made anew at the next tick, or not read again, need not be kept.
                    if tick < last and not node.runs_at(tick + 1, last):
                        return False
                    self._drop({node.id})
                    break
        return True

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take a state back; called after `run_once`.

        Raises:
            NodeFailure: a node refuses its state.
        """
        for node in self._graph.order:
            if node.id in state.get("params", {}):
                self._changed[node.id] = dict(state["params"][node.id])
                self._nodes[node.id].params = node.params_with(self._changed[node.id])
            node_state = state["nodes"].get(node.id)
            if node_state is None:
                continue
            try:
                self._nodes[node.id].load_state(node_state)
            except Exception as error:
                raise NodeFailure(node, None, error) from error
        for node in self._held:
            if node.id in state["held"]:
                self._values[node.id] = tuple(
                    self._handed_on(node, slot) if tree == _SAME_OBJECT else decode_value(tree[0])
                    for slot, tree in enumerate(state["held"][node.id])
                )

    def close(self) -> None:
        """Close every node that was opened, the last one first; errors are logged, not raised."""
        for node_id in reversed(self._opened):
            try:
                self._nodes[node_id].close()
            except Exception:  # a failing close must not hide how the run ended
                _logger.exception("Node %s: close() raised.", node_id)
        self._opened = []
        self._values = {}

    def _open(self, node: CompiledNode, tick: int | None) -> None:
        if node.id in self._opened:
            return
        self._contexts[node.id].enter(tick)
        try:
            self._nodes[node.id].open(self._contexts[node.id])
        except Cancelled:
            raise
        except Exception as error:
            raise NodeFailure(node, tick, error) from error
        self._opened.append(node.id)

    def _call(self, node: CompiledNode, tick: int | None) -> float:
        """Run a node and keep its outputs; the seconds it took."""
        self._open(node, tick)
        instance, context = self._nodes[node.id], self._contexts[node.id]
        links = node.baseline_links if tick == 0 and node.baseline else node.links
        context.enter(tick)
        self._emit(NodeStarted(node=node.id, title=node.title, tick=tick))
        started = self._clock()
        try:
            self._values[node.id] = _as_outputs(node, self._run(node, instance, links))
        except Cancelled:
            raise
        except Exception as error:
            raise NodeFailure(node, tick, error) from error
        seconds = self._clock() - started
        context.report_artefacts()
        self._emit(NodeFinished(node=node.id, title=node.title, seconds=seconds, tick=tick))
        return seconds

    def _run(self, node: CompiledNode, instance: Node[Any], links: Mapping[str, Link]) -> Any:
        inputs = {name: self._value(link) for name, link in links.items()}
        if node.widget_links:
            linked = {name: self._value(link) for name, link in node.widget_links.items()}
            instance.params = node.params_with({**self._changed.get(node.id, {}), **linked})
        run: Callable[..., Any] = instance.run  # type: ignore[attr-defined]
        return run(self._contexts[node.id], **inputs)

    def _call_aside(self, node: CompiledNode, tick: int) -> None:
        context = self._contexts[node.id]
        context.enter(tick)
        self._emit(NodeStarted(node=node.id, title=node.title, tick=tick))
        started = self._clock()
        try:
            state = copy_state(self._nodes[node.id].state())
            instance = node.spec.cls(self._nodes[node.id].params)
            instance.open(context)
            try:
                if state:
                    instance.load_state(state)
                self._run(node, instance, node.links)
            finally:
                instance.close()
        except Cancelled:
            raise
        except Exception as error:
            raise NodeFailure(node, tick, error) from error
        context.report_artefacts()
        seconds = self._clock() - started
        self._emit(NodeFinished(node=node.id, title=node.title, seconds=seconds, tick=tick))

    def _value(self, link: Link) -> Any:
        """The value at an output; where its node did not run yet, the input that the node will hand on."""
        values = self._values.get(link.node)
        return (
            values[link.slot]
            if values is not None
            else self._handed_on(self._compiled[link.node], link.slot)
        )

    def _handed_on(self, node: CompiledNode, slot: int) -> Any:
        port = node.spec.same_object(slot)
        if port is None:
            msg = f"{node.title} ({node.id}) has no value yet at its output `{node.spec.outputs[slot].name}`"
            raise LookupError(msg)
        return self._value(node.links[port])

    def _drop(self, nodes: Iterable[str]) -> None:
        for node_id in nodes:
            self._values.pop(node_id, None)

    def _cache_key(self, node: CompiledNode) -> str | None:
        """The key under which outputs may be reused; None where the node takes no part."""
        if node.id not in self._cacheable or any(
            link.node not in self._keys for link in _all_links(node)
        ):
            return None
        links = {**node.links, **node.widget_links}
        return base_key(
            type_name=node.spec.type,
            version=node.spec.version,
            params={param.name: getattr(node.params, param.name) for param in node.spec.params},
            upstream={name: (self._keys[link.node], link.slot) for name, link in links.items()},
            device=self._device,
        )

    def _remember(self, node: CompiledNode, key: str) -> None:
        observed = self._observed[node.id]
        self._keys[node.id] = full_key(key, observed)
        # What a node reports belongs to the run: reusing the output would silently leave it out.
        if not observed.told:
            self._cache.keep(key, self._values[node.id], observed)


def time_metric(node: CompiledNode) -> str:
    """The metric that a node's seconds count towards, such as `time/rollout`."""
    if any(port.changes for port in node.spec.inputs):
        return "time/update"
    category = node.spec.category.partition("/")[0]
    return f"time/{_TIME_OF_CATEGORY.get(category, category)}"


def _all_links(node: CompiledNode) -> list[Link]:
    return [*node.links.values(), *node.widget_links.values(), *node.baseline_links.values()]


def _cacheable(graph: CompiledGraph) -> set[str]:
    """The nodes of the once-region whose outputs nobody changes and that keep and show nothing themselves."""
    changing = [
        (node, port.name)
        for node in graph.order
        for port in node.spec.inputs
        if port.changes and port.name in node.links
    ]
    changed = {node.links[port].node for node, port in changing}
    return {
        node.id
        for node in graph.once
        if node.spec.cacheable
        and not node.spec.output
        and node.id not in changed
        and not any(port.changes for port in node.spec.inputs)
        and node.spec.cls.state is Node.state
    }


def _last_readers(nodes: Iterable[CompiledNode]) -> dict[str, str]:
    """For each node that is read by these, in their order, the last reader."""
    return {link.node: node.id for node in nodes for link in _all_links(node)}


def _as_outputs(node: CompiledNode, outputs: Any) -> tuple[Any, ...]:
    expected = len(node.spec.outputs)
    given = () if outputs is None else outputs
    if not isinstance(given, tuple) or len(given) != expected:
        names = ", ".join(output.name for output in node.spec.outputs) or "nothing"
        msg = f"`run` returned {type(outputs).__name__}, expected Outputs({names})"
        raise TypeError(msg)
    return tuple(given)


def peak_memory(device: str) -> float | None:
    """The most bytes used so far: of the accelerator where there is one, else of the process; None if unknown."""
    import torch

    if device.startswith("cuda"):
        return float(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return None
    import sys

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(used if sys.platform == "darwin" else used * 1024)  # kilobytes but on macOS
