"""NPZ archives, read as a stream of blocks: never pickled objects, never a whole array."""

import math
import sys
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.planning.caption_rules import CaptionRule, caption_text
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import NpzSource
from dpsynth.readers.records import (
    NOT_PIXELS,
    BadRecord,
    Block,
    Image,
    Item,
    Record,
    UnreadableSourceError,
    block_rows,
    check_label,
    check_shape,
    gathered,
    labelled,
    unit_text,
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
    (NaN and infinity among them) is a BadRecord. The array `column` (n,) of text or whole numbers
    names privacy units. With `captions` the source's array of captions (n,) of text is read too;
    where they follow a template, there need be no labels. `unlabelled`: there are none to read, and
    each record's label is 0.
    """

    def __init__(
        self,
        source: NpzSource,
        classes: tuple[str, ...] | None,
        image: ImageShape | None,
        column: str | None = None,
        captions: CaptionRule | None = None,
        *,
        unlabelled: bool = False,
    ) -> None:
        self._source, self._declared, self._image = source, classes, image
        self._column, self._unlabelled = column, unlabelled
        self._captions = captions if source.captions is not None else None

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
        with self._opened() as arrays:
            yield from (item for _, item in self._read(arrays, None))
            _require_end(arrays)

    def blocks(self) -> Iterator[Block]:
        """See `BlockSource`. Raises as iteration does."""
        with self._opened() as arrays:
            images, labels = arrays.images, arrays.labels
            shape = _image_shape(images)
            count, most = images.shape[0], block_rows(shape)
            for start in range(0, count, most):
                block = min(most, count - start)
                done = (start + block) / count
                if labels is None or arrays.units or arrays.texts:
                    found = enumerate(arrays.rows(block), start=start)
                    items = [self._item(place, *row) for place, row in found]
                    yield gathered(items, shape, done)
                else:
                    rows = images.read(block).reshape(block, *shape)
                    numbers = labels.read(block)
                    pixels, fits = _all_bytes(rows)
                    yield labelled(
                        pixels, numbers, self._declared, first=start, done=done, fits=fits
                    )
            _require_end(arrays)

    def unit_names(self) -> Iterator[str]:
        """See `UnitSource`. Reads the array of names alone."""
        with self._opened() as arrays:
            units = arrays.units
            if units is None:
                return
            for start in range(0, units.shape[0], BLOCK):
                yield from map(unit_text, units.texts(min(BLOCK, units.shape[0] - start)))

    def select(self, places: Sequence[int]) -> Iterator[tuple[int, Item]]:
        """See `UnitSource`: reads up to the last place, and decodes what is asked for."""
        if places:
            with self._opened() as arrays:
                yield from self._read(arrays, places)

    @contextmanager
    def _opened(self) -> Iterator["_Arrays"]:
        """The archive's arrays, those that the plan declares."""
        source, captions = self._source, self._captions
        try:
            with ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(source.path))

                def rows(name: str | None) -> _Rows | None:
                    member = None if name is None else archive.open(f"{name}.npy")
                    return None if member is None else _Rows.of(stack.enter_context(member))

                unlabelled = captions is not None and captions.is_template
                unlabelled = unlabelled and f"{source.labels}.npy" not in archive.namelist()
                unlabelled = unlabelled or self._unlabelled
                images = _Rows.of(stack.enter_context(archive.open(f"{source.images}.npy")))
                arrays = _Arrays(
                    images,
                    rows(None if unlabelled else source.labels),
                    rows(self._column),
                    rows(None if captions is None else source.captions),
                )
                self._check(arrays)
                yield arrays
        except DAMAGE as error:
            raise UnreadableSourceError("npz", f"{type(error).__name__}: {error}") from error

    def _check(self, arrays: "_Arrays") -> None:
        images, labels = arrays.images, arrays.labels
        count = images.shape[:1]
        if images.dtype.kind != "f" and images.dtype != np.uint8:
            raise UnreadableSourceError("npz", f"images are {images.dtype}, need uint8 or float")
        if labels and (labels.dtype.kind not in "iu" or len(labels.shape) != 1):
            raise UnreadableSourceError("npz", "labels must be integers of shape (n,)")
        if len(images.shape) not in (3, 4) or (labels and labels.shape != count):
            raise UnreadableSourceError(
                "npz",
                f"images of shape {images.shape} beside labels of shape "
                f"{labels.shape if labels else count}",
            )
        if arrays.units and (arrays.units.dtype.kind not in "iuUS" or arrays.units.shape != count):
            raise UnreadableSourceError(
                "npz", f"{self._column} must be text or integers of shape {count}"
            )
        if arrays.texts and (arrays.texts.dtype.kind not in "US" or arrays.texts.shape != count):
            raise UnreadableSourceError(
                "npz", f"{self._source.captions} must be text of shape {count}"
            )
        check_shape("npz", _image_shape(images), self._image)

    def _read(self, arrays: "_Arrays", places: Sequence[int] | None) -> Iterator[tuple[int, Item]]:
        """Records with their places; of all places where none are named."""
        count = arrays.images.shape[0]
        end = count if places is None else places[-1] + 1
        most = min(BLOCK, block_rows(_image_shape(arrays.images)))
        for start in range(0, min(count, end), most):
            block = min(most, count - start)
            rows = arrays.rows(block)
            for place in _within(places, start, start + block):
                yield place, self._item(place, *rows[place - start])

    def _item(
        self, place: int, row: NDArray[Any], label: int | None, named: Any, text: Any
    ) -> Item:
        name, unit, caption = f"image {place}", unit_text(named), caption_text(text)
        reason = "" if label is None else check_label(label, self._declared)
        if not reason and self._column is not None and not unit:
            reason = f"no value in {self._column}"
        if not reason and self._captions is not None and not self._captions.lenient:
            label, reason = self._captions.judged(caption, label)
        if reason:
            return BadRecord(name, reason)
        image = _to_bytes(row)
        if image is None:
            return BadRecord(name, NOT_PIXELS)
        return Record(image, label or 0, unit, caption)


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

    def texts(self, rows: int) -> list[Any]:
        """The next rows as whole numbers or text; None for what is no Unicode, of a row alone."""
        values = self.read(rows)
        if self.dtype.kind == "U":
            # Beyond Unicode's end NumPy makes strings that end whatever looks at them.
            codes = values.view(values.dtype.byteorder + "u4").reshape(rows, -1)
            known = np.logical_and.reduce(codes <= sys.maxunicode, axis=1)
            return [v if k else None for v, k in zip(values.tolist(), known, strict=True)]
        return [_decoded(v) if isinstance(v, bytes) else v for v in values.tolist()]


