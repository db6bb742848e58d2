import json
import math
from pathlib import Path

import pytest

from app.storage.errors import StorageError
from app.storage.events import (
    Artefact,
    CheckpointSaved,
    EventWriter,
    Failed,
    Metric,
    NodeFinished,
    Resumed,
    TickFinished,
    event_type,
    read_events,
)


def write(path: Path, *events: object) -> None:
    with EventWriter(path, run="r", clock=lambda: 12.5) as writer:
        for event in events:
            writer.write(event)  # type: ignore[arg-type]


def test_a_line_has_the_promised_keys_and_leaves_out_what_does_not_apply(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(
        path,
        Metric(name="reward/mean", value=0.1, node="4", tick=3),
        Metric(name="memory/peak", value=1.0),
    )
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "seq": 1,
        "time": 12.5,
        "run": "r",
        "type": "metric",
        "name": "reward/mean",
        "value": 0.1,
        "node": "4",
        "tick": 3,
    }
    assert second == {
        "seq": 2,
        "time": 12.5,
        "run": "r",
        "type": "metric",
        "name": "memory/peak",
        "value": 1.0,
    }


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (CheckpointSaved(tick=1, path="checkpoints/tick-000001"), "checkpoint_saved"),
        (NodeFinished(node="1", title="A", seconds=0.5), "node_finished"),
        (TickFinished(tick=1, total=2, seconds=0.1), "tick_finished"),
        (Artefact(node="1", name="grid", kind="sample", path="samples/a.png"), "artefact"),
        (Resumed(tick=1), "resumed"),
        (Failed(message="no"), "failed"),
    ],
)
def test_type_words(event: object, word: str) -> None:
    assert event_type(event) == word  # type: ignore[arg-type]


def test_numbers_without_a_json_word_survive_and_the_line_stays_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(
        path, *(Metric(name="x", value=value, tick=1) for value in (math.nan, math.inf, -math.inf))
    )

    def refuse(word: str) -> None:
        raise AssertionError(word)

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    values = [line.data["value"] for line in read_events(path)]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize("torn", ['{"seq":3,"time":1,"ru', '{"seq":3}\n', "\x00\x00\x00"])
def test_reopening_cuts_a_torn_last_line_off_and_numbers_on(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    write(path, Resumed(tick=1), Resumed(tick=2))
    whole = path.read_bytes()
    with path.open("a") as file:
        file.write(torn)
    write(path, Resumed(tick=4))
    assert path.read_bytes().startswith(whole)
    assert [(line.seq, line.tick) for line in read_events(path)] == [(1, 1), (2, 2), (3, 4)]


def test_a_reader_leaves_an_unfinished_line_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, Resumed(tick=1))
    with path.open("a") as file:
        file.write('{"seq":2,"type":"resumed","tick":9}')
    assert [line.tick for line in read_events(path)] == [1]


def test_a_damaged_line_in_the_middle_is_named_or_reported(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, Resumed(tick=1))
    with path.open("a") as file:
        file.write("nonsense\n")
    with path.open("a") as file:
        file.write('{"seq":3,"time":0,"run":"r","type":"resumed","tick":3}\n')
    with pytest.raises(StorageError, match="line 2 is damaged"):
        list(read_events(path))
    seen: list[str] = []
    assert [line.seq for line in read_events(path, seen.append)] == [1, 3]
    assert len(seen) == 1
    write(path, Resumed(tick=5))
    assert [line.seq for line in read_events(path, seen.append)] == [1, 3, 4]


def test_a_line_without_a_key_of_its_type_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = '{"seq":2,"time":1,"run":"r","type":"resumed","tick":1}\n'
    path.write_text('{"seq":1,"time":1,"run":"r","type":"metric","tick":1}\n' + good)
    seen: list[str] = []
    assert [line.type for line in read_events(path, seen.append)] == ["resumed"]
    assert "line 1 is damaged (no event: `name` is missing)" in seen[0]
