"""`test`: the project's tests, from any current directory."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

from app.cli.output import complain
from app.paths import ROOT


def command(arguments: Sequence[str]) -> int:
    """Run pytest on the checkout with the arguments after `test`; pytest's exit code.

    `--full` adds the slow tests. One thread per process, since the tests compare numbers bit for bit.
    """
    if importlib.util.find_spec("pytest") is None:
        return complain(
            "test: pytest is not installed in this environment. Install requirements-dev.txt first."
        )
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=environment, check=False
    )
    return done.returncode
