import math
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest
import torch

from app.graph import Field, Node, Params, RunContext, params
from app.storage.errors import StorageError
from app.storage.events import EventLine, read_events
from app.storage.runs import RunDirectory
from app.worker import local
from app.worker.local import RunResult, run_graph
from app.worker.settings import CancelToken, RunSettings
from jagg.values import UpdateStats
from tests.integration.toy_graphs import (
    compiled,
    last_state,
    new_run,
    numbers,
    toy_registry,
    training,
)


class Thing:
    """A value that no checkpoint can hold."""

    def __init__(self, number: float) -> None:
        self.number = number


@params
class SlowParams(Params):
    every: Annotated[int, Field(minimum=1)] = 3


class Slow(Node[SlowParams]):
    type = "Slow"
    title = "Slow"
    category = "evaluation"
    description = "Makes a thing now and then."

    class Outputs(NamedTuple):
        thing: Thing

    def run(self, ctx: RunContext, *, stats: UpdateStats) -> Outputs:
        return self.Outputs(thing=Thing(stats.values["loss"]))


class Read(Node):
    type = "Read"
    title = "Read"
    category = "evaluation"
    description = "Reports the thing at every tick."
    output = True

    def run(self, ctx: RunContext, *, thing: Thing, stats: UpdateStats) -> None:
        ctx.metric("thing", thing.number)


SETTINGS = RunSettings(device="cpu", threads=1)


def run_toy(
    path: Path,
    prompt: dict,
    *,
    resume: bool = False,
    iterations: int | None = None,
    stop_at: tuple[str, int] | None = None,
    settings: RunSettings = SETTINGS,
) -> RunResult:
    """Run a toy graph; `stop_at` asks to stop when the first event of that type and tick is seen."""
    token = CancelToken()

    def watch(line: EventLine) -> None:
        if stop_at is not None and (line.type, line.tick) == stop_at:
            token.request()

    run = RunDirectory(path) if resume else new_run(path)
    registry = toy_registry()
    registry.add(Slow)
    registry.add(Read)
    return run_graph(
        compiled(prompt, registry),
        run,
        settings,
        resume=resume,
        iterations=iterations,
        on_event=watch,
        cancel=token,
    )


def test_a_run_leaves_record_table_checkpoints_and_files(tmp_path: Path) -> None:
    result = run_toy(tmp_path / "a", training())
    assert (result.state, result.tick, result.total_ticks, result.error) == ("finished", 6, 6, None)
    assert result.checkpoint == "checkpoints/tick-000006"
    record = result.run.read_record()
    assert (record.state, record.tick, record.total_ticks, record.seed) == ("finished", 6, 6, 3)
    assert record.settings["threads"] == 1
    assert "torch" in record.versions
    names = [path.name for path in sorted((tmp_path / "a" / "checkpoints").iterdir())]
    assert names == ["tick-000002", "tick-000004", "tick-000006"]
    assert (tmp_path / "a" / "export" / "weights.txt").is_file()
    assert (tmp_path / "a" / "samples" / "tick-000006" / "3-1.png").read_bytes()[1:4] == b"PNG"


def test_rates_baseline_and_last_values(tmp_path: Path) -> None:
    run_toy(tmp_path / "a", training())
    rows = {int(row["tick"]): row for row in numbers(tmp_path / "a")}
    assert sorted(rows) == [0, 1, 2, 3, 4, 5, 6]
    evaluated = [tick for tick, row in rows.items() if row["eval/toy/mean"]]
    assert evaluated == [0, 3, 6]
    assert [rows[tick]["repeat/tick"] for tick in range(1, 7)] == [
        "0.0",
        "0.0",
        "3.0",
        "3.0",
        "3.0",
        "6.0",
    ]
    assert float(rows[6]["eval/toy/mean"]) > float(rows[0]["eval/toy/mean"])


def test_tick_zero_is_the_state_before_training(tmp_path: Path) -> None:
    run_toy(tmp_path / "a", training())
    prompt = training(n1={"iterations": 1}, n4={"rate": 0.0})
    run_toy(tmp_path / "still", prompt)
    before = {row["tick"]: row["eval/toy/mean"] for row in numbers(tmp_path / "a")}["0"]
    rows = {row["tick"]: row["eval/toy/mean"] for row in numbers(tmp_path / "still")}
    assert rows == {"0": before, "1": before}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run_toy(tmp_path / name, training(n1={"seed": seed}))
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b") != numbers(tmp_path / "c")
    assert last_state(tmp_path / "a") == last_state(tmp_path / "b") != last_state(tmp_path / "c")


