"""Commands to a running run: a thread sees their lines, the run acts on them between two ticks.

`cancel` alone acts at once, as a signal would, since a node may not come to an end for a long time.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from app.graph.errors import quoted, suggestion
from app.storage.commands import Command, CommandReader
from app.storage.errors import StorageError
from app.storage.events import CommandDone, Event, Notice
from app.storage.runs import RunDirectory
from app.worker.settings import CancelToken

COMMANDS: Final = ("cancel", "pause", "continue", "save", "evaluate", "sample", "set")
"""What a run can be told; `sample` is another word for `evaluate`."""

_POLL_SECONDS = 0.05
_EXIT_KILLED = 130

_logger = logging.getLogger(__name__)


class CommandWatcher:
    """Follows a run's `commands.jsonl` while the `with` block runs."""

    def __init__(
        self, run: RunDirectory, *, cancel: CancelToken, emit: Callable[[Event], None]
    ) -> None:
        """Commands count from now on; `emit` is called from the watcher's own thread too."""
        self._reader = CommandReader(run.commands_path)
        self._cancel = cancel
        self._emit = emit
        self._waiting: deque[Command] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="commands", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def take(self) -> Command | None:
        """The next command that waits for a safe point, or None."""
        return self._waiting.popleft() if self._waiting else None

    def _watch(self) -> None:
        failed = False
        while not self._stop.wait(_POLL_SECONDS):
            try:
                for command in self._reader.poll(lambda text: self._emit(Notice(message=text))):
                    self._see(command)
                failed = False
            except (OSError, StorageError):
                if not failed:
                    _logger.exception("Commands cannot be read or answered.")
                failed = True

    def _see(self, command: Command) -> None:
        if command.name not in COMMANDS:
            text = f"There is no command `{command.name}`. Commands are {quoted(COMMANDS)}.{suggestion(command.name, COMMANDS)}"
            self._emit(done(command, "refused", text))
        elif command.name != "cancel":
            self._waiting.append(command)
        elif not self._cancel.requested:
            self._cancel.request()
            text = "The run stops at the next safe point and saves its state; a second `cancel` kills it."
            self._emit(done(command, "done", text))
        else:
            try:
                self._emit(done(command, "done", "The run was being cancelled already: killed."))
            finally:
                os._exit(_EXIT_KILLED)


def done(command: Command, outcome: str, message: str) -> CommandDone:
    """The event that acknowledges a command."""
    return CommandDone(id=command.id, command=command.name, outcome=outcome, message=message)
