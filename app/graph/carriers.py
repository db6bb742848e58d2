"""Files that carry a workflow beside their own content: PNG images and safetensors weights."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final

from app.graph.errors import WorkflowError

PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
# Above this nothing of ours writes, and a broken length must not make us read gigabytes.
LARGEST_PART: Final = 32 * 2**20

# What is looked for, best first: the drawing, then the prompt.
KEYS: Final = ("workflow", "prompt")


def carried_text(path: Path) -> str | None:
    """The workflow JSON inside a PNG or safetensors file; None for a file of another kind.

    Raises:
        WorkflowError: the file is of such a kind, but damaged or without a workflow.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(9)
        file.seek(0)
        if start.startswith(PNG_SIGNATURE):
            texts = _png_texts(file, path.name)
        elif start[8:9] == b"{" and path.suffix == ".safetensors":
            texts = _safetensors_texts(file, path.name)
        else:
            return None
    for key in KEYS:
        if key in texts:
            return texts[key]
    msg = f"{path.name} carries no workflow (no `workflow` and no `prompt` in its metadata)."
    raise WorkflowError(msg)


def _png_texts(file: BinaryIO, name: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    file.seek(len(PNG_SIGNATURE))
    while True:
        head = file.read(8)
        if len(head) < 8:
            break
        length, kind = struct.unpack(">I4s", head)
        if kind == b"IEND":
            break
        if kind not in (b"tEXt", b"iTXt", b"zTXt"):
            file.seek(length + 4, 1)
            continue
        if length > LARGEST_PART:
            msg = f"{name}: a text of the image is larger than {LARGEST_PART // 2**20} MiB; the file is damaged."
            raise WorkflowError(msg)
        body = file.read(length)
        file.seek(4, 1)
        try:
            key, text = _png_text(kind, body)
        except (ValueError, zlib.error) as error:
            msg = f"{name}: a text of the image cannot be read: {error}."
            raise WorkflowError(msg) from error
        texts[key] = text
    return texts


def _png_text(kind: bytes, body: bytes) -> tuple[str, str]:
    key, _, rest = body.partition(b"\0")
    if kind == b"zTXt":
        return key.decode("latin-1"), _inflate(rest[1:]).decode("utf-8")
    if kind == b"iTXt":
        packed = rest[:1] == b"\x01"
        text = rest[2:].split(b"\0", 2)[-1]
        return key.decode("latin-1"), (_inflate(text) if packed else text).decode("utf-8")
    return key.decode("latin-1"), rest.decode("utf-8")


def _inflate(packed: bytes) -> bytes:
    machine = zlib.decompressobj()
    text = machine.decompress(packed, LARGEST_PART)
    if machine.unconsumed_tail:
        msg = f"it unpacks to more than {LARGEST_PART // 2**20} MiB"
        raise ValueError(msg)
    return text


def _safetensors_texts(file: BinaryIO, name: str) -> dict[str, str]:
    (length,) = struct.unpack("<Q", file.read(8))
    header = file.read(length) if length <= LARGEST_PART else b""
    try:
        content: Any = json.loads(header)
    except (ValueError, RecursionError) as error:
        msg = f"{name}: the header of the safetensors file cannot be read; the file is damaged."
        raise WorkflowError(msg) from error
    metadata = content.get("__metadata__") if isinstance(content, dict) else None
    texts = metadata if isinstance(metadata, dict) else {}
    return {key: value for key, value in texts.items() if isinstance(value, str)}
