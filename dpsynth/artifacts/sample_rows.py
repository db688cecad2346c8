"""Rows and pictures of an image folder: `metadata.csv`, and PNGs of one shape."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dpsynth.errors import DataError, UsageError

COLUMNS = ("file_name", "label", "text")

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


def checked(images: Images, labels: Labels, classes: int) -> tuple[Images, Labels]:
    """Images as uint8 (n, H, W, C), labels as int64 (n,).

    Raises UsageError where they do not fit.
    """
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
        raise UsageError(
            f"images are {images.dtype} {images.shape}, expected uint8 (n, H, W, 1 or 3)"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise UsageError(
            f"labels are {labels.dtype} {labels.shape}, expected integers ({len(images)},)"
        )
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise UsageError(f"labels lie outside the {classes} declared classes")
    return images, labels.astype(np.int64)


def write_pngs(
    folder: Path, names: Sequence[str], images: Images, stamp: Mapping[str, str]
) -> None:
    """Write images (n, H, W, C) under `names` in a folder; `stamp` becomes PNG text fields."""
    from dpsynth.artifacts.sheet import encode_png

    for name, image in zip(names, images, strict=True):
        (folder / name).write_bytes(encode_png(image, stamp))


def inside(folder: Path, name: str) -> Path:
    """The file of that name in a folder, which is not opened.

    Raises DataError where it leads out of the folder, or is no plain file.
    """
    try:
        path = (folder / name).resolve()
        plain = path.is_relative_to(folder.resolve()) and (path.is_file() or not path.exists())
    except (OSError, ValueError, RuntimeError):  # such as a name with a null character
        plain = False
    if not plain:
        raise DataError(f"metadata.csv names a file outside {folder}: {name[:100]!r}")
    return folder / name


def read_png(folder: Path, name: str, shape: tuple[int, int, int] | None) -> Images:
    """One image (H, W, C); size and mode are checked before a pixel is decoded.

    Raises DataError for a missing, damaged or foreign one, and for another `shape`.
    """
    from PIL import Image

    path = inside(folder, name)
    try:
        with Image.open(path) as image:
            channels = {"L": 1, "RGB": 3}.get(image.mode)
            found = (image.height, image.width, channels)
            if channels is None or (shape is not None and found != shape):
                raise DataError(
                    f"{path} is {image.height}x{image.width} {image.mode}, expected "
                    + ("L or RGB" if shape is None else "x".join(map(str, shape)))
                )
            pixels = np.asarray(image, dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"metadata.csv names {name!r}, which is missing in {folder}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is no readable image: {error}") from None
    return pixels.reshape(pixels.shape[0], pixels.shape[1], -1)


def to_csv(rows: Sequence[tuple[str, str, str]]) -> bytes:
    """Rows of `COLUMNS` as CSV, with their header."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    return out.getvalue().encode()


def from_csv(path: Path) -> list[dict[str, str]]:
    """Rows that `to_csv` wrote. Raises DataError for anything else."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream, strict=True)
            rows = list(reader)
            header = tuple(reader.fieldnames or ())
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no readable CSV: {error}") from None
    if header != COLUMNS or any(None in row or None in row.values() for row in rows):
        raise DataError(
            f"{path} has columns {', '.join(header)} or a broken row, expected {', '.join(COLUMNS)}"
        )
    return rows
