"""Writing files so that a reader, or a power cut, sees the old content or the new one and nothing between."""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.storage.errors import StorageError


def sync_file(path: Path) -> None:
    """Force a file's content to the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Force a directory's entries to the disk; does nothing on Windows, where directories cannot be synced."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Force every file and directory below `root`, and `root` itself, to the disk."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync_file(Path(folder, name))
        sync_directory(Path(folder))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by a file with `content`; the old file stays whole until the new one is.

    Raises:
        StorageError: the file cannot be written.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        msg = f"{path}: cannot be written ({error.strerror or error}). Free space or choose another directory."
        raise StorageError(msg) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` as indented JSON, atomically.

    Raises:
        StorageError: the file cannot be written.
    """
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of ours.

    Raises:
        StorageError: the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror or error})."
        raise StorageError(msg) from error
    except ValueError as error:
        msg = f"{path}: is not valid JSON ({error}). The file was damaged or edited; restore it from a copy."
        raise StorageError(msg) from error
    if not isinstance(value, dict):
        msg = f"{path}: holds a JSON {type(value).__name__}, expected an object."
        raise StorageError(msg)
    return value


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's content, as hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: Any) -> str:
    """The SHA-256 of a JSON value, as hexadecimal digits; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
