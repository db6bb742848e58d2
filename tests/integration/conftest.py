"""The command line as a person starts it: another process, real signals."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.toy_graphs import TOY_NODES

ROOT = Path(__file__).parents[2]


class CommandLine:
    """Starts commands in a directory of their own, with the toy nodes installed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command; `run`, `validate`, `nodes` and `convert` see the toy nodes."""
        command = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())", *arguments]
        if arguments and arguments[0] in ("run", "validate", "nodes", "convert"):
            command += ["--custom-nodes", str(TOY_NODES)]
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def write(self, name: str, content: Any) -> str:
        """A JSON (or text) file in the directory; its name."""
        text = content if isinstance(content, str) else json.dumps(content)
        (self.directory / name).write_text(text)
        return name


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    """The command line, in an empty directory."""
    return CommandLine(tmp_path)
