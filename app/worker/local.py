"""The local executor: one process runs a compiled graph in a run directory."""

import importlib.metadata
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from app.graph.compile import CompiledGraph, CompiledNode
from app.graph.errors import Cancelled
from app.storage.commands import Command
from app.storage.errors import StorageError
from app.storage.events import Cancelled as CancelledEvent
from app.storage.events import (
    CheckpointSaved,
    Event,
    EventLine,
    EventWriter,
    Failed,
    Finished,
    Notice,
    ParamSet,
    Resumed,
    RunStarted,
    StateChanged,
    read_events,
)
from app.storage.metrics import write_metrics
from app.storage.runs import RunDirectory, RunRecord, RunState, process_start
from app.worker.cache import Observed, OutputCache
from app.worker.commands import CommandWatcher, done
from app.worker.context import NodeContext, make_accelerator
from app.worker.scheduler import NodeFailure, RefusedChangeError, Scheduler
from app.worker.settings import CancelToken, Clock, RunSettings
from app.worker.state import copy_state, read_checkpoint, state_bytes, write_checkpoint

_logger = logging.getLogger(__name__)

# The state is copied after every tick, so that a cancelled run can be resumed from the tick before. Above this size,
# half a second of copying, a cancelled run goes back to its last checkpoint instead.
_COPIED_BYTES = 1 << 30

_PAUSE_POLL_SECONDS = 0.05

