"""The table of a run's metrics, made of its events."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from app.storage.events import EventLine, Series, columns, fold_metrics
from app.storage.files import write_atomically


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
