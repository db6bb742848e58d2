"""A run that is killed in the middle of a tick and resumed equals one that was left alone, bit for bit."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.storage.events import EventLine, read_events
from tests.integration.conftest import CommandLine
from tests.integration.toy_graphs import last_state, numbers, training

pytestmark = pytest.mark.timeout(400)

HELD = {"hold_at": 4}

STARTUP = 200.0
"""Seconds that a process may take to import torch on a busy machine."""


def wait_for(
    events: Path, seen: Callable[[EventLine], bool], process: subprocess.Popen[str]
) -> None:
    """Return once the run has written an event like that."""
    until = time.monotonic() + STARTUP
    while time.monotonic() < until:
        if events.is_file() and any(seen(line) for line in read_events(events, lambda _: None)):
            return
        if process.poll() is not None:
            raise AssertionError(process.communicate())
        time.sleep(0.1)
    raise TimeoutError(events)


def in_tick(tick: int) -> Callable[[EventLine], bool]:
    """The sampler is in the middle of that tick."""
    return lambda line: (
        line.type == "node_started" and line.tick == tick and line.data["node"] == "3"
    )


def test_killed_in_mid_tick_and_resumed_equals_uninterrupted(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training(n3=HELD))
    whole = cli("run", workflow, "--run-dir", "whole", "--threads", "1")
    assert whole.returncode == 0, whole.stderr

    cli.write("hold", "")
    victim = cli.start("run", workflow, "--run-dir", "cut", "--threads", "1")
    cut = cli.directory / "cut"
    wait_for(cut / "events.jsonl", in_tick(4), victim)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    victim.communicate()
    (cli.directory / "hold").unlink()
    assert json.loads((cut / "run.json").read_text())["state"] == "running"
    with (cut / "events.jsonl").open("a") as file:
        file.write('{"seq":99,"time":1.0,"run":"x","type":"metr')

    resumed = cli("run", "--resume", "--run-dir", "cut", "--json")
    assert resumed.returncode == 0, resumed.stderr
    report = json.loads(resumed.stdout)
    assert (report["state"], report["ticks"]) == ("finished", 6)
    lines = list(read_events(cut / "events.jsonl"))
    assert [line.tick for line in lines if line.type == "resumed"] == [2]
    assert [line.seq for line in lines] == list(range(1, len(lines) + 1))
    assert numbers(cut) == numbers(cli.directory / "whole")
    assert last_state(cut) == last_state(cli.directory / "whole")
    exported = (cut / "export" / "weights.txt").read_text()
    assert exported == (cli.directory / "whole" / "export" / "weights.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_the_last_complete_tick_and_exits_130(
    cli: CommandLine, number: signal.Signals
) -> None:
    workflow = cli.write("toy.json", training(n3=HELD, n7={"every": 100}))
    cli.write("hold", "")
    victim = cli.start("run", workflow, "--run-dir", "cut", "--json", "--threads", "1")
    cut = cli.directory / "cut"
    wait_for(cut / "events.jsonl", in_tick(4), victim)
    asked = time.monotonic()
    victim.send_signal(number)
    out, err = victim.communicate(timeout=60)
    assert time.monotonic() - asked < 20
    (cli.directory / "hold").unlink()
    assert victim.returncode == 130, err
    assert "Cancelling" in err
    assert "Traceback" not in err
    report = json.loads(out)
    assert (report["state"], report["ticks"]) == ("cancelled", 3)
    assert report["checkpoint"].endswith("checkpoints/tick-000003")

    resumed = cli("run", workflow, "--resume", "--run-dir", "cut")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == ""
    whole = cli("run", workflow, "--run-dir", "whole", "--threads", "1")
    assert whole.returncode == 0
    assert numbers(cut) == numbers(cli.directory / "whole")
    assert last_state(cut) == last_state(cli.directory / "whole")


def test_a_second_sigint_kills_even_a_node_that_does_not_listen(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training(n3={"hold_at": 1, "deaf": True}))
    cli.write("hold", "")
    victim = cli.start("run", workflow, "--run-dir", "cut")
    wait_for(cli.directory / "cut" / "events.jsonl", in_tick(1), victim)
    victim.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert victim.poll() is None
    started = time.monotonic()
    victim.send_signal(signal.SIGINT)
    _, err = victim.communicate(timeout=30)
    assert victim.returncode == 130
    assert time.monotonic() - started < 10
    assert err.endswith("Killed.\n")


def test_what_resume_refuses(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training(n1={"iterations": 2}))
    assert cli("run", workflow, "--run-dir", "runs/a").returncode == 0
    before = sorted(path.name for path in (cli.directory / "runs" / "a").iterdir())
    other = cli.write("other.json", training(n1={"iterations": 2}, n4={"rate": 0.1}))
    differs = cli("run", other, "--resume", "--run-dir", "runs/a")
    assert differs.returncode == 2
    assert "Toy Trainer (4): `rate` is 0.1, the run has 0.05." in differs.stderr
    few = cli("run", "--resume", "--run-dir", "runs/a", "--iterations", "1")
    assert few.returncode == 2
    assert "the run has done 2 ticks already" in few.stderr
    none = cli("run", "--resume", "no-such-run", "--runs-dir", "runs")
    assert none.returncode == 2
    assert "there is no such run" in none.stderr
    empty = cli("run", "--resume", "--run-dir", "nowhere")
    assert empty.returncode == 2
    assert "holds no run" in empty.stderr
    assert not (cli.directory / "nowhere").exists()
    assert sorted(path.name for path in (cli.directory / "runs" / "a").iterdir()) == before


def test_a_finished_run_goes_on_by_id_with_more_iterations(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training(n1={"iterations": 2}))
    first = cli("run", workflow, "--runs-dir", "all", "--json")
    run_id = json.loads(first.stdout)["run"]
    again = cli("run", "--resume", run_id[:8], "--runs-dir", "all", "--iterations", "3", "--json")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert (report["run"], report["ticks"], report["total_ticks"]) == (run_id, 3, 3)
    record = json.loads((cli.directory / "all" / run_id / "run.json").read_text())
    assert (record["total_ticks"], record["iterations"]) == (2, 3)


def test_a_run_whose_stderr_nobody_reads_any_more_is_still_cancelled_and_saved(
    cli: CommandLine,
) -> None:
    """`run ... 2>&1 | tee log` and Ctrl-C: tee is gone first."""
    workflow = cli.write("toy.json", training(n3=HELD, n7={"every": 100}))
    cli.write("hold", "")
    victim = cli.start("run", workflow, "--run-dir", "cut")
    cut = cli.directory / "cut"
    wait_for(cut / "events.jsonl", in_tick(4), victim)
    victim.stderr.close()
    victim.send_signal(signal.SIGINT)
    assert victim.wait(timeout=60) == 130
    assert json.loads((cut / "run.json").read_text())["state"] == "cancelled"
    assert [path.name for path in (cut / "checkpoints").iterdir()] == ["tick-000003"]


def test_a_full_disk_fails_the_run_with_a_sentence_and_room_lets_it_go_on(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training())
    script = (
        "import resource, sys; from app.cli import main; import app.worker.local\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); sys.exit(main(sys.argv[1:]))"
    )
    full = cli.start("run", workflow, "--run-dir", "a", script=script)
    _, err = full.communicate()
    assert full.returncode == 1, err
    assert "events.jsonl: cannot be written to (File too large). Free space and resume" in err
    assert "Traceback" not in err
    resumed = cli("run", "--resume", "--run-dir", "a", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["ticks"] == 6
    lines = list(read_events(cli.directory / "a" / "events.jsonl"))
    assert len({line.seq for line in lines}) == len(lines)


def test_an_edited_graph_is_not_gone_on_with(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training())
    assert cli("run", workflow, "--run-dir", "a", "--iterations", "2").returncode == 0
    stored = cli.directory / "a" / "prompt.json"
    stored.write_text(stored.read_text().replace('"scale": 1.0', '"scale": 2.0'))
    before = sorted(path.name for path in cli.directory.rglob("*"))
    done = cli("run", "--resume", "--run-dir", "a", "--iterations", "3")
    assert done.returncode == 2
    assert "prompt.json: was edited after the run was made" in done.stderr
    assert sorted(path.name for path in cli.directory.rglob("*")) == before
