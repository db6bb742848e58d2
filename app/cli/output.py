"""Exit codes, and the two streams: stdout holds what is promised, stderr everything for eyes."""

import sys
from collections.abc import Iterable
from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INVALID: Final = 2
EXIT_CANCELLED: Final = 130


def tell(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def complain(*problems: str) -> int:
    """Each problem as one line on stderr; returns the exit code of invalid input."""
    return complain_all(problems)


def complain_all(problems: Iterable[str]) -> int:
    """Each problem as one line on stderr; returns the exit code of invalid input."""
    for problem in problems:
        tell(" ".join(problem.split()))
    return EXIT_INVALID
