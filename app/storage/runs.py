"""Run directories: `runs/<id>/`, its files, and the record in `run.json`.

| file | content |
|---|---|
| `workflow.json` | the workflow as drawn |
| `prompt.json` | the same graph as API JSON, with overrides applied: what runs |
| `run.json` | `RunRecord`, replaced atomically |
| `events.jsonl` | see `events.py` |
| `commands.jsonl` | see `commands.py`; not there before the first command |
| `metrics.csv` | see `metrics.py`; written at the end of a run |
| `run.lock` | held by the process that runs it |
| `log.txt` | log lines and tracebacks |
| `samples/`, `export/` | files that nodes write |
| `checkpoints/tick-000050/` | see `checkpoints.py` |
"""

import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from app.storage.checkpoints import CheckpointStore
from app.storage.errors import StorageError
from app.storage.files import json_digest, read_json, write_json

RUN_FORMAT = 1
"""Version of the layout of a run directory; readers refuse a newer one."""

RunState = Literal[
    "queued", "running", "paused", "saving", "finished", "failed", "cancelled", "interrupted"
]

HELD_STATES = ("running", "paused", "saving")
"""States in which a process holds the run."""

_START_TOLERANCE = 2.0
"""Seconds by which two readings of a process's start may differ when the system's clock is corrected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What `run.json` says of a run. Times are seconds since 1970, UTC; durations are seconds."""

    id: str
    state: RunState
    name: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    format: int = RUN_FORMAT
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    tick: int = 0
    """The last complete tick."""
    total_ticks: int = 0
    """The horizon of schedules: fixed when the run starts, kept when it is resumed with more ticks."""
    iterations: int = 0
    """The ticks that were asked for last."""
    seed: int = 0
    error: str | None = None
    prompt_digest: str = ""
    """SHA-256 of what `prompt.json` says, so that a resume sees when it was edited; empty in older runs."""
    process: int | None = None
    """Process id of the worker that holds the run; None when it ended properly."""
    process_started: float | None = None
    """When that process was started: another one may have its id by now."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Resolved settings: device, threads, checkpoint_every and so on."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)


# What a person who edits run.json can get wrong and a run would trip over; the rest is only shown.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "created": (float, int),
    "tick": (int,),
    "total_ticks": (int,),
    "iterations": (int,),
    "prompt_digest": (str,),
    "tags": (list,),
    "settings": (dict,),
    "timings": (dict,),
    "process": (int, type(None)),
    "process_started": (float, int, type(None)),
}


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        """Name the directory; nothing is read or made."""
        self.path = path

    @property
    def record_path(self) -> Path:
        """`run.json`."""
        return self.path / "run.json"

    @property
    def workflow_path(self) -> Path:
        """`workflow.json`."""
        return self.path / "workflow.json"

    @property
    def prompt_path(self) -> Path:
        """`prompt.json`."""
        return self.path / "prompt.json"

    @property
    def events_path(self) -> Path:
        """`events.jsonl`."""
        return self.path / "events.jsonl"

    @property
    def commands_path(self) -> Path:
        """`commands.jsonl`."""
        return self.path / "commands.jsonl"

    @property
    def metrics_path(self) -> Path:
        """`metrics.csv`."""
        return self.path / "metrics.csv"

    @property
    def log_path(self) -> Path:
        """`log.txt`."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> CheckpointStore:
        """The checkpoints of the run."""
        return CheckpointStore(self.path / "checkpoints")

    def read_record(self) -> RunRecord:
        """The record.

        Raises:
            StorageError: it is missing, damaged, or of a newer format.
        """
        data = read_json(self.record_path)
        if data.get("format") != RUN_FORMAT:
            msg = (
                f"{self.record_path}: run directory format {data.get('format')}, expected {RUN_FORMAT}. "
                "It was written by another version of JAGG Studio; use that version."
            )
            raise StorageError(msg)
        known = {entry.name for entry in fields(RunRecord)}
        values = {name: value for name, value in data.items() if name in known}
        if not isinstance(values.get("id"), str) or values.get("state") not in get_args(RunState):
            msg = f"{self.record_path}: `id` or `state` is missing or unknown. The file was damaged or edited."
            raise StorageError(msg)
        for name, kinds in _KINDS.items():
            if name in values and type(values[name]) not in kinds:
                msg = f"{self.record_path}: `{name}` is {values[name]!r}. The file was damaged or edited; restore it from a copy."
                raise StorageError(msg)
        return RunRecord(**{**values, "tags": tuple(values.get("tags", ()))})

    def check_graph(self, record: RunRecord) -> None:
        """Make sure that the graph on disk is the one that the run was made with.

        Raises:
            StorageError: a file of it is missing or damaged, or `prompt.json` was edited.
        """
        read_json(self.workflow_path)
        digest = json_digest(read_json(self.prompt_path))
        if record.prompt_digest and digest != record.prompt_digest:
            msg = (
                f"{self.prompt_path}: was edited after the run was made, and a run goes on with its own graph only. "
                "Restore the file, or start a new run from it."
            )
            raise StorageError(msg)

    def write_record(self, record: RunRecord) -> None:
        """Replace the record atomically.

        Raises:
            StorageError: the file cannot be written.
        """
        write_json(self.record_path, asdict(record))

    def update_record(self, **changes: Any) -> RunRecord:
        """Replace fields of the record; returns the new one.

        Raises:
            StorageError: the file cannot be read or written.
        """
        record = replace(self.read_record(), **changes)
        self.write_record(record)
        return record

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run: no second process can meanwhile. The system lets go when this process dies.

        Raises:
            StorageError: another process holds the run.
        """
        try:
            file = (self.path / "run.lock").open("ab")
        except OSError as error:
            msg = f"Run directory {self.path}: cannot be written to ({error.strerror or error})."
            raise StorageError(msg) from error
        with file:
            if not _try_lock(file.fileno()):
                msg = f"Run directory {self.path}: another process is running it. Wait for it to end, or cancel it first."
                raise StorageError(msg)
            yield

    def file(self, relative: str) -> Path:
        """A path inside the run directory, its folder made.

        Raises:
            StorageError: the path leads out of the run directory, or its folder cannot be made.
        """
        path = (self.path / relative).resolve()
        if not path.is_relative_to(self.path.resolve()):
            msg = f"Run directory {self.path}: {relative!r} leads out of it. Use a relative path without `..`."
            raise StorageError(msg)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"{path.parent}: cannot be made ({error.strerror or error})."
            raise StorageError(msg) from error
        return path


def new_run_id() -> str:
    """A fresh run id (a random UUID)."""
    return str(uuid.uuid4())


def create_run(
    path: Path, record: RunRecord, *, workflow: Mapping[str, Any], prompt: Mapping[str, Any]
) -> RunDirectory:
    """Make a run directory at `path`, which may exist if it is empty.

    Raises:
        StorageError: the directory holds something already or cannot be made; then nothing is written.
    """
    made = _missing_parents(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
        if not occupied:
            # The claim: of two processes that find the directory empty, one makes this and the other one fails.
            (path / "samples").mkdir()
    except FileExistsError:
        if not path.is_dir():
            msg = f"Run directory {path}: is a file. Choose another place with --run-dir or --runs-dir."
            raise StorageError(msg) from None
        occupied = True
    except OSError as error:
        _remove_empty(made)
        msg = (
            f"Run directory {path}: cannot be made ({error.strerror or error}). "
            "Choose another place with --run-dir or --runs-dir."
        )
        raise StorageError(msg) from error
    if occupied:
        msg = f"Run directory {path}: is not empty. Add --resume to go on with the run in it, or choose another one."
        raise StorageError(msg)
    run = RunDirectory(path)
    try:
        for folder in ("checkpoints", "export"):
            (path / folder).mkdir()
        run.write_record(replace(record, prompt_digest=json_digest(prompt)))
        write_json(run.workflow_path, workflow)
        write_json(run.prompt_path, prompt)
    except (OSError, StorageError) as error:
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        _remove_empty(made)
        msg = f"Run directory {path}: cannot be written to ({error}). Choose another place with --run-dir or --runs-dir."
        raise StorageError(msg) from error
    return run


def process_start(process: int) -> float | None:
    """When the process was started, in seconds since 1970; None if there is no such process."""
    import psutil  # type: ignore[import-untyped]

    try:
        found = psutil.Process(process)
        return None if found.status() == psutil.STATUS_ZOMBIE else float(found.create_time())
    except (psutil.Error, ValueError, OverflowError):
        return None


def observed(record: RunRecord) -> RunRecord:
    """The record with the state `interrupted` where it says that a process works on the run and that one is gone."""
    if record.state not in HELD_STATES or record.process is None:
        return record
    started = process_start(record.process)
    gone = started is None or (
        record.process_started is not None
        and abs(started - record.process_started) > _START_TOLERANCE
    )
    return replace(record, state="interrupted") if gone else record


def list_runs(root: Path) -> Iterator[tuple[RunDirectory, RunRecord]]:
    """The runs below a runs directory as `observed`, newest first; what is no run directory is left out."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if (path / "run.json").is_file():
            try:
                found.append((RunDirectory(path), observed(RunDirectory(path).read_record())))
            except StorageError:
                continue
    yield from sorted(found, key=lambda item: item[1].created, reverse=True)


def find_run(root: Path, name: str) -> RunDirectory:
    """The run with this id, or with this unique beginning of an id, below a runs directory.

    Raises:
        StorageError: none or several fit.
    """
    if not re.fullmatch(r"[\w-]+", name):
        msg = f"Run {name!r}: expected a run id, made of letters, digits and `-`."
        raise StorageError(msg)
    fitting = [run for run, record in list_runs(root) if record.id == name]
    fitting = fitting or [run for run, record in list_runs(root) if record.id.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    problem = "there is no such run" if not fitting else "several runs begin like that"
    known = ", ".join(record.id for _, record in list(list_runs(root))[:5]) or "none"
    msg = f"Run {name!r}: {problem} in {root}. The latest there: {known}."
    raise StorageError(msg)


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _missing_parents(path: Path) -> list[Path]:
    """The directories that `mkdir(parents=True)` would make, deepest first."""
    missing = []
    for candidate in (path, *path.parents):
        try:
            candidate.lstat()
            break
        except OSError:
            missing.append(candidate)
    return missing


def _remove_empty(made: list[Path]) -> None:
    for path in made:
        try:
            path.rmdir()
        except OSError:
            continue
