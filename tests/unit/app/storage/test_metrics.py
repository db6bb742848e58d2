from pathlib import Path

from app.storage.events import (
    EventWriter,
    Metric,
    Resumed,
    columns,
    fold_metrics,
    metrics_of_run,
    read_events,
)
from app.storage.metrics import metrics_table, write_metrics


def events(path: Path, *listed: Metric | Resumed) -> Path:
    with EventWriter(path, run="r") as writer:
        for event in listed:
            writer.write(event)
    return path


def test_resumed_voids_later_ticks_and_a_later_report_of_a_tick_stands(tmp_path: Path) -> None:
    path = events(
        tmp_path / "e",
        Metric(name="a", value=0.0, node="1", tick=0),
        Metric(name="a", value=1.0, node="1", tick=1),
        Metric(name="a", value=2.0, node="1", tick=2),
        Metric(name="gone", value=2.0, node="1", tick=2),
        Resumed(tick=1),
        Metric(name="a", value=7.0, node="1", tick=2),
        Metric(name="a", value=8.0, node="1", tick=2),
    )
    (series,) = fold_metrics(read_events(path))
    assert dict(series.points) == {0: 0.0, 1: 1.0, 2: 8.0}
    assert (series.first, series.last) == (0.0, 8.0)


def test_the_table_reads_back_exactly_with_empty_cells_and_nan(tmp_path: Path) -> None:
    third = 1 / 3
    path = events(
        tmp_path / "e",
        Metric(name="b", value=third, node="1", tick=1),
        Metric(name="a", value=float("nan"), node="1", tick=2),
        Metric(name="loading", value=1.0, node="1"),
    )
    write_metrics(tmp_path / "metrics.csv", read_events(path))
    assert (tmp_path / "metrics.csv").read_text() == f"tick,a,b\n1,,{third!r}\n2,nan,\n"


def test_columns_name_the_node_where_several_report_a_metric(tmp_path: Path) -> None:
    path = events(
        tmp_path / "e",
        Metric(name="a", value=1.0, node="1", tick=1),
        Metric(name="a", value=2.0, node="2", tick=1),
        Metric(name="b", value=3.0, node="2", tick=1),
    )
    series = fold_metrics(read_events(path))
    assert list(columns(series)) == ["a [1]", "a [2]", "b"]
    assert metrics_table(series) == "tick,a [1],a [2],b\n1,1.0,2.0,3.0\n"


def test_metrics_of_a_run_are_pairs_by_column(tmp_path: Path) -> None:
    events(
        tmp_path / "events.jsonl",
        Metric(name="a", value=2.0, node="1", tick=5),
        Metric(name="a", value=1.0, node="1", tick=0),
    )
    assert metrics_of_run(tmp_path) == {"a": [(0, 1.0), (5, 2.0)]}