_VERSIONS_OF = (
    "jagg-studio",
    "torch",
    "accelerate",
    "safetensors",
    "diffusers",
    "transformers",
    "numpy",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended."""

    run: RunDirectory
    state: RunState
    tick: int
    """The last complete tick."""
    total_ticks: int
    error: str | None = None
    checkpoint: str | None = None
    """The last checkpoint, relative to the run directory."""


def run_graph(
    graph: CompiledGraph,
    run: RunDirectory,
    settings: RunSettings,
    *,
    resume: bool = False,
    iterations: int | None = None,
    on_event: Callable[[EventLine], None] | None = None,
    cancel: CancelToken | None = None,
    cache: OutputCache | None = None,
    clock: Clock = time.monotonic,
) -> RunResult:
    """Run a graph to its end, from the start or from the last good checkpoint; the run directory exists.

    `iterations` replaces the number of ticks; the horizon of schedules stays that of the run's first start. Errors of
    nodes end in the result and in the run's files, not in an exception.

    Raises:
        StorageError: the run directory cannot be used, or another process is running it.
    """
    with run.lock(), _log_to(run), EventWriter(run.events_path, run=run.read_record().id) as events:
        session = _Session(
            graph,
            run,
            settings,
            events,
            on_event,
            cancel or CancelToken(),
            cache or OutputCache(),
            clock,
        )
        with _threads(session.choose_threads(resume=resume)):
            return session.execute(resume=resume, iterations=iterations)


class _Session:
    """One stretch of a run, from its start or a resume to its end."""

    def __init__(
        self,
        graph: CompiledGraph,
        run: RunDirectory,
        settings: RunSettings,
        events: EventWriter,
        on_event: Callable[[EventLine], None] | None,
        cancel: CancelToken,
        cache: OutputCache,
        clock: Clock,
    ) -> None:
        self._graph = graph
        self._run = run
        self._settings = settings
        self._events = events
        self._on_event = on_event
        self._cancel = cancel
        self._cache = cache
        self._clock = clock
        self._every, self._keep = _cadence(graph, settings)
        self._tick = 0
        self._last = 0
        self._horizon = 0
        self._saved: int | None = None
        self._checkpoint: str | None = None
        self._copy: dict[str, Any] | None = None
        self._between_ticks = False
        self._overdue = False
        self._scheduler: Scheduler | None = None
        self._timings = dict(run.read_record().timings)
        self._emitting = threading.RLock()
        self._commands = CommandWatcher(run, cancel=cancel, emit=self._emit)
        self._after_tick: list[Command] = []

    def choose_threads(self, *, resume: bool) -> int | None:
        """The thread count that this stretch computes with; None leaves torch's own."""
        recorded = self._run.read_record().settings.get("threads") if resume else None
        wanted = self._settings.threads
        if recorded is not None and wanted is not None and wanted != recorded:
            self._emit(
                Notice(
                    message=f"Warning: the run used {recorded} threads so far and goes on with {wanted}: "
                    "its numbers will equal an uninterrupted run's only up to rounding."
                )
            )
        return wanted if wanted is not None else recorded

    def execute(self, *, resume: bool, iterations: int | None) -> RunResult:
        """Do the work and leave run.json, events and metrics.csv in agreement, however it ends."""
        with self._commands:
            result = self._execute(resume=resume, iterations=iterations)
        left = self._after_tick
        while (command := self._commands.take()) is not None:
            left.append(command)
        # What cannot be written on a full disk is not: how the run ended is settled.
        with suppress(StorageError):
            for command in left:
                text = f"The run ended before it could do this; it is {result.state}."
                self._emit(done(command, "refused", text))
        return result

    def _execute(self, *, resume: bool, iterations: int | None) -> RunResult:
        try:
            self._prepare(resume=resume, iterations=iterations)
            self._work()
            self._emit(Finished(tick=self._tick))
            return self._end("finished")
        except Cancelled:
            return self._end_cancelled()
        except NodeFailure as failure:
            _logger.error("%s", failure, exc_info=failure.__cause__)  # noqa: TRY400 - the node's traceback, not ours
            return self._end_failed(
                Failed(
                    message=str(failure),
                    node=failure.node.id,
                    title=failure.node.title,
                    tick=failure.tick,
                )
            )
        except Exception as error:
            _logger.exception("The run ended with an error.")
            return self._end_failed(
                Failed(message=str(error) or type(error).__name__, tick=self._tick)
            )
        finally:
            if self._scheduler is not None:
                self._scheduler.close()

    def _prepare(self, *, resume: bool, iterations: int | None) -> None:
        record = self._run.read_record()
        self._run.checkpoints.remove_leftovers()
        # Found first of all: whatever fails after this is a failure after that tick, not after tick 0.
        entry = self._run.checkpoints.latest(self._notice) if resume else None
        if entry is not None:
            self._tick = self._saved = entry.tick
            self._checkpoint = entry.path.relative_to(self._run.path).as_posix()
        started_before = resume and record.total_ticks > 0
        wanted = (
            iterations if iterations is not None else record.iterations if started_before else None
        )
        self._last = self._graph.iterations if wanted is None else wanted
        self._horizon = record.total_ticks if started_before else self._last
        accelerator = make_accelerator(
            cpu=self._settings.device == "cpu", precision=self._settings.precision
        )
        facts = {
            "seed": self._graph.seed,
            "total_ticks": self._horizon,
            "precision": self._settings.precision,
        }
        metadata = self._metadata()

        def make_context(node: CompiledNode, observed: Observed) -> NodeContext:
            return NodeContext(
                node=node.id,
                seed=self._graph.seed,
                total_ticks=self._horizon,
                accelerator=accelerator,
                run=self._run,
                emit=self._emit,
                cancel=self._cancel,
                clock=self._clock,
                input_roots=self._settings.input_roots,
                metadata=metadata,
                observed=observed,
            )

        self._run.write_record(
            _started(
                self._run,
                total_ticks=self._horizon,
                iterations=self._last,
                seed=self._graph.seed,
                settings={
                    "device": str(accelerator.device),
                    "precision": self._settings.precision,
                    "threads": torch.get_num_threads(),
                    "checkpoint_every": self._every,
                    "checkpoint_keep": self._keep,
                    "embed_metadata": self._settings.embed_metadata,
                },
            )
        )
        self._emit(RunStarted(total_ticks=self._last))
        self._scheduler = Scheduler(
            self._graph,
            make_context=make_context,
            emit=self._emit,
            cancel=self._cancel,
            clock=self._clock,
            cache=self._cache,
            device=str(accelerator.device),
            run_facts=facts,
        )
        if resume:
            self._emit(Resumed(tick=self._tick))
        with self._timed("once"):
            self._scheduler.run_once()
        if entry is not None:
            self._scheduler.restore(read_checkpoint(entry)["scheduler"])
        if entry is None and self._scheduler.has_baseline:
            with self._timed("ticks"):
                self._scheduler.run_tick(0, self._last)
        self._end_tick(self._tick, save=False)

    def _work(self) -> None:
        scheduler = self._scheduler
        if scheduler is None:
            return
        while self._tick < self._last:
            self._obey(scheduler)
            self._between_ticks = False
            aside = scheduler.aside(self._tick + 1, self._last) if self._after_tick else []
            with self._timed("ticks"):
                scheduler.run_tick(self._tick + 1, self._last, aside=aside)
            self._end_tick(self._tick + 1, save=True)
            if self._after_tick:
                self._run_aside(scheduler, aside)
        if self._graph.ticking and self._saved != self._tick:
            with self._saving():
                self._save()

    def _obey(self, scheduler: Scheduler) -> None:
        """Do what waits to be done between two ticks; returns when the next one may begin.

        Raises:
            Cancelled: the run was asked to stop.
        """
        paused = False
        while True:
            self._cancel.check()
            command = self._commands.take()
            if command is None:
                if not paused:
                    return
                time.sleep(_PAUSE_POLL_SECONDS)
            elif command.name in ("pause", "continue"):
                wanted = command.name == "pause"
                if wanted == paused:
                    text = f"The run is {'paused already' if paused else 'not paused'}."
                    self._emit(done(command, "refused", text))
                    continue
                paused = wanted
                state: RunState = "paused" if paused else "running"
                self._run.update_record(state=state, tick=self._tick)
                self._emit(StateChanged(state=state))
                text = (
                    f"Paused after tick {self._tick} of {self._last}; `continue` goes on."
                    if paused
                    else f"Going on with tick {self._tick + 1}."
                )
                self._emit(done(command, "done", text))
            elif command.name == "save":
                self._save_now(command)
            elif command.name == "set":
                self._set(command, scheduler)
            elif paused:
                text = "The run is paused, and this is done at the end of a tick: send `continue` first."
                self._emit(done(command, "refused", text))
            elif not scheduler.evaluating:
                text = "No card of this graph evaluates now and then (an output card with `every`)."
                self._emit(done(command, "refused", text))
            else:
                self._after_tick.append(command)

    def _save_now(self, command: Command) -> None:
        overdue = self._overdue
        try:
            self._save()
        except StorageError as error:
            _logger.exception("The state could not be saved.")
            self._emit(done(command, "failed", str(error)))
            return
        self._overdue = overdue and self._saved != self._tick
        if self._saved == self._tick:
            text = f"The state after tick {self._tick} is in {self._checkpoint}."
            self._emit(done(command, "done", text))
        else:
            newest = f"that after tick {self._saved}" if self._saved is not None else "none"
            text = (
                f"The state after tick {self._tick} cannot be saved, because a card holds a value that no file can; "
                f"the newest one on disk is {newest}. Try again after the next tick."
            )
            self._emit(done(command, "refused", text))

    def _set(self, command: Command, scheduler: Scheduler) -> None:
        try:
            node, old, new = scheduler.set_param(
                *(command.arguments.get(name) for name in ("node", "param", "value"))
            )
        except RefusedChangeError as error:
            self._emit(done(command, "refused", str(error)))
            return
        param, tick = str(command.arguments["param"]), self._tick + 1
        self._emit(
            ParamSet(node=node.id, title=node.title, param=param, old=old, new=new, tick=tick)
        )
        text = (
            f"{node.title} ({node.id}): `{param}` is {new!r} from tick {tick} on; it was {old!r}."
        )
        self._emit(done(command, "done", text))

    def _run_aside(self, scheduler: Scheduler, aside: list[CompiledNode]) -> None:
        """Answer the commands that waited for the end of the tick."""
        outcome, names = (
            "done",
            ", ".join(f"{node.title} ({node.id})" for node in scheduler.evaluating),
        )
        text = f"After tick {self._tick}: {names}."
        try:
            with self._timed("aside"):
                scheduler.run_aside(self._tick, aside)
        except NodeFailure as failure:
            # Nothing of the run depends on it, so that the run goes on.
            _logger.exception("A card that was asked to run failed.")
            outcome, text = "failed", str(failure)
        commands, self._after_tick = self._after_tick, []
        for command in commands:
            self._emit(done(command, outcome, text))

    def _end_tick(self, tick: int, *, save: bool) -> None:
        """The tick is complete: keep a copy of the state, and write it where its time has come."""
        scheduler = self._scheduler
        if scheduler is None or not self._graph.ticking:
            return
        self._tick = tick
        self._between_ticks = True
        self._overdue |= save and tick % self._every == 0
        if not scheduler.portable_at(tick, self._last):
            # The last copy, of an earlier tick, is what a cancel will save.
            self._between_ticks = False
            return
        state = scheduler.state()
        self._copy = (
            {"tick": tick, "scheduler": copy_state(state)}
            if state_bytes(state) <= _COPIED_BYTES
            else None
        )
        if self._overdue and tick < self._last:
            self._save()

    def _save(self) -> None:
        """Write the newest state that there is, unless it is on disk already."""
        scheduler = self._scheduler
        if self._copy is not None:
            state = self._copy
        elif self._between_ticks and scheduler is not None:
            state = {"tick": self._tick, "scheduler": scheduler.state()}
        else:
            return
        tick = state["tick"]
        if self._saved == tick:
            return
        about = {
            "total_ticks": self._horizon,
            "iterations": self._last,
            "threads": torch.get_num_threads(),
        }
        with self._timed("saving"):
            self._events.sync()
            entry = write_checkpoint(self._run.checkpoints, tick, state, about=about)
            self._run.checkpoints.retain(self._keep, newest=tick)
        self._saved = tick
        self._overdue = False
        self._checkpoint = entry.path.relative_to(self._run.path).as_posix()
        self._emit(CheckpointSaved(tick=tick, path=self._checkpoint))
        self._run.update_record(tick=self._tick, timings=self._timings)

    def _end_cancelled(self) -> RunResult:
        try:
            with self._saving():
                self._save()
            if (self._saved or 0) < self._tick:
                self._notice(
                    f"The state after tick {self._tick} was not kept: a resume goes on after tick {self._saved or 0}."
                )
            self._emit(CancelledEvent(tick=self._tick))
            return self._end("cancelled")
        except Exception as error:
            _logger.exception("The state could not be saved.")
            return self._end_failed(
                Failed(message=f"The cancelled run could not be saved: {error}", tick=self._tick)
            )

    def _end_failed(self, event: Failed) -> RunResult:
        try:
            with self._saving():
                self._save()
        except Exception:
            _logger.exception("The state before the error could not be saved.")
        try:
            self._emit(event)
            return self._end("failed", event.message)
        except StorageError:
            # On a full disk the files keep what they said before; a resume goes on from there.
            _logger.exception("How the run ended could not be written down.")
            return self._result("failed", event.message)

    def _end(self, state: RunState, error: str | None = None) -> RunResult:
        # A tick that was not completed is not part of the table: a resumed run does it again.
        lines = (
            line
            for line in read_events(self._run.events_path, self._notice)
            if (line.tick or 0) <= self._tick
        )
        write_metrics(self._run.metrics_path, list(lines))
        self._run.update_record(
            state=state,
            error=error,
            tick=self._tick,
            ended=time.time(),
            process=None,
            process_started=None,
            timings=self._timings,
        )
        return self._result(state, error)

    def _result(self, state: RunState, error: str | None) -> RunResult:
        return RunResult(
            run=self._run,
            state=state,
            tick=self._tick,
            total_ticks=self._last,
            error=error,
            checkpoint=self._checkpoint,
        )

    def _emit(self, event: Event) -> None:
        with self._emitting:  # the watcher of commands emits from its own thread
            line = self._events.write(event)
            if self._on_event is not None:
                self._on_event(line)

    def _notice(self, message: str) -> None:
        _logger.warning("%s", message)
        self._emit(Notice(message=message))

    def _metadata(self) -> dict[str, str]:
        if not self._settings.embed_metadata:
            return {}
        return {
            "prompt": self._run.prompt_path.read_text(encoding="utf-8"),
            "workflow": self._run.workflow_path.read_text(encoding="utf-8"),
        }

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._run.update_record(state="saving")
        self._emit(StateChanged(state="saving"))
        yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self._timings[name] = self._timings.get(name, 0.0) + self._clock() - started


def _started(run: RunDirectory, **changes: Any) -> RunRecord:
    """The record of a run that is taken up now."""
    record = run.read_record()
    now = time.time()
    return replace(
        record,
        state="running",
        started=record.started if record.started is not None else now,
        ended=None,
        error=None,
        process=os.getpid(),
        process_started=process_start(os.getpid()),
        environment={
            "python": platform.python_version(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "processors": os.cpu_count() or 0,
        },
        versions=_versions(),
        **changes,
    )


def _cadence(graph: CompiledGraph, settings: RunSettings) -> tuple[int, int]:
    """Ticks between checkpoints and how many are kept: as the first node says that sets them, else the settings."""
    for node in graph.order:
        if getattr(node.spec.cls, "sets_checkpoint_cadence", False):
            params = node.params
            return int(getattr(params, "every", settings.checkpoint_every)), int(
                getattr(params, "keep", settings.checkpoint_keep)
            )
    return settings.checkpoint_every, settings.checkpoint_keep


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch compute with so many threads inside the block."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _LogFile(logging.FileHandler):
    """A log file that a full disk cannot make noisy: how the run ends says what is wrong."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Say nothing, where the base class prints a traceback on stderr."""


@contextmanager
def _log_to(run: RunDirectory) -> Iterator[None]:
    """Append log lines, Python warnings among them, to the run's log.txt."""
    handler = _LogFile(run.log_path, encoding="utf-8")
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level or logging.INFO, logging.INFO))
    logging.captureWarnings(capture=True)
    try:
        yield
    finally:
        logging.captureWarnings(capture=False)
        root.setLevel(level)
        root.removeHandler(handler)
        with suppress(OSError):
            handler.close()
