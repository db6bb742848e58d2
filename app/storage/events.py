"""Events of a run: frozen classes, one JSON line each in `events.jsonl`.

Every line has `seq` (counts from 1, never repeats in a file), `time` (seconds since 1970, UTC), `run` and `type`;
the other keys are the fields of the event's class. `tick` is absent from what happens outside of the ticks, such
as loading a model. A number that JSON has no word for is written as the string "NaN", "Infinity" or "-Infinity".
"""

import contextlib
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from app.storage.errors import StorageError

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """The worker took the run up, for the first time or again."""

    total_ticks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateChanged:
    """The run entered another state, such as `saving`."""

    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStarted:
    """A node's method was called."""

    node: str
    title: str
    tick: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFinished:
    """A node's method returned; `cached` where its outputs were reused instead."""

    node: str
    title: str
    seconds: float
    cached: bool = False
    tick: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A node has done `value` of `total` equal pieces of its work in this tick."""

    node: str
    value: int
    total: int
    text: str | None = None
    tick: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TickFinished:
    """Every node of the tick is done."""

    tick: int
    total: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One number. `node` is the id of the card that reported it; the worker's own metrics have none."""

    name: str
    value: float
    unit: str | None = None
    node: str | None = None
    tick: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Artefact:
    """A file of the run was written; `path` is relative to the run directory.

    `kind` is the folder that it lies in: `samples`, `export`, or another one of the node's.
    """

    node: str
    name: str
    kind: str
    path: str
    caption: str | None = None
    tick: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved:
    """A run can be resumed from here; `path` is relative to the run directory."""

    tick: int
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A sentence that a person should see, such as a warning."""

    message: str
    node: str | None = None
    tick: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The run goes on from the state after `tick`: every earlier line with a later tick is void."""

    tick: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    """The run was stopped by a person; `tick` is the last complete one."""

    tick: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The run ended with an error; the traceback is in `log.txt`."""

    message: str
    node: str | None = None
    title: str | None = None
    tick: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The run did all of its ticks."""

    tick: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandDone:
    """The answer to a line of `commands.jsonl`; `id` is that line's.

    `outcome` is `done`, `refused` (nothing was changed; the message says why) or `failed`.
    """

    id: str
    command: str
    outcome: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSet:
    """A widget of a card was changed while the run goes on; `tick` is the first one with the new value."""

    node: str
    title: str
    param: str
    old: int | float | str | bool
    new: int | float | str | bool
    tick: int


Event = (
    RunStarted
    | StateChanged
    | NodeStarted
    | NodeFinished
    | Progress
    | TickFinished
    | Metric
    | Artefact
    | CheckpointSaved
    | Notice
    | Resumed
    | Cancelled
    | Failed
    | Finished
    | CommandDone
    | ParamSet
)


def event_type(event: Event | type[Event]) -> str:
    """The event's word in the file: its class name in lower case with underscores, such as `node_started`."""
    cls = event if isinstance(event, type) else type(event)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@functools.cache
def _required() -> Mapping[str, tuple[str, ...]]:
    """The keys that lines of a type cannot do without."""
    return {
        event_type(cls): tuple(entry.name for entry in fields(cls) if entry.default is MISSING)
        for cls in get_args(Event)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLine:
    """One line of the file as read back; `data` holds all of its keys, numbers restored."""

    seq: int
    time: float
    run: str
    type: str
    data: Mapping[str, Any]

    @property
    def tick(self) -> int | None:
        """The tick the line belongs to; None outside of the ticks."""
        tick = self.data.get("tick")
        return tick if isinstance(tick, int) else None


def json_number(value: float) -> float | str:
    """The number, or the word that stands for it where JSON has none."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def encode_event(event: Event, *, seq: int, run: str, time: float) -> str:
    """The event's line, without its line feed."""
    data: dict[str, Any] = {"seq": seq, "time": time, "run": run, "type": event_type(event)}
    for entry in fields(event):
        value = getattr(event, entry.name)
        if value is not None:
            data[entry.name] = json_number(value) if isinstance(value, float) else value
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def decode_line(line: str | bytes) -> EventLine:
    """The line's content.

    Raises:
        ValueError: the line is no event, for example because its writer died half-way.
    """
    data = json.loads(line)
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("seq"), int)
        or not isinstance(data.get("type"), str)
    ):
        msg = "no event: `seq` or `type` is missing"
        raise ValueError(msg)  # noqa: TRY004 - readers of damaged lines catch one kind of error
    missing = [name for name in _required().get(data["type"], ()) if name not in data]
    if missing:
        msg = f"no event: `{missing[0]}` is missing"
        raise ValueError(msg)
    if isinstance(data.get("value"), str):
        data["value"] = _NON_FINITE.get(data["value"], data["value"])
    return EventLine(
        seq=data["seq"],
        time=float(data.get("time", 0.0)),
        run=str(data.get("run", "")),
        type=data["type"],
        data=data,
    )


