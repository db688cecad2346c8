"""IDX pairs (MNIST's format), gzipped or not, read as a stream of blocks.

A file is two zero bytes, a type byte (8: unsigned byte), the number of dimensions, each
dimension as a big-endian 32-bit number, then the values in C order.
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import IdxSource
from dpsynth.readers.records import (
    BadRecord,
    Block,
    Image,
    Item,
    Record,
    UnreadableSourceError,
    block_rows,
    check_label,
    check_shape,
    labelled,
)

DAMAGE = (OSError, EOFError, zlib.error)
_Part = tuple[int, Image, NDArray[np.uint8], float]


class IdxReader:
    """An IDX image file (n, H, W) or (n, H, W, C) of bytes beside a label file (n,) of bytes."""

    def __init__(
        self, source: IdxSource, classes: tuple[str, ...] | None, image: ImageShape | None
    ) -> None:
        self._source, self._declared, self._image = source, classes, image

    def files(self) -> list[Path]:
        """The two files."""
        return [self._source.images, self._source.labels]

    def ignored(self) -> list[str]:
        """Nothing: an IDX pair has no foreign files."""
        return []

    def __iter__(self) -> Iterator[Item]:
        """Yield each image with its label.

        Raises:
            UnreadableSourceError: absent, truncated or foreign file; counts that differ; images
                of another shape than declared.
        """
        for start, rows, labels, _ in self._parts():
            for offset, label in enumerate(labels.tolist()):
                reason = check_label(label, self._declared)
                yield (
                    BadRecord(f"image {start + offset}", reason)
                    if reason
                    else Record(rows[offset], label)
                )

    def blocks(self) -> Iterator[Block]:
        """See `BlockSource`. Raises as iteration does."""
        for start, rows, labels, done in self._parts():
            yield labelled(rows, labels, self._declared, first=start, done=done)

    def _parts(self) -> Iterator[_Part]:
        """First row, images, labels and the share read, by blocks.

        Read and not mapped into memory: as fast, and a disk that fails is an error, no signal.
        """
        try:
            with ExitStack() as stack:
                images = stack.enter_context(_open(self._source.images))
                labels = stack.enter_context(_open(self._source.labels))
                yield from self._read(images, labels)
        except DAMAGE as error:
            raise UnreadableSourceError("idx", f"{type(error).__name__}: {error}") from error

    def _read(self, images: BinaryIO, labels: BinaryIO) -> Iterator[_Part]:
        count, *shape = _header(images, (3, 4), "images")
        (label_count,) = _header(labels, (1,), "labels")
        if count != label_count:
            raise UnreadableSourceError("idx", f"{count} images beside {label_count} labels")
        height, width, channels = (*shape, 1)[:3]
        check_shape("idx", (height, width, channels), self._image)
        size = height * width * channels
        most = block_rows((height, width, channels))
        for start in range(0, count, most):
            block = min(most, count - start)
            pixels = np.frombuffer(_exactly(images, block * size), dtype=np.uint8)
            numbers = np.frombuffer(_exactly(labels, block), dtype=np.uint8)
            rows = pixels.reshape(block, height, width, channels)
            yield start, rows, numbers, (start + block) / count
        if images.read(1) or labels.read(1):
            raise UnreadableSourceError("idx", "bytes after the last declared value")


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else path.open("rb")  # type: ignore[return-value]


def _header(file: BinaryIO, dimensions: tuple[int, ...], what: str) -> tuple[int, ...]:
    zeros, kind, count = (magic := _exactly(file, 4))[:2], magic[2], magic[3]
    if zeros != b"\0\0" or kind != 8 or count not in dimensions:
        expected = " or ".join(f"{(8 << 8) + n:#010x}" for n in dimensions)
        raise UnreadableSourceError(
            "idx", f"{what} file starts with 0x{magic.hex()}, expected {expected}"
        )
    values = np.frombuffer(_exactly(file, 4 * count), dtype=">u4")
    if math.prod(int(value) for value in values[1:]) == 0:
        raise UnreadableSourceError("idx", f"{what} file declares images without pixels")
    return tuple(int(value) for value in values)


def _exactly(file: BinaryIO, size: int) -> bytes:
    """Read `size` bytes in bounded pieces: a header may lie about what follows."""
    pieces, left = [], size
    while left:
        piece = file.read(min(left, 1 << 24))
        if not piece:
            raise EOFError("the file ends before its declared size")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
