import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.storage.errors import StorageError
from app.storage.files import json_digest
from app.storage.runs import (
    RunDirectory,
    RunRecord,
    create_run,
    find_run,
    list_runs,
    new_run_id,
    observed,
    process_start,
)


def make(path: Path, run_id: str = "a", created: float = 0.0) -> RunDirectory:
    record = RunRecord(
        id=run_id, state="queued", created=created, tags=("t",), settings={"threads": 1}
    )
    return create_run(path, record, workflow={"nodes": []}, prompt={"1": {}})


def test_a_new_run_has_its_layout_and_its_record_reads_back(tmp_path: Path) -> None:
    run = make(tmp_path / "runs" / "a")
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "export",
        "prompt.json",
        "run.json",
        "samples",
        "workflow.json",
    ]
    assert run.read_record() == RunRecord(
        id="a",
        state="queued",
        tags=("t",),
        settings={"threads": 1},
        prompt_digest=json_digest({"1": {}}),
    )
    assert run.update_record(state="running").state == "running"
    assert run.read_record().state == "running"
    assert list(run.path.glob(".*")) == []


def test_a_directory_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(StorageError, match=r"is not empty.*--resume"):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_path_below_a_file_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be made"):
        make(tmp_path / "file" / "runs" / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_read_only_file_system_is_refused() -> None:
    with pytest.raises(StorageError, match="--runs-dir"):
        make(Path("/proc/runs/a"))


def test_a_newer_format_or_a_damaged_record_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    text = run.record_path.read_text()
    run.record_path.write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(StorageError, match="format 2, expected 1"):
        run.read_record()
    run.record_path.write_text(text.replace('"queued"', '"dancing"'))
    with pytest.raises(StorageError, match="`state`"):
        run.read_record()
    run.record_path.write_text(text[:20])
    with pytest.raises(StorageError, match="not valid JSON"):
        run.read_record()


def test_files_stay_inside_the_run(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    assert run.file("samples/x/y.png").parent.is_dir()
    with pytest.raises(StorageError, match="leads out"):
        run.file("../b.txt")


def test_runs_are_found_by_id_and_by_a_unique_beginning(tmp_path: Path) -> None:
    make(tmp_path / "one", "abc-1", created=1.0)
    make(tmp_path / "two", "abd-2", created=2.0)
    (tmp_path / "other").mkdir()
    assert [record.id for _, record in list_runs(tmp_path)] == ["abd-2", "abc-1"]
    assert find_run(tmp_path, "abc-1").path == tmp_path / "one"
    assert find_run(tmp_path, "abd").path == tmp_path / "two"
    with pytest.raises(StorageError, match="several runs begin like that"):
        find_run(tmp_path, "ab")
    with pytest.raises(StorageError, match="no such run"):
        find_run(tmp_path, "zz")
    with pytest.raises(StorageError, match="expected a run id"):
        find_run(tmp_path, "../one")


def test_run_ids_differ() -> None:
    assert new_run_id() != new_run_id()


def test_of_two_that_find_a_directory_empty_the_second_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(tmp_path / "a", "first")
    # What the second one saw a moment ago.
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))
    with pytest.raises(StorageError, match="is not empty"):
        make(tmp_path / "a", "second")
    assert first.read_record().id == "first"


@pytest.mark.parametrize(
    ("field", "value"),
    [("iterations", "x"), ("total_ticks", 1.5), ("settings", []), ("created", None)],
)
def test_an_edited_record_is_refused_with_its_field(
    tmp_path: Path, field: str, value: object
) -> None:
    run = make(tmp_path / "a")
    data = json.loads(run.record_path.read_text())
    run.record_path.write_text(json.dumps({**data, field: value}))
    with pytest.raises(StorageError, match=f"`{field}` is"):
        run.read_record()


def test_an_edited_prompt_is_refused_and_another_layout_is_not(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    run.prompt_path.write_text('{ "1":{} }')
    run.check_graph(run.read_record())
    run.prompt_path.write_text('{"1": {"inputs": {}}}')
    with pytest.raises(StorageError, match="was edited after the run was made"):
        run.check_graph(run.read_record())
    run.workflow_path.unlink()
    with pytest.raises(StorageError, match=r"workflow\.json"):
        run.check_graph(run.read_record())


def test_a_run_whose_process_is_gone_is_interrupted(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    mine = process_start(os.getpid())
    assert mine is not None
    held = run.update_record(state="running", process=os.getpid(), process_started=mine)
    assert observed(held) == held
    assert [record.state for _, record in list_runs(tmp_path)] == ["running"]
    # Another process has the id by now.
    assert observed(replace(held, process_started=mine - 60)).state == "interrupted"
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    run.update_record(state="paused", process=process.pid)
    assert [record.state for _, record in list_runs(tmp_path)] == ["interrupted"]
    assert run.read_record().state == "paused"
    run.update_record(state="cancelled")
    assert [record.state for _, record in list_runs(tmp_path)] == ["cancelled"]