@dataclass(frozen=True)
class _Arrays:
    """The members that are read side by side; None for what the archive need not have."""

    images: _Rows
    labels: _Rows | None
    units: _Rows | None
    texts: _Rows | None

    def rows(self, count: int) -> list[tuple[NDArray[Any], int | None, Any, Any]]:
        """The next records: image (H, W, C), label, unit and caption as the archive has them."""
        none: list[Any] = [None] * count
        images = self.images.read(count).reshape(count, *_image_shape(self.images))
        labels = self.labels.read(count).tolist() if self.labels else none
        units = self.units.texts(count) if self.units else none
        texts = self.texts.texts(count) if self.texts else none
        return list(zip(images, labels, units, texts, strict=True))

    def all(self) -> list[_Rows]:
        """Every member that is read."""
        every = (self.images, self.labels, self.units, self.texts)
        return [rows for rows in every if rows is not None]


def _within(places: Sequence[int] | None, start: int, end: int) -> Sequence[int]:
    """The ascending `places` from `start` to below `end`; all of them where none are named."""
    if places is None:
        return range(start, end)
    return places[bisect_left(places, start) : bisect_left(places, end)]


def _decoded(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        return readers[np.lib.format.read_magic(file)](file)
    except Exception as error:  # NumPy's parser of foreign headers promises no set of errors
        raise UnreadableSourceError("npz", f"array header: {type(error).__name__}") from error


def _image_shape(images: _Rows) -> tuple[int, int, int]:
    height, width, channels = (*images.shape[1:], 1)[:3]
    return height, width, channels


def _require_end(arrays: _Arrays) -> None:
    if any(array.file.read(1) for array in arrays.all()):
        raise UnreadableSourceError("npz", "bytes after the last declared value")


def _to_bytes(row: NDArray[Any]) -> Image | None:
    images, fits = _all_bytes(row[None])
    return images[0] if fits[0] else None


def _all_bytes(rows: NDArray[Any]) -> tuple[Image, NDArray[np.bool_]]:
    """Images (n, H, W, C) as bytes, and which of them (n,) have all pixels in range."""
    if rows.dtype == np.uint8:
        return rows, np.ones(len(rows), np.bool_)
    # False for NaN, so that it is refused too.
    fits = np.logical_and.reduce((rows >= 0) & (rows <= 1), axis=(1, 2, 3))
    chosen = np.where(fits[:, None, None, None], rows, 0).astype(np.float64)
    images: Image = np.rint(chosen * 255).astype(np.uint8)
    return images, fits
