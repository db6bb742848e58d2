from pathlib import Path

from app.storage.commands import CommandReader, append_command


def test_only_whole_lines_from_now_on_are_read(tmp_path: Path) -> None:
    path = tmp_path / "commands.jsonl"
    append_command(path, "pause")
    reader, told = CommandReader(path), []
    assert reader.poll(told.append) == []
    sent = append_command(path, "set", {"node": "4", "param": "rate", "value": "0.1"})
    with path.open("ab") as file:
        file.write(b'{"id": "x", "command": "sa')
    (read,) = reader.poll(told.append)
    assert read == sent
    assert reader.poll(told.append) == []
    with path.open("ab") as file:
        file.write(b've"}\n')
    assert [(command.id, command.name) for command in reader.poll(told.append)] == [("x", "save")]
    assert told == []


def test_a_damaged_line_is_told_of_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "commands.jsonl"
    reader, told = CommandReader(path), []
    assert reader.poll(told.append) == []
    path.write_bytes(b'{"id": 1, "command": "save"}\n[1]\n{"id": "torn", "comm')
    sent = append_command(path, "save")
    assert reader.poll(told.append) == [sent]
    assert len(told) == 3
    assert "`id` is missing or no text" in told[0]
    assert all("damaged line" in text for text in told)
