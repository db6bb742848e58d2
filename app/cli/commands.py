"""The command line: what `launch.py` hands its arguments to."""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from app.cli import bench, check, run, send, testing
from app.cli.output import EXIT_CANCELLED, EXIT_FAILED, StdoutError, complain, drop, tell
from app.graph.errors import suggestion

NOT_THERE_YET: Final = {
    "reward-server": "reward-server: serving rewards over the network is not there yet.",
    "compare": "compare: comparing runs is not there yet; read metrics.csv in their run directories.",
    "reproduce": "reproduce: repeating a run is not there yet; start its prompt.json with `run`.",
}
"""Promised commands that are not written yet, and what to say of them."""

_STUDIO: Final = "The studio page is not there yet. Commands: run FILE, send RUN COMMAND, validate FILE..., nodes --json, convert FILE, bench NAME, test."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (0 done, 1 failed, 2 invalid input, 130 cancelled)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else ""
    if name in NOT_THERE_YET:
        return complain(NOT_THERE_YET[name])
    if name == "help":
        name, given = "--help", ["--help"]
    if not name or (name.startswith("-") and name not in ("-h", "--help")):
        return complain(_STUDIO)
    parser, known = _parser()
    if not name.startswith("-") and name not in known:
        names = ", ".join(known)
        return complain(
            f"No command is called {name!r}. Commands are {names}.{suggestion(name, known)}"
        )
    # These hand their arguments on, so that argparse must not look at them.
    handed_on: dict[str, Callable[[Sequence[str]], int]] = {
        "bench": bench.command,
        "test": testing.command,
    }
    try:
        if name in handed_on:
            return handed_on[name](given[1:])
        with _interrupted_at_once():
            options = parser.parse_args(given)
            code: int = options.command(options)
    except SystemExit as stop:  # argparse has said on stderr what is wrong
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        tell("Cancelled.")
        return EXIT_CANCELLED
    except BrokenPipeError:
        # The reader of stdout has gone, as with `| head`: nothing is left to say to it.
        drop(sys.stdout)
        return EXIT_CANCELLED
    except StdoutError as error:
        drop(sys.stdout)
        tell(f"stdout cannot be written to ({error}). Free space or send it elsewhere.")
        return EXIT_FAILED
    return code


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process on the spot, until a run that has something to save handles it itself.

    Most of a command's time goes into importing native libraries, out of which Python's own exception can come as
    anything, a RecursionError among others.
    """

    def leave(_number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            os.write(2, b"\nCancelled.\n")
        os._exit(EXIT_CANCELLED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _parser() -> tuple[argparse.ArgumentParser, tuple[str, ...]]:
    """The parser, and the names of all commands."""
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="JAGG Studio: reinforcement learning of diffusion transformers, drawn as a graph.",
        epilog="Exit codes: 0 done, 1 failed, 2 invalid input, 130 cancelled. Only results go to stdout.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run.add_command(commands)
    send.add_command(commands)
    check.add_commands(commands)
    commands.add_parser("bench", help="run a benchmark: bench NAME --json", add_help=False)
    commands.add_parser(
        "test", help="run the tests: test [--full] [pytest arguments]", add_help=False
    )
    for name, sentence in NOT_THERE_YET.items():
        commands.add_parser(name, help=sentence.partition(": ")[2])
    return parser, tuple(commands.choices)
