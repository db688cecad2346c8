"""Private records as privacy units, read afresh from the custodian's own files each time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpsynth.planning.schema import ImageShape
from dpsynth.readers import (
    BadRecord,
    Block,
    Item,
    Record,
    RecordSource,
    UnitSource,
    block_rows,
    blocks_of,
    gathered,
)
from dpsynth.vault.grouping import Unit, grouped

HELD_BYTES = 2**28
"""Images that grouping holds at once, but for one unit's own: they always lie together."""


class PrivacyUnits(Protocol):
    """Privacy units to be iterated, each a list of its records: what a mechanism takes.

    `most`: records of a unit at most; None where each record is a unit by itself.
    """

    @property
    def most(self) -> int | None:
        """See the class."""
        ...

    def records(self) -> Iterator[Unit]:
        """The units; iterating anew reads them anew."""
        ...


@dataclass(frozen=True)
class Units:
    """The privacy units on one side of the split. Holds no record between passes.

    A unit is a list of records, one where the plan's unit is a record: a mechanism bounds a
    unit's whole contribution. A record that does not fit the plan contributes nothing.
    `keep` says whether an item is on this side; `rows` the same of a whole block's records.
    """

    source: RecordSource
    image: ImageShape
    keep: Callable[[Item], bool] = field(default=lambda _: True)
    rows: Callable[[Block], NDArray[np.bool_]] | None = field(default=None, kw_only=True)

    @property
    def most(self) -> int | None:
        """Records of a unit at most; None where each record is a unit by itself."""
        return None

    def items(self) -> Iterator[Item]:
        """Every record of this side in the source's order, and every bad one in its place."""
        return (item for item in self.source if self.keep(item))

    def records(self) -> Iterator[Unit]:
        """The units; a bad record is dropped.

        Raises:
            UnreadableSourceError: the source as a whole is damaged.
        """
        return ([item] for item in self.items() if isinstance(item, Record))

    def blocks(self) -> Iterator[Block]:
        """All records of this side by blocks, in the order of `items`; no object for each record.

        Raises:
            UnreadableSourceError: the source as a whole is damaged.
        """
        if self.rows is None:
            items = self.items()
            while part := list(islice(items, block_rows(self._shape))):
                yield gathered(part, self._shape)
            return
        for block in blocks_of(self.source, self._shape):
            yield block.only(self.rows(block))

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """All records at once, unit or not: images uint8 (n, H, W, C) and labels int64 (n,)."""
        parts = [gathered([], self._shape), *self.blocks()]
        images = np.concatenate([part.images for part in parts])
        return images, np.concatenate([part.labels for part in parts])

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.image.height, self.image.width, self.image.channels

    @property
    def bad(self) -> list[BadRecord]:
        """The records that do not fit the plan; names and reasons are for the curator room."""
        return [item for item in self.items() if isinstance(item, BadRecord)]


@dataclass(frozen=True)
class NamedUnits(Units):
    """Units of the records that share a name, `images` of each at most.

    `named` says whether a name is on this side. Grouping takes a pass over the names, then one
    over the records, or several where units lie so scattered that more than HELD_BYTES would be
    held (`vault.grouping`).
    """

    source: UnitSource
    images: int = 1
    named: Callable[[str], bool] = field(default=lambda _: True)

    @property
    def most(self) -> int | None:
        """See the base class."""
        return self.images

    def records(self) -> Iterator[Unit]:
        """The units, in the order in which they are complete; bad records are dropped."""
        most = max(1, HELD_BYTES // math.prod(self._shape))
        return grouped(self.source, self.images, self.named, most)
