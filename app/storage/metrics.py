"""Metrics of a run: a fold over its events, and the table made of them."""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.storage.events import EventLine
from app.storage.files import write_atomically


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


def metrics_table(series: Iterable[Series]) -> str:
    """CSV text: one row per tick, one column per metric, an empty cell where a tick has no value.

    Numbers are written so that they read back exactly.
    """
    by_title = columns(series)
    ticks = sorted({tick for entry in by_title.values() for tick in entry.points})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["tick", *by_title])
    for tick in ticks:
        cells = (entry.points.get(tick) for entry in by_title.values())
        writer.writerow([tick, *("" if cell is None else repr(cell) for cell in cells)])
    return text.getvalue()


def write_metrics(path: Path, lines: Iterable[EventLine]) -> None:
    """Write the table of the lines' metrics to `path`, atomically.

    Raises:
        StorageError: the file cannot be written.
    """
    write_atomically(path, metrics_table(fold_metrics(lines)).encode())
