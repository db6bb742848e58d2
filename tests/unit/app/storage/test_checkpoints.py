from collections.abc import Callable
from pathlib import Path

import pytest

from app.storage.checkpoints import CheckpointStore, verify
from app.storage.errors import StorageError


def fill(text: str = "x") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "state.json").write_text(text)
        (folder / "more").mkdir()
        (folder / "more" / "tensor.safetensors").write_bytes(b"1234")

    return write


def test_written_checkpoints_are_listed_in_tick_order_and_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for tick in (100, 50):
        store.write(tick, fill(), about={"total_ticks": 200})
    assert [entry.path.name for entry in store.entries()] == ["tick-000050", "tick-000100"]
    latest = store.latest()
    assert latest is not None
    assert (latest.tick, latest.about) == (100, {"total_ticks": 200})
    assert set(latest.files) == {"state.json", "more/tensor.safetensors"}
    verify(latest)


@pytest.mark.parametrize("damage", ["cut", "changed", "removed", "no manifest", "half a manifest"])
def test_latest_passes_a_torn_checkpoint_over_and_says_so(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    store.write(1, fill(), about={})
    path = store.write(2, fill(), about={}).path
    tensor = path / "more" / "tensor.safetensors"
    if damage == "cut":
        tensor.write_bytes(b"12")
    elif damage == "changed":
        tensor.write_bytes(b"9999")
    elif damage == "removed":
        tensor.unlink()
    elif damage == "no manifest":
        (path / "manifest.json").unlink()
    else:
        (path / "manifest.json").write_text('{"format": 1, "tick"')
    seen: list[str] = []
    latest = store.latest(seen.append)
    assert latest is not None
    assert latest.tick == 1
    assert len(seen) == 1
    assert "tick-000002" in seen[0]


def test_a_writer_that_fails_leaves_the_former_checkpoint_of_the_tick(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.write(1, fill("first"), about={})

    def fail(folder: Path) -> None:
        (folder / "state.json").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        store.write(1, fail, about={})
    assert [path.name for path in tmp_path.iterdir()] == ["tick-000001"]
    assert (tmp_path / "tick-000001" / "state.json").read_text() == "first"


def test_the_same_tick_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.write(1, fill("first"), about={})
    store.write(1, fill("second"), about={})
    latest = store.latest()
    assert latest is not None
    assert (latest.path / "state.json").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["tick-000001"]


def test_retention_keeps_the_last_n_and_zero_keeps_all(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for tick in (1, 2, 3):
        store.write(tick, fill(), about={})
    assert store.retain(0, newest=3) == []
    assert store.retain(2, newest=3) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tick-000002", "tick-000003"]


def test_retention_does_not_count_later_checkpoints_that_a_resume_passed_over(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    for tick in (1, 6):
        store.write(tick, fill(), about={})
    (tmp_path / "tick-000006" / "state.json").write_text("torn")
    store.write(2, fill(), about={})
    assert store.retain(1, newest=2) == [1]
    latest = store.latest()
    assert latest is not None
    assert latest.tick == 2


def test_leftovers_of_a_killed_writer_are_no_checkpoints_and_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / ".aside-tick-000009-abcd").mkdir()
    assert store.latest() is None
    store.remove_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.write(1, fill(), about={}).path / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    seen: list[str] = []
    assert store.latest(seen.append) is None
    assert "format 2, expected 1" in seen[0]
