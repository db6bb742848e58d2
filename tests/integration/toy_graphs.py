"""Graphs of toy nodes, as API JSON and compiled, and ways to compare two runs."""

import copy
import csv
from pathlib import Path
from typing import Any

from app.graph import CompiledGraph, Graph, GraphNode, Link, Registry, compile_graph
from app.storage.runs import RunDirectory, RunRecord, create_run

TOY_NODES = Path(__file__).parent / "toy_nodes"

TRAINING: dict[str, Any] = {
    "1": {"class_type": "ToyPrompts", "inputs": {"iterations": 6, "seed": 3}},
    "2": {"class_type": "ToyLoader", "inputs": {"scale": 1.0}},
    "3": {"class_type": "ToySampler", "inputs": {"policy": ["2", 0], "batch": ["1", 0]}},
    "4": {"class_type": "ToyTrainer", "inputs": {"policy": ["2", 0], "rollout": ["3", 0]}},
    "5": {
        "class_type": "ToyEvaluate",
        "inputs": {"policy": ["4", 0], "prompts": ["1", 1], "every": 3, "baseline": True},
    },
    "6": {"class_type": "ToyRepeat", "inputs": {"stats": ["5", 0]}},
    "7": {"class_type": "ToySaver", "inputs": {"policy": ["4", 0], "every": 2}},
}
"""A whole training graph: source, loader, sampler, trainer, evaluation, a reader of a slower node, saver."""


def training(**inputs: dict[str, Any]) -> dict[str, Any]:
    """The training graph with inputs replaced by node id, as in `training(n1={"iterations": 9})`."""
    prompt = copy.deepcopy(TRAINING)
    for node, values in inputs.items():
        prompt[node.removeprefix("n")]["inputs"].update(values)
    return prompt


def toy_registry() -> Registry:
    """The toy nodes alone."""
    registry = Registry()
    registry.load_folder(TOY_NODES)
    if registry.failures:
        raise RuntimeError(registry.failures)
    return registry


def compiled(prompt: dict[str, Any], registry: Registry | None = None) -> CompiledGraph:
    """A prompt, ready to run."""
    nodes = {}
    for node_id, node in prompt.items():
        inputs = {
            name: Link(*value) if isinstance(value, list) else value
            for name, value in node["inputs"].items()
        }
        nodes[node_id] = GraphNode(id=node_id, type=node["class_type"], inputs=inputs)
    return compile_graph(Graph(nodes=nodes), registry or toy_registry())


def new_run(path: Path) -> RunDirectory:
    """An empty run directory."""
    return create_run(path, RunRecord(id=path.name, state="queued"), workflow={}, prompt={})


def numbers(run: Path) -> list[dict[str, str]]:
    """The table of a run without what depends on the clock and the machine."""
    with (run / "metrics.csv").open() as file:
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))}
            for row in csv.DictReader(file)
        ]


def last_state(run: Path) -> dict[str, bytes]:
    """The bytes of the newest checkpoint's files, by name, its manifest apart."""
    newest = sorted((run / "checkpoints").glob("tick-*"))[-1]
    return {
        path.name: path.read_bytes() for path in newest.iterdir() if path.name != "manifest.json"
    } | {"tick": newest.name.encode()}
