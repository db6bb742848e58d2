import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import torch

from app.graph import Field, Node, Params, RunContext, params
from app.storage.commands import append_command
from app.storage.events import EventLine, read_events
from app.storage.runs import RunDirectory
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

SEEN = 0.6
"""Seconds in which the watcher has surely seen a line."""


@params
class NosyParams(Params):
    """When, and whether it fails out of its turn."""

    every: Annotated[int, Field(minimum=1)] = 3
    fail_at: Annotated[int, Field(minimum=0)] = 0


class Nosy(Node[NosyParams]):
    """Has a state and moves the global random numbers on: what an extra call must leave no trace of."""

    type = "Nosy"
    title = "Nosy"
    category = "evaluation"
    description = "Counts its calls."
    output = True

    class Outputs(NamedTuple):
        stats: UpdateStats

    def open(self, ctx: RunContext) -> None:
        self.calls = 0

    def state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]

    def run(self, ctx: RunContext, *, stats: UpdateStats) -> Outputs:
        if ctx.tick == self.params.fail_at:
            msg = "nosy broke"
            raise ValueError(msg)
        self.calls += 1
        torch.rand(3)
        ctx.metric("nosy/calls", self.calls)
        return self.Outputs(stats=UpdateStats(values={"distance": 0.0, "tick": float(ctx.tick)}))


class Lucky(Node):
    """Draws from the global random numbers at every tick."""

    type = "Lucky"
    title = "Lucky"
    category = "evaluation"
    description = "A random number."
    output = True

    def run(self, ctx: RunContext, *, stats: UpdateStats) -> None:
        ctx.metric("lucky", float(torch.rand(1)))


Sends = dict[tuple[str, int | None, str], list[tuple[str, dict[str, Any]]]]
"""By type, tick and state of an event: the commands that are sent when it is first seen."""


def in_tick(tick: int, *commands: Any) -> Sends:
    """Send in the middle of a tick."""
    pairs = [
        (command, {}) if isinstance(command, str) else (command[0], command[1])
        for command in commands
    ]
    return {("progress", tick, ""): pairs}


def run_toy(
    path: Path, prompt: dict, sends: Sends | None = None, *, resume: bool = False
) -> RunResult:
    run = RunDirectory(path) if resume else new_run(path)
    waiting = dict(sends or {})

    def watch(line: EventLine) -> None:
        commands = waiting.pop((line.type, line.tick, str(line.data.get("state", ""))), None)
        for name, arguments in commands or ():
            append_command(run.commands_path, name, arguments)
        if commands:
            time.sleep(SEEN)

    registry = toy_registry()
    registry.add(Nosy)
    registry.add(Lucky)
    return run_graph(
        compiled(prompt, registry),
        run,
        RunSettings(device="cpu", threads=1),
        resume=resume,
        on_event=watch,
        cancel=CancelToken(),
    )


def nosy_training(**inputs: dict[str, Any]) -> dict[str, Any]:
    prompt = training(**inputs)
    prompt["8"] = {"class_type": "Nosy", "inputs": {"stats": ["4", 1], "every": 3}}
    prompt["9"] = {"class_type": "Lucky", "inputs": {"stats": ["4", 1]}}
    prompt["10"] = {"class_type": "ToyRepeat", "inputs": {"stats": ["8", 0]}}
    return prompt


def answers(path: Path) -> list[tuple[str, str, str]]:
    return [
        (line.data["command"], line.data["outcome"], line.data["message"])
        for line in read_events(path / "events.jsonl")
        if line.type == "command_done"
    ]


def states(path: Path) -> list[str]:
    return [
        line.data["state"]
        for line in read_events(path / "events.jsonl")
        if line.type == "state_changed"
    ]


def test_pauses_saves_and_an_evaluation_leave_every_number_as_it_was(tmp_path: Path) -> None:
    draws = torch.get_rng_state()
    run_toy(tmp_path / "whole", nosy_training())
    torch.set_rng_state(draws)
    # Asked for in tick 3, where they run anyway; done after tick 4, where they do not.
    sends = (
        in_tick(2, "save", "pause")
        | in_tick(3, "evaluate", "sample")
        | {("state_changed", None, "paused"): [("evaluate", {}), ("save", {}), ("continue", {})]}
    )
    result = run_toy(tmp_path / "told", nosy_training(n7={"every": 5}), sends)
    assert result.state == "finished"
    told = answers(tmp_path / "told")
    assert [(command, outcome) for command, outcome, _ in told] == [
        ("save", "done"),
        ("pause", "done"),
        ("evaluate", "refused"),
        ("save", "done"),
        ("continue", "done"),
        ("evaluate", "done"),
        ("sample", "done"),
    ]
    assert told[0][2] == "The state after tick 2 is in checkpoints/tick-000002."
    assert told[5][2] == "After tick 4: Toy Evaluate (5), Nosy (8)."
    assert states(tmp_path / "told") == ["paused", "running", "saving"]
    folders = [path.name for path in sorted((tmp_path / "told" / "checkpoints").iterdir())]
    assert folders == ["tick-000002", "tick-000005", "tick-000006"]

    assert last_state(tmp_path / "told") == last_state(tmp_path / "whole")
    extra = {"eval/toy/mean", "nosy/calls"}
    for before, after in zip(numbers(tmp_path / "whole"), numbers(tmp_path / "told"), strict=True):
        changed = {name for name in before if before[name] != after[name]}
        assert changed == (extra if before["tick"] == "4" else set())


