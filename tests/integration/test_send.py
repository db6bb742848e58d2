"""Commands from one process to a run in another one."""

import json
import time
from pathlib import Path

import pytest

from app.storage.runs import list_runs
from tests.integration.conftest import CommandLine
from tests.integration.test_resume import HELD, in_tick, wait_for
from tests.integration.toy_graphs import last_state, numbers, training

pytestmark = pytest.mark.timeout(400)


def test_a_run_that_is_paused_saved_and_continued_ends_as_if_left_alone(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training(n3=HELD, n7={"every": 100}))
    whole = cli("run", workflow, "--run-dir", "whole", "--threads", "1")
    assert whole.returncode == 0, whole.stderr
    cli.write("hold", "")
    other = cli.start("run", workflow, "--run-dir", "told", "--threads", "1")
    told = cli.directory / "told"
    wait_for(told / "events.jsonl", in_tick(4), other)

    early = cli("send", "told", "pause", "--wait", "0.3")
    assert (early.returncode, early.stdout) == (1, "")
    assert "No answer within 0.3 s" in early.stderr
    (cli.directory / "hold").unlink()
    saved = cli("send", "told", "save", "--wait", "60")
    assert saved.returncode == 0, saved.stderr
    assert saved.stdout == "done: The state after tick 4 is in checkpoints/tick-000004.\n"
    assert json.loads((told / "run.json").read_text())["state"] == "paused"
    assert (told / "checkpoints" / "tick-000004").is_dir()
    typo = cli("send", "told", "contineu", "--wait", "60")
    assert typo.returncode == 1
    assert "Did you mean `continue`?" in typo.stdout
    frozen = cli("send", "told", "set", "4.every=2", "--wait", "60")
    assert frozen.returncode == 1
    assert "no widget named `every`" in frozen.stdout
    assert cli("send", "told", "continue", "--wait", "60").returncode == 0
    out, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
    assert out == ""
    assert numbers(told) == numbers(cli.directory / "whole")
    assert last_state(told) == last_state(cli.directory / "whole")

    for arguments, sentence in (
        (("told", "pause"), "is finished"),
        (("nowhere", "pause"), "there is no such run"),
        (("told", "set"), "takes NODE.param=value"),
        (("told", "set", "rate"), "expected NODE.param=value"),
        (("told", "pause", "4.rate=1"), "no other command does"),
    ):
        refused = cli("send", *arguments, "--runs-dir", "all")
        assert refused.returncode == 2, arguments
        assert sentence in refused.stderr


def test_a_second_cancel_kills_and_the_run_shows_as_interrupted(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training(n3={"hold_at": 1, "deaf": True}))
    cli.write("hold", "")
    victim = cli.start("run", workflow, "--run-dir", "all/cut")
    cut = Path("all") / "cut"
    wait_for(cut / "events.jsonl", in_tick(1), victim)
    started = time.monotonic()
    first = cli("send", str(cut), "cancel", "--wait", "60")
    assert first.returncode == 0, first.stderr
    assert "a second `cancel` kills it" in first.stdout
    assert victim.poll() is None
    second = cli("send", str(cut), "cancel", "--wait", "60")
    assert second.returncode == 0, second.stderr
    assert victim.wait(timeout=30) == 130
    assert time.monotonic() - started < 30
    ((_, record),) = list_runs(Path("all"))
    assert record.state == "interrupted"
    refused = cli("send", record.id[:8], "pause", "--runs-dir", "all")
    assert refused.returncode == 2
    assert "is interrupted" in refused.stderr
