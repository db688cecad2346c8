"""A confusion matrix as a picture: one row a true class, shaded by the share of its records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.files import write_changed
from dpsynth.artifacts.sheet import MARGIN, TEXT, encode_png

if TYPE_CHECKING:
    from PIL import ImageFont

    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

CELL = 48
MANY = 24
"""Classes from which on cells are small, without names and numbers."""
_SIDE = 1200  # of a matrix of many classes, at most, down to one pixel a class
_INK = np.array([24.0, 70.0, 140.0])
_LINE = TEXT + 4
_NAME = 14  # letters of a class name that are drawn


def row_shares(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares (Y, Y) of each row's records, cut to [0, 1]: on the diagonal, the recall.

    Negative counts, which noise makes, stay in the sum of their row, so that it has no bias. A row
    whose sum is not positive has no shares: zeros.

    >>> row_shares(np.array([[3.0, 1.0], [9.0, -1.0], [-2.0, -1.0]])).tolist()
    [[0.75, 0.25], [1.0, 0.0], [0.0, 0.0]]
    """
    rows = counts.sum(axis=1, keepdims=True)
    found = np.divide(counts, rows, out=np.zeros_like(counts), where=rows > 0)
    clipped: NDArray[np.float64] = np.clip(found, 0.0, 1.0)
    return clipped


def draw_matrix(
    counts: NDArray[np.float64],
    classes: Sequence[str],
    path: Path,
    *,
    noise: float = 0.0,
    heads: Sequence[str] = (),
    stamp: Mapping[str, str] | None = None,
) -> Path:
    """Draw counts (Y, Y), true classes by row and answers by column, and write a PNG atomically.

    Each cell says its count and is shaded by its share of the row; a count within two `noise`
    (standard deviations) of nothing is grey. `heads`: lines of text above it; `stamp` becomes PNG
    text fields. A file that holds this very picture is left alone.

    Raises MissingError: Pillow is not installed.
    """
    write_changed(path, encode_png(_drawn(counts, noise, list(classes), heads), stamp or {}))
    return path


def _drawn(
    counts: NDArray[np.float64], noise: float, classes: list[str], heads: Sequence[str]
) -> NDArray[np.uint8]:
    from PIL import Image, ImageDraw, ImageFont

    shares = row_shares(counts)
    font = ImageFont.load_default(size=TEXT)
    many = len(classes) >= MANY
    cell = max(1, min(CELL, _SIDE // len(classes))) if many else CELL
    names = [] if many else [name[:_NAME] for name in classes]
    left = 2 * MARGIN + max([0, *(int(font.getlength(name)) for name in names)])
    top, side = 2 * MARGIN + (len(heads) + 1) * _LINE, len(classes) * cell
    wide = max([left + side, *(MARGIN + int(font.getlength(text)) for text in heads)])
    canvas = np.full((top + side + MARGIN, wide + MARGIN, 3), 255, np.uint8)
    colours = (255 + (_INK - 255) * shares[..., None]).astype(np.uint8)
    pixels = colours.repeat(cell, axis=0).repeat(cell, axis=1)
    canvas[top : top + side, left : left + side] = pixels
    sheet = Image.fromarray(canvas)
    pen = ImageDraw.Draw(sheet)
    for number, text in enumerate(heads):
        pen.text((MARGIN, MARGIN + number * _LINE), text, fill="black", font=font)
    for y, name in enumerate(names):
        middle = top + y * cell + cell // 2
        pen.text((MARGIN, middle), name, fill="black", font=font, anchor="lm")
        above = (left + y * cell + cell // 2, top - 4)
        pen.text(above, _fitting(name, font, cell), fill="black", font=font, anchor="ms")
        for c, count in enumerate(counts[y].tolist()):
            ink = "white" if shares[y, c] > 0.5 else "black"
            ink = ink if abs(count) >= 2 * noise else "darkgray"
            at = (left + c * cell + cell // 2, middle)
            pen.text(at, str(round(count)), fill=ink, font=font, anchor="mm")
    return np.asarray(sheet)


def _fitting(name: str, font: "Font", width: int) -> str:
    """As much of a name as a column is wide."""
    while name and font.getlength(name) > width - 2:
        name = name[:-1]
    return name
