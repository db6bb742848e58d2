"""Commands to a running run: JSON lines that anyone appends to `commands.jsonl` and the run's worker reads.

A line has `id` (the event that acknowledges the command repeats it), `time` (seconds since 1970, UTC), `command`, and
for `set` also `node` (id or title), `param` and `value` (a text is read by the widget's type).
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.storage.errors import StorageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One line of the file."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def append_command(path: Path, name: str, arguments: Mapping[str, Any] | None = None) -> Command:
    """Append a command as one whole line; a line that another writer did not finish is closed first.

    Raises:
        StorageError: the file cannot be written to.
    """
    command = Command(id=str(uuid.uuid4()), name=name, arguments=dict(arguments or {}))
    line = json.dumps(
        {"id": command.id, "time": time.time(), "command": name, **command.arguments},
        ensure_ascii=False,
    )
    try:
        with path.open("a+b", buffering=0) as file:
            torn = file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
            # One write to a file opened for appending: two writers cannot mix their lines.
            file.write((b"\n" if torn else b"") + line.encode() + b"\n")
    except OSError as error:
        msg = f"{path}: cannot be written to ({error.strerror or error})."
        raise StorageError(msg) from error
    return command


def decode_command(line: bytes) -> Command:
    """The command of a line.

    Raises:
        ValueError: the line is no command, for example because its writer died half-way.
    """
    data = json.loads(line)
    if not isinstance(data, dict):
        msg = "expected a JSON object"
        raise ValueError(msg)  # noqa: TRY004 - readers of damaged lines catch one kind of error
    for name in ("id", "command"):
        if not isinstance(data.get(name), str):
            msg = f"`{name}` is missing or no text"
            raise ValueError(msg)  # noqa: TRY004 - as above
    arguments = {key: value for key, value in data.items() if key not in ("id", "time", "command")}
    return Command(id=data["id"], name=data["command"], arguments=arguments)


class CommandReader:
    """Reads what is appended to the file from now on; what it holds already was meant for an earlier stretch."""

    def __init__(self, path: Path) -> None:
        """Begin at the end of the file, which need not be there yet."""
        self._path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def poll(self, report: Callable[[str], None]) -> list[Command]:
        """The commands whose lines are complete since the last call; `report` is told of damaged lines.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        commands = []
        for line in whole.split(b"\n"):
            if not line.strip():
                continue
            try:
                commands.append(decode_command(line))
            except ValueError as error:
                report(f"{self._path}: a damaged line was passed over ({error}).")
        return commands
