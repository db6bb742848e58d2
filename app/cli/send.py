"""`send`: a command to a run that is going on, from another terminal."""

import argparse
import math
import time
from pathlib import Path
from typing import Any, Final

from app.cli.output import EXIT_FAILED, EXIT_OK, answer, complain, tell
from app.graph.edit import SetError, split_assignment
from app.paths import RUNS
from app.storage.commands import append_command
from app.storage.errors import StorageError
from app.storage.events import EventLine, decode_line
from app.storage.runs import HELD_STATES, RunDirectory, RunRecord, find_run, observed

_POLL_SECONDS: Final = 0.05
_ALIVE_SECONDS: Final = 0.5
"""How often the run's process is looked for while an answer is waited for."""


def add_command(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "send",
        help="send a command to a run that is going on",
        description="Send a command to a run that is going on and wait for its answer: cancel (twice: kill), pause, continue, "
        "save (a checkpoint between two ticks), evaluate or sample (the cards with `every`, after the next whole tick), "
        "set NODE.param=value (a live widget, from the next tick on).",
        epilog="Exit codes: 0 done, 1 refused or not answered in time, 2 no such run or it is not running.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run id, its beginning, or a run directory")
    add("name", metavar="COMMAND", help="cancel, pause, continue, save, evaluate, sample or set")
    add(
        "assignment",
        nargs="?",
        metavar="NODE.param=value",
        help="for set; NODE is an id, or a title that one node has",
    )
    add(
        "--wait",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for the answer (default 10)",
    )
    add(
        "--runs-dir",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help="directory of all runs (default: runs in the checkout)",
    )
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    if (options.name == "set") != (options.assignment is not None):
        return complain(
            "send: `set` takes NODE.param=value, such as 4.learning_rate=1e-4, and no other command does."
        )
    try:
        arguments = {}
        if options.assignment is not None:
            arguments = dict(
                zip(("node", "param", "value"), split_assignment(options.assignment), strict=True)
            )
        run = _find(options.runs_dir, options.run)
        record = observed(run.read_record())
        if record.state not in HELD_STATES:
            return complain(_not_running(run, record))
        seen = run.events_path.stat().st_size if run.events_path.is_file() else 0
        sent = append_command(run.commands_path, options.name, arguments)
    except (SetError, StorageError) as error:
        return complain(f"send: {error}")
    answered = _wait(run, sent.id, seen, options.wait)
    if answered is None:
        record = observed(run.read_record())
        if record.state not in HELD_STATES:
            tell(f"The run ended before it answered; it is {record.state}.")
        else:
            tell(
                f"No answer within {options.wait:g} s. The command stays in line: the run takes it at its next safe point."
            )
        return EXIT_FAILED
    outcome = str(answered.data["outcome"])
    answer(f"{outcome}: {answered.data['message']}")
    return EXIT_OK if outcome == "done" else EXIT_FAILED


def _find(runs: Path, name: str) -> RunDirectory:
    if (Path(name) / "run.json").is_file():
        return RunDirectory(Path(name).absolute())
    return find_run(runs, name)


def _not_running(run: RunDirectory, record: RunRecord) -> str:
    if record.state == "interrupted":
        text = "is interrupted: its process ended without saying so"
    else:
        text = f"is {record.state}"
    return (
        f"send: Run {record.id} {text}, and only a run that is going on takes commands. "
        f"Go on with: python3 launch.py run --resume --run-dir {run.path}"
    )


def _wait(run: RunDirectory, sent: str, offset: int, seconds: float) -> EventLine | None:
    """The event that acknowledges the command, among those after `offset`; None where none comes in time."""
    started = looked = time.monotonic()
    while True:
        # Looked for before the events are read: what a process wrote before its end is then not missed.
        gone = False
        if time.monotonic() - looked >= _ALIVE_SECONDS:
            looked = time.monotonic()
            gone = observed(run.read_record()).state not in HELD_STATES
        found, offset = _read(run.events_path, sent, offset)
        if found is not None or gone or time.monotonic() - started >= seconds:
            return found
        time.sleep(_POLL_SECONDS)


def _read(path: Path, sent: str, offset: int) -> tuple[EventLine | None, int]:
    """The acknowledgement among the whole lines after `offset`, and where the next reading begins."""
    if not path.is_file():
        return None, offset
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.splitlines():
        try:
            event = decode_line(line)
        except ValueError:
            continue
        if event.type == "command_done" and event.data["id"] == sent:
            return event, offset
    return None, offset + len(whole)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        msg = f"expected seconds, 0 or more, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return value
