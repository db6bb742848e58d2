"""The command line: in this process, or as a person starts it, in another one with real signals."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from tests.integration.toy_graphs import TOY_NODES

ROOT = Path(__file__).parents[2]

START = "import sys; from app.cli import main; sys.exit(main())"


class CommandLine:
    """Starts commands in a directory of their own, with the toy nodes installed."""

    def __init__(self, directory: Path, streams: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._streams = streams

    def start(
        self, *arguments: str, stdout: Path | None = None, script: str = START
    ) -> subprocess.Popen[str]:
        """Start a command in a process of its own, with the toy nodes installed; `stdout` = a file to write to."""
        return subprocess.Popen(
            [sys.executable, "-c", script, *_with_toys(arguments)],
            cwd=self.directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE if stdout is None else stdout.open("w"),
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end in this process, which has imported torch already."""
        self._streams.readouterr()
        code = main(_with_toys(arguments))
        out, err = self._streams.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    def write(self, name: str, content: Any) -> str:
        """A JSON (or text) file in the directory; its name."""
        text = content if isinstance(content, str) else json.dumps(content)
        (self.directory / name).write_text(text)
        return name


def _with_toys(arguments: Sequence[str]) -> list[str]:
    takes_nodes = bool(arguments) and arguments[0] in ("run", "validate", "nodes", "convert")
    return [*arguments, *(("--custom-nodes", str(TOY_NODES)) if takes_nodes else ())]


@pytest.fixture
def cli(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    """The command line, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return CommandLine(tmp_path, capsys)
