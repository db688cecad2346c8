"""NPZ archives, read as a stream of blocks: never pickled objects, never a whole array."""

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import NpzSource
from dpsynth.readers.records import (
    BadRecord,
    Image,
    Item,
    Record,
    UnreadableSourceError,
    check_label,
    check_shape,
)

BLOCK = 1024
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,  # an encrypted member
    NotImplementedError,  # a compression that this Python lacks
    zipfile.BadZipFile,
    zlib.error,
)


class NpzReader:
    """Arrays `images` (n, H, W) or (n, H, W, C), uint8 or float in [0, 1], `labels` (n,) integer.

    A float image is scaled to 0..255 and rounded; one with a value that is not in [0, 1]
    (NaN and infinity among them) is a BadRecord.
    """

    def __init__(
        self, source: NpzSource, classes: tuple[str, ...] | None, image: ImageShape | None
    ) -> None:
        self._source, self._declared, self._image = source, classes, image

    def files(self) -> list[Path]:
        """The archive."""
        return [self._source.path]

    def ignored(self) -> list[str]:
        """Nothing: other arrays of the archive are not read."""
        return []

    def __iter__(self) -> Iterator[Item]:
        """Yield each image with its label.

        Raises:
            UnreadableSourceError: absent, damaged or foreign archive; an absent array; counts,
                types or an image shape that differ from what is declared.
        """
        try:
            with ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(self._source.path))
                names = (self._source.images, self._source.labels)
                members = [stack.enter_context(archive.open(f"{name}.npy")) for name in names]
                images, labels = (_Rows.of(member) for member in members)
                yield from self._read(images, labels)
                if any(member.read(1) for member in members):
                    raise UnreadableSourceError("npz", "bytes after the last declared value")
        except DAMAGE as error:
            raise UnreadableSourceError("npz", f"{type(error).__name__}: {error}") from error

    def _read(self, images: "_Rows", labels: "_Rows") -> Iterator[Item]:
        if images.dtype.kind != "f" and images.dtype != np.uint8:
            raise UnreadableSourceError("npz", f"images are {images.dtype}, need uint8 or float")
        if labels.dtype.kind not in "iu" or len(labels.shape) != 1:
            raise UnreadableSourceError("npz", "labels must be integers of shape (n,)")
        if len(images.shape) not in (3, 4) or images.shape[0] != labels.shape[0]:
            raise UnreadableSourceError(
                "npz", f"images of shape {images.shape} beside labels of shape {labels.shape}"
            )
        count, height, width, channels = (*images.shape, 1)[:4]
        check_shape("npz", (height, width, channels), self._image)
        for start in range(0, count, BLOCK):
            block = min(BLOCK, count - start)
            rows = images.read(block).reshape(block, height, width, channels)
            for offset, label in enumerate(labels.read(block).tolist()):
                yield self._item(f"image {start + offset}", rows[offset], label)

    def _item(self, name: str, row: NDArray[Any], label: int) -> Item:
        reason = check_label(label, self._declared)
        if reason:
            return BadRecord(name, reason)
        image = _to_bytes(row)
        if image is None:
            return BadRecord(name, "pixels must lie in [0, 1] where images are floats")
        return Record(image, label)


@dataclass(frozen=True)
class _Rows:
    """One member of the archive, read a few rows at a time."""

    file: IO[bytes]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, file: IO[bytes]) -> "_Rows":
        shape, fortran, dtype = _array_header(file)
        if dtype.hasobject or dtype.names or dtype.subdtype:
            raise UnreadableSourceError("npz", f"an array of {dtype}: objects are never loaded")
        if fortran and len(shape) > 1:
            raise UnreadableSourceError("npz", "Fortran order: save np.ascontiguousarray(images)")
        if any(size < 1 for size in shape[1:]) or not shape or shape[0] < 0:
            raise UnreadableSourceError("npz", f"an array of shape {shape}")
        return cls(file, tuple(shape), dtype)

    def read(self, rows: int) -> NDArray[Any]:
        size = rows * math.prod(self.shape[1:]) * self.dtype.itemsize
        pieces, left = [], size
        while left:
            piece = self.file.read(min(left, 1 << 24))
            if not piece:
                raise EOFError("the array ends before its declared size")
            pieces.append(piece)
            left -= len(piece)
        values: NDArray[Any] = np.frombuffer(b"".join(pieces), dtype=self.dtype)
        return values.reshape(rows, *self.shape[1:])


def _array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        return readers[np.lib.format.read_magic(file)](file)
    except Exception as error:  # NumPy's parser of foreign headers promises no set of errors
        raise UnreadableSourceError("npz", f"array header: {type(error).__name__}") from error


def _to_bytes(row: NDArray[Any]) -> Image | None:
    if row.dtype == np.uint8:
        return row
    # False for NaN, so that it is refused too.
    if not bool(np.all((row >= 0) & (row <= 1))):
        return None
    image: Image = np.rint(row.astype(np.float64) * 255).astype(np.uint8)
    return image
