from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch

from app.graph import Changes, Field, Node, Params, Registry, RunContext, params
from app.storage.events import read_events
from app.worker.cache import OutputCache
from app.worker.local import RunResult, run_graph
from app.worker.settings import RunSettings
from tests.integration.toy_graphs import compiled, new_run


class Table:
    """A value made of a file."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = torch.tensor(numbers)


@params
class ReadParams(Params):
    scale: Annotated[float, Field(minimum=0.0)] = 1.0


class Read(Node[ReadParams]):
    type = "Read"
    title = "Read"
    category = "models"
    description = "Reads a file."
    runs: ClassVar[list[str]] = []

    class Outputs(NamedTuple):
        table: Table

    def run(self, ctx: RunContext) -> Outputs:
        Read.runs.append(ctx.node)
        text = ctx.resolve("input", "numbers.txt").read_text()
        return self.Outputs(table=Table([self.params.scale * float(word) for word in text.split()]))


class Noise(Node):
    type = "Noise"
    title = "Noise"
    category = "models"
    description = "Draws."
    runs: ClassVar[list[str]] = []

    class Outputs(NamedTuple):
        table: Table

    def run(self, ctx: RunContext, *, table: Table) -> Outputs:
        Noise.runs.append(ctx.node)
        drawn = torch.randn(3, generator=ctx.generator("noise"))
        return self.Outputs(table=Table((table.numbers.sum() + drawn).tolist()))


class Change(Node):
    type = "Change"
    title = "Change"
    category = "models"
    description = "Changes in place."

    class Outputs(NamedTuple):
        table: Table

    def run(self, ctx: RunContext, *, table: Annotated[Table, Changes()]) -> Outputs:
        table.numbers += 1
        return self.Outputs(table=table)


class Write(Node):
    type = "Write"
    title = "Write"
    category = "models"
    description = "Writes."
    output = True

    def run(self, ctx: RunContext, *, table: Table) -> None:
        ctx.artefact("export/numbers.txt").write_text(repr(table.numbers.tolist()))


def graph(scale: float = 1.0, *, change: bool = False) -> dict[str, Any]:
    prompt: dict[str, Any] = {
        "1": {"class_type": "Read", "inputs": {"scale": scale}},
        "2": {"class_type": "Noise", "inputs": {"table": ["1", 0]}},
        "4": {"class_type": "Write", "inputs": {"table": ["2", 0]}},
    }
    if change:
        prompt["3"] = {"class_type": "Change", "inputs": {"table": ["2", 0]}}
        prompt["4"]["inputs"]["table"] = ["3", 0]
    return prompt


class Bench:
    """Runs graphs that share a cache and counts what was really run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = OutputCache()
        self.count = 0
        registry = Registry()
        for cls in (Read, Noise, Change, Write):
            registry.add(cls)
        self.registry = registry
        (folder / "numbers.txt").write_text("1 2 3")

    def __call__(
        self, prompt: dict[str, Any], cache: OutputCache | None = None
    ) -> tuple[str, list[str]]:
        """What the run wrote, and the nodes that were run for it."""
        self.count += 1
        Read.runs.clear()
        Noise.runs.clear()
        result: RunResult = run_graph(
            compiled(prompt, self.registry),
            new_run(self.folder / f"run-{self.count}"),
            RunSettings(device="cpu", threads=1, input_roots={"input": self.folder}),
            cache=cache or self.cache,
        )
        assert result.state == "finished", result.error
        return (result.run.path / "export" / "numbers.txt").read_text(), [*Read.runs, *Noise.runs]


def test_a_warm_run_equals_a_cold_one_and_runs_nothing_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    cold, ran = bench(graph())
    assert ran == ["1", "2"]
    warm, ran = bench(graph())
    assert ran == []
    assert warm == cold == bench(graph(), OutputCache())[0]
    finished = [
        line
        for line in read_events(tmp_path / "run-2" / "events.jsonl")
        if line.type == "node_finished"
    ]
    assert [line.data["cached"] for line in finished] == [True, True, False]


def test_another_value_or_another_content_of_a_file_runs_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, _ = bench(graph())
    scaled, ran = bench(graph(2.0))
    assert ran == ["1", "2"]
    assert scaled != first
    (tmp_path / "numbers.txt").write_text("4 5 6")
    changed, ran = bench(graph())
    assert ran == ["1", "2"]
    assert changed != first
    (tmp_path / "numbers.txt").write_text("1 2 3")
    again, ran = bench(graph())
    assert (again, ran) == (first, [])


def test_what_a_node_changes_is_made_anew_each_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    cold, _ = bench(graph(change=True))
    warm, ran = bench(graph(change=True))
    assert ran == ["2"]
    assert warm == cold
