"""What a reader yields: records, records that do not fit, and sources that cannot be read."""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import DataError
from dpsynth.planning.schema import ImageShape

Image = NDArray[np.uint8]
# The largest public image that is read where no shape is declared.
MOST_PIXELS = 1 << 24
NOT_PIXELS = "pixels must lie in [0, 1] where images are floats"
_BLOCK_ROWS, _BLOCK_BYTES = 1 << 12, 1 << 24


@dataclass(frozen=True, eq=False)
class Record:
    """One labelled image: `image` uint8 (H, W, C), `label` an index into the classes.

    `unit`: name of the privacy unit that it belongs to; empty where it is a unit by itself.
    `text`: its caption, of a source that is read with captions.
    """

    image: Image
    label: int
    unit: str = ""
    text: str = ""


@dataclass(frozen=True)
class BadRecord:
    """A record that does not fit its declaration. Both fields are for the curator room alone."""

    name: str
    reason: str


Item = Record | BadRecord


class UnreadableSourceError(DataError):
    """A source as a whole cannot be read; no record of it is usable.

    The message names no file and no value of the data; `detail` may, and belongs in the
    curator room (or on the terminal, where the source is public). Exit code 5.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(
            f"the {kind} source cannot be read as declared",
            hint="run `dpsynth check RUN` and read curator/check.json",
        )
        self.detail = detail


@dataclass(frozen=True, eq=False)
class Block:
    """Records side by side, in the source's order, without an object for each of them.

    `images` uint8 (n, H, W, C), `labels` int64 (n,); n may be 0. `bad`: what lay between them and
    is no record. `done`: share of the source that is read by now, from 0 to 1. `texts`: captions
    of the records, of a source that is read with captions.
    """

    images: Image
    labels: NDArray[np.int64]
    bad: tuple[BadRecord, ...] = ()
    done: float = 0.0
    texts: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """How many records there are, n."""
        return len(self.labels)

    def only(self, chosen: NDArray[np.bool_]) -> "Block":
        """The records that `chosen` (n,) marks, and the same bad ones."""
        if chosen.all():
            return self
        texts = None if self.texts is None else tuple(compress(self.texts, chosen))
        return Block(self.images[chosen], self.labels[chosen], self.bad, self.done, texts)


class RecordSource(Protocol):
    """An opened source. Iterating it again reads it again; one bad record never ends it.

    Iteration raises UnreadableSourceError where the source as a whole is damaged.
    """

    def __iter__(self) -> Iterator[Item]:
        """Yield each record, or why it is none, in the source's own order."""
        ...

    def files(self) -> list[Path]:
        """Every file that the source is read from; empty for a built-in one."""
        ...

    def ignored(self) -> list[str]:
        """Names of hidden and foreign files that were passed over (curator room alone)."""
        ...


@runtime_checkable
class BlockSource(Protocol):
    """A source of one image shape that is read by blocks; the same records as by iteration."""

    def blocks(self) -> Iterator[Block]:
        """Yield all records, in the source's own order, a few megabytes at a time.

        Raises:
            UnreadableSourceError: the source as a whole is damaged.
        """
        ...


class UnitSource(RecordSource, Protocol):
    """A source whose records name their privacy unit. A record without a name is bad.

    A record's place is its number, from 0, in the source's own order.
    """

    def unit_names(self) -> Iterator[str]:
        """Name of the unit at each place, empty for none. Reads no image.

        Raises:
            UnreadableSourceError: the source as a whole is damaged.
        """
        ...

    def select(self, places: Sequence[int]) -> Iterator[tuple[int, Item]]:
        """The records at `places`, ascending, each with its place. Decodes no other image.

        Raises:
            UnreadableSourceError: the source as a whole is damaged.
        """
        ...


def blocks_of(source: RecordSource, shape: tuple[int, int, int]) -> Iterator[Block]:
    """The records of a source, all of `shape` (H, W, C), by blocks.

    Raises:
        UnreadableSourceError: the source as a whole is damaged.
    """
    if isinstance(source, BlockSource):
        yield from source.blocks()
        return
    items, rows = iter(source), block_rows(shape)
    while part := list(islice(items, rows)):
        yield gathered(part, shape)


def gathered(items: Sequence[Item], shape: tuple[int, int, int], done: float = 0.0) -> Block:
    """A block of these items, their images all of `shape` (H, W, C)."""
    records = [item for item in items if isinstance(item, Record)]
    images = np.empty((len(records), *shape), dtype=np.uint8)
    for row, record in zip(images, records, strict=True):
        row[...] = record.image
    labels = np.array([record.label for record in records], dtype=np.int64)
    bad = tuple(item for item in items if isinstance(item, BadRecord))
    texts = tuple(record.text for record in records)
    return Block(images, labels, bad, done, texts if any(texts) else None)


def block_rows(shape: tuple[int, int, int]) -> int:
    """Rows of a block of images (H, W, C): a few megabytes, at least one row."""
    return max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // math.prod(shape)))


def unit_text(value: object) -> str:
    """A unit's name as it is compared: text, or a whole number as text; empty where it is none.

    Invisible characters and outer spaces go, and equal characters are spelt alike (Unicode's NFKC):
    a name that was typed in two ways would make two units of one, each with a contribution of its
    own. Merging two names is safe.

    >>> unit_text(7), unit_text(" p7 "), unit_text("7.0"), unit_text(7.0), unit_text(True)
    ('7', 'p7', '7.0', '', '')
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        return ""
    seen = (x for x in str(value) if unicodedata.category(x) not in ("Cc", "Cf"))
    return unicodedata.normalize("NFKC", "".join(seen)).strip()


def check_shape(kind: str, found: tuple[int, int, int], declared: ImageShape | None) -> None:
    """Refuse a source whose header gives all its images another shape than declared.

    Raises:
        UnreadableSourceError: `found` (H, W, C) differs from `declared`, or is no image shape.
    """
    if declared is None:
        if found[2] in (1, 3) and min(found) > 0 and found[0] * found[1] <= MOST_PIXELS:
            return
        raise UnreadableSourceError(kind, f"images of shape {found}, expected 1 or 3 channels")
    expected = (declared.height, declared.width, declared.channels)
    if found != expected:
        raise UnreadableSourceError(kind, f"images of shape {found}, declared {expected}")


def labelled(
    images: Image,
    numbers: NDArray[Any],
    classes: tuple[str, ...] | None,
    *,
    first: int,
    done: float,
    fits: NDArray[np.bool_] | None = None,
) -> Block:
    """A block of rows by their integer labels (n,); images and labels that do not fit are bad.

    `first`: number of the first row in its source. `fits` (n,): False for pixels out of range.
    """
    most = np.iinfo(np.int64).max if classes is None else len(classes) - 1
    known = (numbers >= 0) & (numbers <= most)
    good = known if fits is None else known & fits
    if good.all():
        return Block(images, numbers.astype(np.int64), (), done)
    bad = tuple(
        BadRecord(f"image {first + row}", check_label(int(numbers[row]), classes) or NOT_PIXELS)
        for row in np.flatnonzero(~good).tolist()
    )
    return Block(images[good], numbers[good].astype(np.int64), bad, done)


def check_label(label: int, classes: tuple[str, ...] | None) -> str:
    """Why an integer label is no index into the declared classes; empty where it is one."""
    if label < 0:
        return f"label {label} is negative"
    if classes is not None and label >= len(classes):
        return f"label {label} is undeclared: the plan declares {len(classes)} classes"
    return ""