@pytest.mark.parametrize(
    ("stop_at", "tick"),
    [
        (("node_started", 5), 4),
        (("progress", 5), 4),
        (("tick_finished", 5), 5),
        (("progress", 1), 0),
    ],
)
def test_a_cancelled_run_resumes_to_the_same_bytes(
    tmp_path: Path, stop_at: tuple[str, int], tick: int
) -> None:
    run_toy(tmp_path / "whole", training())
    stopped = run_toy(tmp_path / "cut", training(), stop_at=stop_at)
    assert (stopped.state, stopped.tick) == ("cancelled", tick)
    assert stopped.checkpoint == f"checkpoints/tick-{tick:06d}"
    assert stopped.run.read_record().state == "cancelled"
    assert max(int(row["tick"]) for row in numbers(tmp_path / "cut")) == tick
    states = [
        line.data["state"]
        for line in read_events(stopped.run.events_path)
        if line.type == "state_changed"
    ]
    assert states == ["saving"]

    resumed = run_toy(tmp_path / "cut", training(), resume=True)
    assert (resumed.state, resumed.tick) == ("finished", 6)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "whole")
    exported = (tmp_path / "cut" / "export" / "weights.txt").read_text()
    assert exported == (tmp_path / "whole" / "export" / "weights.txt").read_text()


def test_a_run_resumes_twice_from_where_it_was_and_numbers_its_events_on(tmp_path: Path) -> None:
    run_toy(tmp_path / "whole", training())
    run_toy(tmp_path / "cut", training(), stop_at=("progress", 3))
    run_toy(tmp_path / "cut", training(), resume=True, stop_at=("progress", 5))
    run_toy(tmp_path / "cut", training(), resume=True)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    lines = list(read_events(tmp_path / "cut" / "events.jsonl"))
    assert [line.seq for line in lines] == list(range(1, len(lines) + 1))
    assert [line.tick for line in lines if line.type == "resumed"] == [2, 4]


def test_a_torn_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run_toy(tmp_path / "whole", training())
    run_toy(tmp_path / "cut", training(), stop_at=("progress", 6))
    newest = tmp_path / "cut" / "checkpoints" / "tick-000005" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    run_toy(tmp_path / "cut", training(), resume=True)
    lines = list(read_events(tmp_path / "cut" / "events.jsonl"))
    assert [line.tick for line in lines if line.type == "resumed"] == [4]
    assert any("tick-000005" in line.data["message"] for line in lines if line.type == "notice")
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "whole")


def test_more_iterations_keep_the_old_horizon(tmp_path: Path) -> None:
    run_toy(tmp_path / "a", training(n1={"iterations": 4}))
    result = run_toy(tmp_path / "a", training(n1={"iterations": 4}), resume=True, iterations=6)
    assert (result.state, result.tick) == ("finished", 6)
    record = result.run.read_record()
    assert (record.total_ticks, record.iterations) == (4, 6)
    # The toy's rate falls to 0 at the horizon: after tick 4 + 1 it is 0 and then negative, never that of a new horizon.
    rows = {
        int(row["tick"]): float(row["loss/policy"])
        for row in numbers(tmp_path / "a")
        if row["loss/policy"]
    }
    run_toy(tmp_path / "b", training(n1={"iterations": 6}))
    other = {
        int(row["tick"]): float(row["loss/policy"])
        for row in numbers(tmp_path / "b")
        if row["loss/policy"]
    }
    assert rows[6] != other[6]


def test_a_failing_node_is_named_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    result = run_toy(tmp_path / "a", training(n3={"fail_at": 4}))
    assert result.state == "failed"
    assert result.error == "Toy Sampler (3) at tick 4: the toy broke"
    log = (tmp_path / "a" / "log.txt").read_text()
    assert "Traceback" in log
    assert "toy.py" in log
    failed = list(read_events(tmp_path / "a" / "events.jsonl"))[-1]
    assert failed.type == "failed"
    assert (failed.data["node"], failed.data["title"], failed.tick) == ("3", "Toy Sampler", 4)
    assert result.run.read_record().error == result.error
    assert result.checkpoint == "checkpoints/tick-000003"


def test_a_failed_run_goes_on_when_its_cause_is_gone(tmp_path: Path) -> None:
    run_toy(tmp_path / "whole", training())
    run_toy(tmp_path / "cut", training(n3={"fail_at": 4}))
    run_toy(tmp_path / "cut", training(), resume=True)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "whole")


def test_resume_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    run_toy(tmp_path / "whole", training())
    run_toy(tmp_path / "cut", training(), stop_at=("node_started", None))
    run_toy(tmp_path / "cut", training(), resume=True)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_a_changed_thread_count_is_a_warning_and_the_recorded_one_returns(tmp_path: Path) -> None:
    run_toy(tmp_path / "a", training(), stop_at=("progress", 3))
    unset = RunSettings(device="cpu")
    before = torch.get_num_threads()
    run_toy(tmp_path / "a", training(), resume=True, stop_at=("progress", 4), settings=unset)
    assert RunDirectory(tmp_path / "a").read_record().settings["threads"] == 1
    assert not [
        line for line in read_events(tmp_path / "a" / "events.jsonl") if line.type == "notice"
    ]
    run_toy(tmp_path / "a", training(), resume=True, settings=RunSettings(device="cpu", threads=2))
    notices = [
        line.data["message"]
        for line in read_events(tmp_path / "a" / "events.jsonl")
        if line.type == "notice"
    ]
    assert len(notices) == 1
    assert "used 1 threads so far and goes on with 2" in notices[0]
    assert torch.get_num_threads() == before