def test_a_run_without_such_cards_refuses_to_evaluate(tmp_path: Path) -> None:
    prompt = training()
    for node in ("5", "6"):
        del prompt[node]
    run_toy(tmp_path / "a", prompt, in_tick(2, "evaluate"))
    ((_, outcome, message),) = answers(tmp_path / "a")
    assert outcome == "refused"
    assert "No card of this graph evaluates" in message


def test_a_card_that_fails_out_of_its_turn_does_not_end_the_run(tmp_path: Path) -> None:
    prompt = nosy_training()
    prompt["8"]["inputs"]["fail_at"] = 2
    result = run_toy(tmp_path / "a", prompt, in_tick(1, "evaluate"))
    assert result.state == "finished"
    assert answers(tmp_path / "a") == [("evaluate", "failed", "Nosy (8) at tick 2: nosy broke")]


def test_a_live_widget_changes_at_the_next_tick_and_outlives_a_resume(tmp_path: Path) -> None:
    change = ("set", {"node": "Toy Trainer", "param": "rate", "value": "0.2"})
    run_toy(tmp_path / "plain", training())
    run_toy(tmp_path / "set", training(), in_tick(2, change))
    assert answers(tmp_path / "set") == [
        ("set", "done", "Toy Trainer (4): `rate` is 0.2 from tick 3 on; it was 0.05.")
    ]
    (event,) = [
        line for line in read_events(tmp_path / "set" / "events.jsonl") if line.type == "param_set"
    ]
    assert (event.data["node"], event.data["old"], event.data["new"], event.tick) == (
        "4",
        0.05,
        0.2,
        3,
    )
    plain, changed = numbers(tmp_path / "plain"), numbers(tmp_path / "set")
    # The loss of a tick is that of the weights before its step.
    assert plain[:3] == changed[:3]
    assert plain[4]["loss/policy"] != changed[4]["loss/policy"]

    stopped = run_toy(tmp_path / "cut", training(), in_tick(2, change) | in_tick(5, "cancel"))
    assert stopped.state == "cancelled"
    run_toy(tmp_path / "cut", training(), resume=True)
    assert numbers(tmp_path / "cut") == changed
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "set")
    # What was commanded before the resume is not done again.
    assert [command for command, _, _ in answers(tmp_path / "cut")] == ["set", "cancel"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"node": "5", "param": "every", "value": 1}, "this card has none that can"),
        ({"node": "4", "param": "rat", "value": 1}, "Did you mean `rate`?"),
        ({"node": "4", "param": "rate", "value": "-1"}, "expected 0.0 or more"),
        ({"node": "4", "param": "rate", "value": "fast"}, "`rate` is 'fast'"),
        ({"node": "Toy Trainr", "param": "rate", "value": 1}, "Did you mean `Toy Trainer`?"),
        ({"node": ["4"]}, "No node that runs has the id or title"),
    ],
)
def test_what_cannot_be_set_is_refused_and_changes_nothing(
    tmp_path: Path, arguments: dict[str, Any], sentence: str
) -> None:
    run_toy(tmp_path / "plain", training())
    result = run_toy(tmp_path / "a", training(), in_tick(2, ("set", arguments)))
    assert result.state == "finished"
    ((_, outcome, message),) = answers(tmp_path / "a")
    assert outcome == "refused"
    assert sentence in message
    assert last_state(tmp_path / "a") == last_state(tmp_path / "plain")


def test_unknown_late_and_needless_commands_are_refused(tmp_path: Path) -> None:
    sends = in_tick(2, "continue", "puase") | in_tick(6, "pause", "evaluate")
    result = run_toy(tmp_path / "a", training(), sends)
    assert result.state == "finished"
    told = answers(tmp_path / "a")
    assert {outcome for _, outcome, _ in told} == {"refused"}
    messages = {command: message for command, _, message in told}
    assert messages["puase"].endswith("Did you mean `pause`?")
    assert messages["continue"] == "The run is not paused."
    assert "it is finished" in messages["pause"]
    assert "it is finished" in messages["evaluate"]


def test_a_paused_run_is_cancelled_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    run_toy(tmp_path / "whole", training())
    sends = in_tick(3, "pause") | {("state_changed", None, "paused"): [("cancel", {})]}
    stopped = run_toy(tmp_path / "cut", training(), sends)
    assert (stopped.state, stopped.tick) == ("cancelled", 3)
    assert states(tmp_path / "cut") == ["paused", "saving"]
    run_toy(tmp_path / "cut", training(), resume=True)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "whole")