def read_events(path: Path, report: Callable[[str], None] | None = None) -> Iterator[EventLine]:
    """The events of a file in order. A last line without its line feed is still being written: it is left out.

    `report` is told of damaged lines, which are then passed over.

    Raises:
        StorageError: the file cannot be read, or a line is damaged and there is no `report`.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    event = decode_line(line)
                except ValueError as error:
                    msg = f"{path}: line {number} is damaged ({error}). Remove that line to read the rest."
                    if report is None:
                        raise StorageError(msg) from error
                    report(msg)
                    continue
                yield event
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror or error})."
        raise StorageError(msg) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One metric of one node: values by tick, in tick order."""

    name: str
    node: str | None
    points: Mapping[int, float]

    @property
    def first(self) -> float:
        """The value of the earliest tick."""
        return next(iter(self.points.values()))

    @property
    def last(self) -> float:
        """The value of the latest tick."""
        return next(reversed(list(self.points.values())))


def fold_metrics(lines: Iterable[EventLine]) -> list[Series]:
    """The series that stand at the end of the lines, sorted by name and node.

    A `resumed` line voids what was reported for later ticks; where a tick was reported twice, the later line stands.
    Metrics outside of the ticks are left out.
    """
    points: dict[tuple[str, str | None], dict[int, float]] = {}
    for line in lines:
        if line.type == "resumed" and line.tick is not None:
            for series in points.values():
                for tick in [tick for tick in series if tick > line.tick]:
                    del series[tick]
        elif line.type == "metric" and line.tick is not None:
            key = (str(line.data["name"]), line.data.get("node"))
            points.setdefault(key, {})[line.tick] = float(line.data["value"])
    return [
        Series(name=name, node=node, points=dict(sorted(series.items())))
        for (name, node), series in sorted(
            points.items(), key=lambda item: (item[0][0], item[0][1] or "")
        )
        if series
    ]


def columns(series: Iterable[Series]) -> dict[str, Series]:
    """Series by column title: the metric's name, with the node's id behind it where several nodes report it."""
    listed = list(series)
    names = [entry.name for entry in listed]
    return {
        entry.name if names.count(entry.name) == 1 else f"{entry.name} [{entry.node}]": entry
        for entry in listed
    }


def metrics_of_run(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """A run's metrics as (tick, value) pairs in tick order, by the column titles of `metrics.csv`.

    Raises:
        StorageError: `events.jsonl` cannot be read or is damaged.
    """
    series = fold_metrics(read_events(directory / "events.jsonl"))
    return {title: list(entry.points.items()) for title, entry in columns(series).items()}


class EventWriter:
    """Appends events to a file; one whole line per call, numbered on from what the file holds.

    A last line that its writer did not finish is cut off on opening: it was never reported as written.
    """

    def __init__(self, path: Path, *, run: str, clock: Callable[[], float] = time.time) -> None:
        """Open the file, making it where there is none.

        Raises:
            StorageError: the file cannot be opened.
        """
        self._path = path
        self._run = run
        self._clock = clock
        try:
            path.touch()
            # Unbuffered writes: a line is in the system's hands before `write` returns, so killing us loses none.
            self._file = path.open("r+b")
        except OSError as error:
            msg = f"{path}: cannot be opened for writing ({error.strerror or error})."
            raise StorageError(msg) from error
        self._seq = _repair(self._file)

    @property
    def seq(self) -> int:
        """The number of the last line; 0 in an empty file."""
        return self._seq

    def write(self, event: Event) -> EventLine:
        """Append the event; returns its line as a reader would see it.

        Raises:
            StorageError: the file cannot be written to, for example because the disk is full.
        """
        # Counted first: what could not be flushed may still reach the file with a later line.
        self._seq += 1
        line = encode_event(event, seq=self._seq, run=self._run, time=self._clock())
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            msg = f"{self._path}: cannot be written to ({error.strerror or error}). Free space and resume the run."
            raise StorageError(msg) from error
        return decode_line(line)

    def sync(self) -> None:
        """Force all lines to the disk: called before a checkpoint, which must not be newer than the events."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a line that could not be written has been reported already."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


def _repair(file: BufferedRandom) -> int:
    """Cut an unfinished last line off, leave the file at its end, and return the last line's number."""
    seq = 0
    good = 0
    for line in file:
        try:
            if not line.endswith(b"\n"):
                break
            seq = max(seq, decode_line(line).seq)
        except ValueError:
            if file.peek(1):
                # A damaged line in the middle is left for a person to see; numbering goes on past it.
                good += len(line)
                continue
            break
        good += len(line)
    file.seek(good)
    file.truncate()
    return seq
