"""Prompt files: one prompt per line, or one JSON object per line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jagg.errors import JaggError


class PromptFileError(JaggError):
    """A prompt file cannot be used; the message names the file, the line and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptEntry:
    """A prompt with what a scorer may need to know of it."""

    prompt: str
    metadata: Mapping[str, Any]


def read_prompts(path: Path) -> list[PromptEntry]:
    """The prompts of a `.txt` file (one per line) or a `.jsonl` file (objects whose `prompt` is the text).

    Other keys of an object become its metadata. Empty lines are skipped; a byte-order mark is accepted.

    Raises:
        PromptFileError: another extension, no UTF-8, or a line that is no object with a `prompt`.
    """
    if path.suffix not in (".txt", ".jsonl"):
        msg = f"Prompt file {path.name!r}: expected a .txt or .jsonl file."
        raise PromptFileError(msg)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        msg = f"Prompt file {path.name!r}: byte {error.start} is not UTF-8; save the file as UTF-8."
        raise PromptFileError(msg) from error
    numbered = [
        (number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if path.suffix == ".txt":
        return [PromptEntry(prompt=line, metadata={}) for _, line in numbered]
    return [_entry(path, number, line) for number, line in numbered]


def _entry(path: Path, number: int, line: str) -> PromptEntry:
    where = f"Prompt file {path.name!r}, line {number}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        msg = f"{where}, column {error.colno}: no JSON ({error.msg}); expected one object per line."
        raise PromptFileError(msg) from error
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("prompt"), str)
        or not value["prompt"].strip()
    ):
        msg = f'{where}: expected an object with a non-empty text `prompt`, such as {{"prompt": "a red circle"}}.'
        raise PromptFileError(msg)
    prompt = value.pop("prompt").strip()
    return PromptEntry(prompt=prompt, metadata=value)
