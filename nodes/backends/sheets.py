"""Contact sheets: images of a prompt group, an evaluation set, or before beside after, as one picture.

Axes: N images; C, H, W channels, height and width.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

_MARGIN = 4
_LINE = 14
_CAPTION_LINES = 5
_INK = (32, 32, 36)
_PAPER = (250, 250, 250)
_RIGHT = (0, 128, 72)
_WRONG = (190, 70, 30)


def to_pictures(images: Tensor, *, height: int) -> list[Image.Image]:
    """Pillow images of a batch, enlarged by a whole factor with hard pixel edges up to about `height` pixels.

    Shape: images (N, C, H, W), float in [0, 1], C = 3 or 4.
    """
    array = (images.detach().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    factor = max(1, height // array.shape[1])
    return [
        Image.fromarray(np.kron(a, np.ones((factor, factor, 1), dtype=np.uint8))) for a in array
    ]


def group_sheet(
    images: Tensor, values: Sequence[float] | None, caption: str, *, height: int = 72
) -> Image.Image:
    """The images of one prompt side by side, each with its reward, under the prompt.

    Shape: images (G, C, H, W), float in [0, 1]. A NaN value is written "not scored".
    """
    pictures = to_pictures(images, height=height)
    wide, tall = pictures[0].size
    sheet = _paper(len(pictures) * (wide + _MARGIN) + _MARGIN, tall + 2 * _MARGIN + 2 * _LINE)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (_MARGIN, 1), caption, sheet.width - 2 * _MARGIN, _INK)
    for i, picture in enumerate(pictures):
        left = _MARGIN + i * (wide + _MARGIN)
        sheet.paste(picture, (left, _LINE + _MARGIN))
        if values is not None:
            text = "not scored" if values[i] != values[i] else f"{values[i]:.3f}"
            _write(draw, (left, tall + _LINE + _MARGIN + 1), text, wide, _INK)
    return sheet


def grid(
    images: Tensor,
    captions: Sequence[str],
    marks: Sequence[float] | None,
    *,
    columns: int = 8,
    height: int = 72,
) -> Image.Image:
    """Images in rows, captions below, framed green where `marks` is at least one half and orange where it is less.

    Shape: images (N, C, H, W), float in [0, 1]; captions and marks of length N.
    """
    pictures = to_pictures(images, height=height)
    wide, tall = pictures[0].size
    cell_wide, cell_tall = wide + 2 * _MARGIN, tall + 2 * _MARGIN + _CAPTION_LINES * (_LINE - 3)
    rows = -(-len(pictures) // columns)
    sheet = _paper(columns * cell_wide, rows * cell_tall)
    draw = ImageDraw.Draw(sheet)
    for i, picture in enumerate(pictures):
        left, top = (i % columns) * cell_wide + _MARGIN, (i // columns) * cell_tall + _MARGIN
        if marks is not None and marks[i] == marks[i]:
            frame = (left - 2, top - 2, left + wide + 1, top + tall + 1)
            draw.rectangle(frame, fill=_RIGHT if marks[i] >= 0.5 else _WRONG)
        sheet.paste(picture, (left, top))
        for line, text in enumerate(_wrap(captions[i], wide)[:_CAPTION_LINES]):
            _write(draw, (left, top + tall + 1 + line * (_LINE - 3)), text, wide, _INK)
    return sheet


def side_by_side(left: Image.Image, right: Image.Image, titles: tuple[str, str]) -> Image.Image:
    """Two pictures beside each other under their titles."""
    gap = 6 * _MARGIN
    sheet = _paper(left.width + gap + right.width, max(left.height, right.height) + 2 * _LINE)
    draw = ImageDraw.Draw(sheet)
    for picture, x, title in ((left, 0, titles[0]), (right, left.width + gap, titles[1])):
        _write(draw, (x + _MARGIN, _MARGIN), title, picture.width, _INK, size=13)
        sheet.paste(picture, (x, 2 * _LINE))
    return sheet


def file_name(node: str) -> str:
    """A node id as part of a file name: cards inside subgraphs have ids such as 194:45, which Windows does not take."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", node)


def save_sheet(sheet: Image.Image, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a PNG that carries JSON texts (`prompt`, `workflow`), so that the picture brings its workflow back.

    PNG text is Latin-1, so other letters are escaped as JSON does it.
    """
    chunks = PngInfo()
    for name, text in metadata.items():
        chunks.add_text(name, text if text.isascii() else json.dumps(json.loads(text)))
    sheet.save(path, pnginfo=chunks)


def _paper(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), _PAPER)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _wrap(text: str, width: int) -> list[str]:
    font, lines, line = _font(9), [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    return [*lines, line]


def _write(
    draw: ImageDraw.ImageDraw,
    at: tuple[int, int],
    text: str,
    width: int,
    ink: tuple[int, int, int],
    size: int = 9,
) -> None:
    """Write one line, cut off with an ellipsis where it would be wider than `width` pixels."""
    font = _font(size)
    if font.getlength(text) > width:
        while text and font.getlength(text + "…") > width:
            text = text[:-1]
        text += "…"
    draw.text(at, text, fill=ink, font=font)
