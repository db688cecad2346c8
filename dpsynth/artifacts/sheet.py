"""Contact sheets: small images in labelled rows on one PNG, drawn by Pillow."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpsynth.artifacts.files import write_atomic
from dpsynth.errors import MissingError, UsageError

if TYPE_CHECKING:
    from PIL import ImageFont

    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Rows = Sequence[tuple[str, Sequence[Images]]]

CELL = 56  # least side of a drawn image, in pixels: small digits stay legible
COLUMNS = 10  # images of a row by class
SIDE = 256  # most of it: larger images are shrunk by a whole factor
ROWS = 20  # classes of a sheet by class
GAP = 3
MARGIN = 12
TEXT = 15
LINE = TEXT + 4  # of a title


def contact_sheet(
    rows: Sequence[tuple[str, Images]],
    path: Path,
    *,
    title: str = "",
    stamp: Mapping[str, str] | None = None,
) -> Path:
    """Draw rows of (title, images uint8 (n, H, W, C)) onto one PNG and write it atomically.

    Images smaller than `CELL` are enlarged by a whole factor, nearest neighbour, and those above
    `SIDE` shrunk, by the mean of each square. `title` may have
    several lines. `stamp` becomes PNG text fields. All images must have one shape.

    Raises:
        UsageError: nothing to draw, or images of several shapes.
        MissingError: Pillow is not installed.
    """
    return side_by_side([(name, [images]) for name, images in rows], [""], path, title, stamp)


def side_by_side(
    rows: Rows,
    headings: Sequence[str],
    path: Path,
    title: str = "",
    stamp: Mapping[str, str] | None = None,
) -> Path:
    """As `contact_sheet`, each row holding one group of images for each heading."""
    small = [(name, [shrunk(group) for group in groups]) for name, groups in rows]
    write_atomic(path, encode_png(_draw(small, headings, title), stamp or {}))
    return path


def shrunk(images: Images, side: int = SIDE) -> Images:
    """Images (n, H, W, C) of at most about `side`: means over squares, a rest at the edge left out.

    Those up to `side` as they are.
    """
    height, width = images.shape[1:3]
    factor = max(height, width) // side
    if factor < 2:
        return images
    rows, columns = max(1, height // factor), max(1, width // factor)
    kept = images[:, : rows * factor, : columns * factor]
    small: Images = np.empty((len(images), rows, columns, images.shape[3]), np.uint8)
    for target, image in zip(small, kept, strict=True):  # one at a time: bounds memory
        squares = image.reshape(rows, -1, columns, image.shape[1] // columns, image.shape[2])
        target[...] = np.rint(squares.mean(axis=(1, 3)))
    return small


def rows_by_class(
    images: Images,
    labels: Labels,
    classes: Sequence[str],
    columns: int = COLUMNS,
    limit: int = ROWS,
) -> list[tuple[str, Images]]:
    """The first `columns` images of each of the first `limit` classes, titled by class name."""
    return [
        (name, images[np.flatnonzero(labels == i)[:columns]])
        for i, name in enumerate(classes[:limit])
    ]


def encode_png(image: Images, stamp: Mapping[str, str]) -> bytes:
    """One image uint8 (H, W, 1 or 3) as PNG bytes with `stamp` as its text fields.

    Raises:
        MissingError: Pillow is not installed.
    """
    try:
        from PIL import Image as pillow  # noqa: N813
        from PIL.PngImagePlugin import PngInfo
    except ImportError:
        raise MissingError(
            "writing images needs Pillow, which is not installed", hint='pip install -e ".[torch]"'
        ) from None
    info = PngInfo()
    for key, text in stamp.items():
        info.add_text(key, text)
    out = io.BytesIO()
    flat = image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    pillow.fromarray(np.ascontiguousarray(flat)).save(out, "PNG", pnginfo=info)
    return out.getvalue()


@dataclass(frozen=True)
class _Grid:
    """Where things go on the sheet, in pixels."""

    scale: int
    step_x: int
    step_y: int
    left: int  # of the first image, right of the row titles
    head: int  # of the first row, below title and headings
    spans: tuple[int, ...]  # width of each group
    size: tuple[int, int]


def _grid(rows: Rows, headings: Sequence[str], title: str, font: "Font") -> _Grid:
    height, width = _shape(rows)
    scale = max(1, -(-CELL // max(height, width)))
    step_x, step_y = width * scale + GAP, height * scale + GAP
    most = [max([1, *(len(groups[g]) for _, groups in rows)]) for g in range(len(headings))]
    # A heading never runs into the next group.
    spans = tuple(
        max(count * step_x, int(font.getlength(heading)) + GAP)
        for count, heading in zip(most, headings, strict=True)
    )
    left = 2 * MARGIN + max([0, *(int(font.getlength(name)) for name, _ in rows)])
    lines = title.split("\n")
    head = MARGIN + (TEXT + MARGIN) * (bool(title) + any(headings)) + LINE * (len(lines) - 1)
    longest = max(int(font.getlength(line)) for line in lines)
    wide = max(left + sum(spans) + MARGIN * len(spans), longest + 2 * MARGIN)
    return _Grid(
        scale, step_x, step_y, left, head, spans, (wide, head + len(rows) * step_y + MARGIN)
    )


def _draw(rows: Rows, headings: Sequence[str], title: str) -> Images:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=TEXT)
    grid = _grid(rows, headings, title, font)
    sheet = Image.new("RGB", grid.size, "white")
    pen = ImageDraw.Draw(sheet)
    for n, line in enumerate(title.split("\n")):
        pen.text((MARGIN, MARGIN + n * LINE), line, fill="black", font=font)
    for r, (name, _) in enumerate(rows):
        middle = grid.head + r * grid.step_y + (grid.step_y - GAP) // 2
        pen.text((MARGIN, middle), name, fill="black", font=font, anchor="lm")
    canvas = np.array(sheet.convert("RGB"))
    left = grid.left
    for g, span in enumerate(grid.spans):
        for r, (_, groups) in enumerate(rows):
            for c, image in enumerate(groups[g]):
                _paste(canvas, image, grid.head + r * grid.step_y, left + c * grid.step_x, grid)
        left += span + MARGIN
    sheet = Image.fromarray(canvas)
    pen, left = ImageDraw.Draw(sheet), grid.left
    for heading, span in zip(headings, grid.spans, strict=True):
        pen.text((left, grid.head - TEXT - MARGIN // 2), heading, fill="black", font=font)
        left += span + MARGIN
    return np.asarray(sheet)


def _paste(canvas: Images, image: Images, top: int, left: int, grid: _Grid) -> None:
    pixels = np.repeat(np.repeat(image, grid.scale, axis=0), grid.scale, axis=1)
    canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels


def _shape(rows: Rows) -> tuple[int, int]:
    shapes = {group.shape[1:3] for _, groups in rows for group in groups if len(group)}
    if len(shapes) != 1:
        raise UsageError(f"a contact sheet needs images of one shape, got {len(shapes)} shapes")
    height, width = shapes.pop()
    return height, width