def test_a_run_that_another_holds_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    with run.lock(), pytest.raises(StorageError, match="another process is running it"):
        run_graph(compiled(training()), run, SETTINGS)


def test_retention_and_cadence_come_from_the_saver_or_the_settings(tmp_path: Path) -> None:
    run_toy(tmp_path / "a", training(n7={"every": 1, "keep": 2}))
    assert len(list((tmp_path / "a" / "checkpoints").iterdir())) == 2
    prompt = training()
    del prompt["7"]
    settings = RunSettings(device="cpu", threads=1, checkpoint_every=5, checkpoint_keep=0)
    run_toy(tmp_path / "b", prompt, settings=settings)
    names = [path.name for path in sorted((tmp_path / "b" / "checkpoints").iterdir())]
    assert names == ["tick-000005", "tick-000006"]


def test_times_and_memory_are_reported_every_tick(tmp_path: Path) -> None:
    run_toy(tmp_path / "a", training())
    lines = [
        line
        for line in read_events(tmp_path / "a" / "events.jsonl")
        if line.type == "metric" and line.tick == 3
    ]
    names = {line.data["name"] for line in lines}
    assert {"time/rollout", "time/update", "time/evaluation", "time/tick", "memory/peak"} <= names
    assert all(math.isfinite(line.data["value"]) for line in lines)


def test_a_graph_without_a_clock_runs_once(tmp_path: Path) -> None:
    prompt = {
        "1": {"class_type": "ToyLoader", "inputs": {}},
        "2": {"class_type": "ToySaver", "inputs": {"policy": ["1", 0]}},
    }
    result = run_toy(tmp_path / "a", prompt)
    assert (result.state, result.tick, result.total_ticks) == ("finished", 0, 0)
    assert (tmp_path / "a" / "export" / "weights.txt").is_file()


def test_a_checkpoint_waits_while_a_value_that_cannot_be_written_is_needed(tmp_path: Path) -> None:
    prompt = training(n1={"iterations": 8})
    for node in ("5", "6", "7"):
        del prompt[node]
    prompt["8"] = {"class_type": "Slow", "inputs": {"stats": ["4", 1]}}
    prompt["9"] = {"class_type": "Read", "inputs": {"thing": ["8", 0], "stats": ["4", 1]}}
    settings = RunSettings(device="cpu", threads=1, checkpoint_every=2, checkpoint_keep=0)
    run_toy(tmp_path / "whole", prompt, settings=settings)
    names = [path.name for path in sorted((tmp_path / "whole" / "checkpoints").iterdir())]
    # The thing is made at ticks 1, 3, 6 and 8: only just before is it not needed.
    assert names == ["tick-000002", "tick-000005", "tick-000007", "tick-000008"]
    stopped = run_toy(tmp_path / "cut", prompt, stop_at=("progress", 5), settings=settings)
    assert stopped.checkpoint == "checkpoints/tick-000002"
    notices = [
        line.data["message"]
        for line in read_events(tmp_path / "cut" / "events.jsonl")
        if line.type == "notice"
    ]
    assert notices == ["The state after tick 4 was not kept: a resume goes on after tick 2."]
    run_toy(tmp_path / "cut", prompt, resume=True, settings=settings)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "whole")


def test_a_state_too_large_to_copy_goes_back_to_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_toy(tmp_path / "whole", training())
    monkeypatch.setattr(local, "_COPIED_BYTES", 0)
    stopped = run_toy(tmp_path / "cut", training(), stop_at=("progress", 4))
    assert (stopped.tick, stopped.checkpoint) == (3, "checkpoints/tick-000002")
    again = run_toy(tmp_path / "cut", training(), resume=True, stop_at=("tick_finished", 3))
    assert again.checkpoint == "checkpoints/tick-000003"
    run_toy(tmp_path / "cut", training(), resume=True)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "whole")


def test_a_resume_that_cannot_load_keeps_the_tick_and_the_table(tmp_path: Path) -> None:
    run_toy(tmp_path / "a", training())
    run = RunDirectory(tmp_path / "a")
    table = run.metrics_path.read_text()
    run.workflow_path.unlink()
    result = run_graph(
        compiled(training(), toy_registry()), run, RunSettings(threads=1), resume=True
    )
    assert (result.state, result.tick) == ("failed", 6)
    assert run.read_record().tick == 6
    assert run.metrics_path.read_text() == table
