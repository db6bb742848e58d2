"""Exit codes, and the two streams: stdout holds what is promised, stderr everything for eyes."""

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Final, TextIO

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INVALID: Final = 2
EXIT_CANCELLED: Final = 130


class StdoutError(Exception):
    """stdout cannot be written to; the message is the system's reason."""


def tell(text: str) -> None:
    """A line on stderr; lost where nobody reads it any more, which must not end a run."""
    if sys.stderr is not None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            drop(sys.stderr)


def answer(text: str) -> None:
    """What a command promises on stdout, handed over before the command ends.

    Raises:
        BrokenPipeError: its reader has gone.
        StdoutError: it cannot be written to, for example because the disk is full.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(error.strerror or str(error)) from error


def drop(stream: TextIO) -> None:
    """Send what is still written to a stream nowhere, its reader being gone: the last flush would change the exit code."""
    with contextlib.suppress(OSError):
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, stream.fileno())
        os.close(void)


def complain(*problems: str) -> int:
    """Each problem as one line on stderr; returns the exit code of invalid input."""
    return complain_all(problems)


def complain_all(problems: Iterable[str]) -> int:
    """Each problem as one line on stderr; returns the exit code of invalid input."""
    for problem in problems:
        tell(" ".join(problem.split()))
    return EXIT_INVALID
