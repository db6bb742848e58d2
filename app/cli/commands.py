"""The command line: what `launch.py` hands its arguments to."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from app.cli import bench, check, run, testing
from app.cli.output import EXIT_CANCELLED, EXIT_FAILED, StdoutError, complain, drop, tell

NOT_THERE_YET: Final = {
    "reward-server": "reward-server: serving rewards over the network is not there yet.",
    "compare": "compare: comparing runs is not there yet; read metrics.csv in their run directories.",
    "reproduce": "reproduce: repeating a run is not there yet; start its prompt.json with `run`.",
}
"""Promised commands that are not written yet, and what to say of them."""

_STUDIO: Final = "The studio page is not there yet. Commands: run FILE, validate FILE..., nodes --json, convert FILE, bench NAME, test."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (0 done, 1 failed, 2 invalid input, 130 cancelled)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else ""
    if name in NOT_THERE_YET:
        return complain(NOT_THERE_YET[name])
    if not name or (name.startswith("-") and name not in ("-h", "--help")):
        return complain(_STUDIO)
    # These hand their arguments on, so that argparse must not look at them.
    handed_on: dict[str, Callable[[Sequence[str]], int]] = {
        "bench": bench.command,
        "test": testing.command,
    }
    try:
        if name in handed_on:
            return handed_on[name](given[1:])
        options = _parser().parse_args(given)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="JAGG Studio: reinforcement learning of diffusion transformers, drawn as a graph.",
        epilog="Exit codes: 0 done, 1 failed, 2 invalid input, 130 cancelled. Only results go to stdout.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run.add_command(commands)
    check.add_commands(commands)
    commands.add_parser("bench", help="run a benchmark: bench NAME --json", add_help=False)
    commands.add_parser(
        "test", help="run the tests: test [--full] [pytest arguments]", add_help=False
    )
    for name, sentence in NOT_THERE_YET.items():
        commands.add_parser(name, help=sentence.partition(": ")[2])
    return parser
