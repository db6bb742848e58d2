"""Checkpoint directories: written aside, forced to the disk, renamed; a torn one is never picked up.

`tick-000050/` holds whatever the writer put there and `manifest.json`: format, tick, the writer's own notes, and
the size and SHA-256 of every other file. Tick 50 is the state after tick 50.
"""

import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.storage.errors import StorageError
from app.storage.files import file_digest, read_json, sync_directory, sync_tree, write_json

CHECKPOINT_FORMAT = 1
"""Version of the directory's layout; readers refuse a newer one."""

_NAME = re.compile(r"tick-(\d{6,})")
_MANIFEST = "manifest.json"
_ASIDE = ".aside-"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One checkpoint directory that has a readable manifest; its files are checked by `verify` alone."""

    path: Path
    tick: int
    about: Mapping[str, Any]
    """The writer's notes, JSON values."""
    files: Mapping[str, tuple[int, str]]
    """Size in bytes and SHA-256 by path within the directory."""


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path) -> None:
        """Use `directory`, which is made at the first write."""
        self._directory = directory

    @staticmethod
    def name(tick: int) -> str:
        """The directory name of a tick, such as `tick-000050`."""
        return f"tick-{tick:06d}"

    def write(
        self, tick: int, fill: Callable[[Path], None], *, about: Mapping[str, Any]
    ) -> CheckpointEntry:
        """Make the checkpoint of a tick; `fill` writes the files into the directory it is given.

        A checkpoint of the same tick is replaced. Whatever fails, nothing half-written carries a checkpoint's name.

        Raises:
            StorageError: a file cannot be written.
        """
        aside = self._directory / f"{_ASIDE}{self.name(tick)}-{secrets.token_hex(4)}"
        target = self._directory / self.name(tick)
        try:
            aside.mkdir(parents=True)
            fill(aside)
            files = {
                path.relative_to(aside).as_posix(): {
                    "bytes": path.stat().st_size,
                    "sha256": file_digest(path),
                }
                for path in sorted(aside.rglob("*"))
                if path.is_file()
            }
            manifest = {
                "format": CHECKPOINT_FORMAT,
                "tick": tick,
                "about": dict(about),
                "files": files,
            }
            write_json(aside / _MANIFEST, manifest)
            sync_tree(aside)
            self._put_in_place(aside, target)
        except OSError as error:
            msg = f"{target}: the checkpoint cannot be written ({error.strerror or error}). Free space and resume the run."
            raise StorageError(msg) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return _read_entry(target)

    def entries(self) -> list[CheckpointEntry]:
        """Checkpoints in tick order; directories without a readable manifest are left out."""
        found = []
        for path in self._directories():
            try:
                found.append(_read_entry(path))
            except StorageError:
                continue
        return sorted(found, key=lambda entry: entry.tick)

    def latest(self, report: Callable[[str], None] | None = None) -> CheckpointEntry | None:
        """The checkpoint with the highest tick whose files are all whole; None where there is none.

        `report` is told, in one sentence each, of those that had to be passed over.
        """
        for path in sorted(self._directories(), key=_tick_of, reverse=True):
            try:
                entry = _read_entry(path)
                verify(entry)
            except StorageError as error:
                if report is not None:
                    report(str(error))
                continue
            return entry
        return None

    def retain(self, keep: int, *, newest: int) -> list[int]:
        """Remove all but the `keep` latest checkpoints up to tick `newest`, 0 = remove none; returns the removed ticks.

        Later ones do not count: a resume has passed them over because they are damaged.
        """
        if keep <= 0:
            return []
        removed = []
        for entry in [entry for entry in self.entries() if entry.tick <= newest][:-keep]:
            # Renamed first: a removal that is cut short must not leave a directory with a checkpoint's name.
            aside = self._directory / f"{_ASIDE}{entry.path.name}-{secrets.token_hex(4)}"
            entry.path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            removed.append(entry.tick)
        return removed

    def remove_leftovers(self) -> None:
        """Remove what interrupted writers left behind."""
        for path in self._directory.glob(f"{_ASIDE}*") if self._directory.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)

    def _directories(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        return [
            path
            for path in self._directory.iterdir()
            if _NAME.fullmatch(path.name) and path.is_dir()
        ]

    def _put_in_place(self, aside: Path, target: Path) -> None:
        if target.exists():
            replaced = self._directory / f"{_ASIDE}replaced-{secrets.token_hex(4)}"
            target.rename(replaced)
            aside.rename(target)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            aside.rename(target)
        sync_directory(self._directory)


def verify(entry: CheckpointEntry) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        StorageError: a file is missing or differs.
    """
    for name, (size, digest) in entry.files.items():
        path = entry.path / name
        try:
            actual = path.stat().st_size
            whole = actual == size and file_digest(path) == digest
        except OSError as error:
            msg = f"{entry.path}: the checkpoint lacks {name} ({error.strerror or error}); it is not used."
            raise StorageError(msg) from error
        if not whole:
            msg = f"{entry.path}: {name} has {actual} bytes or content other than the {size} bytes recorded; it is not used."
            raise StorageError(msg)


def _read_entry(path: Path) -> CheckpointEntry:
    manifest = read_json(path / _MANIFEST)
    if manifest.get("format") != CHECKPOINT_FORMAT:
        msg = (
            f"{path}: checkpoint format {manifest.get('format')}, expected {CHECKPOINT_FORMAT}. "
            "It was written by another version of JAGG Studio."
        )
        raise StorageError(msg)
    try:
        files = {
            name: (int(item["bytes"]), str(item["sha256"]))
            for name, item in manifest["files"].items()
        }
        return CheckpointEntry(
            path=path, tick=int(manifest["tick"]), about=dict(manifest["about"]), files=files
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = (
            f"{path / _MANIFEST}: the manifest is damaged ({error!r}); the checkpoint is not used."
        )
        raise StorageError(msg) from error


def _tick_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1
