"""The sampling and scoring half of a training workflow, for benchmarks that do the update themselves."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.graph import Node, load_registry
from app.graph.compile import CompiledGraph, CompiledNode, compile_graph
from app.graph.model import Link
from app.graph.workflow import read_workflow
from app.paths import INPUT_ROOTS, WORKFLOWS
from app.storage.runs import RunDirectory
from app.worker.cache import Observed
from app.worker.context import NodeContext, make_accelerator
from app.worker.settings import CancelToken
from jagg.policy import Policy
from jagg.randomness import GeneratorFactory, generator_factory
from jagg.values import Reward, Rollout

_OPTIMIZER = "GRPOJAGGOptimizer"


@dataclass(kw_only=True, slots=True)
class TrainingGraph:
    """A policy with what draws and scores its rollouts; nothing here trains it."""

    policy: Policy
    optimizer_params: Any
    """The optimizer card's widgets."""
    generator: GeneratorFactory
    compiled: CompiledGraph
    optimizer: CompiledNode
    nodes: dict[str, Node[Any]]
    contexts: dict[str, NodeContext]
    values: dict[str, tuple[Any, ...]]

    def draw(self, tick: int) -> tuple[Rollout, Reward]:
        """The rollout and reward of a tick, with the weights as they are."""
        needed = _upstream(self.compiled, self.optimizer)
        for node in self.compiled.ticking:
            if node.id in needed:
                self._call(node, tick)
        inputs = self.optimizer.links
        return self._value(inputs["rollout"]), self._value(inputs["reward"])

    def _call(self, node: CompiledNode, tick: int | None) -> None:
        context, instance = self.contexts[node.id], self.nodes[node.id]
        context.enter(tick)
        run = instance.run  # type: ignore[attr-defined]  # every node class has one; its ports differ
        self.values[node.id] = run(
            context, **{name: self._value(link) for name, link in node.links.items()}
        )

    def _value(self, link: Link) -> Any:
        return self.values[link.node][link.slot]


def load_training_graph(workflow: str, folder: Path) -> TrainingGraph:
    """The shipped workflow of that file name with its once-region run; files that nodes write go to `folder`.

    Raises:
        GraphError: the workflow does not compile.
        LookupError: it has no GRPO + JAGG optimizer.
    """
    registry = load_registry()
    compiled = compile_graph(read_workflow(WORKFLOWS / workflow, registry).graph, registry)
    optimizer = next((n for n in compiled.order if n.spec.type == _OPTIMIZER), None)
    if optimizer is None:
        msg = f"{workflow} has no {_OPTIMIZER} card."
        raise LookupError(msg)
    accelerator = make_accelerator(cpu=True)
    contexts = {
        node.id: NodeContext(
            node=node.id,
            seed=compiled.seed,
            total_ticks=compiled.iterations,
            accelerator=accelerator,
            run=RunDirectory(folder),
            emit=lambda event: None,  # noqa: ARG005  nobody watches a benchmark
            cancel=CancelToken(),
            clock=time.monotonic,
            input_roots=INPUT_ROOTS,
            metadata={},
            observed=Observed(),
        )
        for node in compiled.order
    }
    graph = TrainingGraph(
        policy=None,  # type: ignore[arg-type]  # known once the once-region has run, three lines below
        optimizer_params=optimizer.params,
        generator=generator_factory(compiled.seed, optimizer.id),
        compiled=compiled,
        optimizer=optimizer,
        nodes={node.id: node.spec.cls(node.params) for node in compiled.order},
        contexts=contexts,
        values={},
    )
    needed = _upstream(compiled, optimizer)
    for node in compiled.order:
        if node.id in needed:
            contexts[node.id].enter(None)
            graph.nodes[node.id].open(contexts[node.id])
            if not node.ticking:
                graph._call(node, None)
    graph.policy = graph._value(optimizer.links["policy"])
    return graph


def _upstream(compiled: CompiledGraph, node: CompiledNode) -> set[str]:
    """Ids of the nodes that a node reads, directly or through others."""
    found: set[str] = set()
    waiting = [link.node for link in node.links.values()]
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting.extend(link.node for link in compiled.node(key).links.values())
    return found
