"""Private records as privacy units, read afresh from the custodian's own files each time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpsynth.planning.schema import ImageShape
from dpsynth.readers import BadRecord, Item, Record, RecordSource

Unit = list[Record]


@dataclass(frozen=True)
class Units:
    """The privacy units on one side of the split. Holds no record between passes.

    A unit is a list of records (one, for now): a mechanism bounds a unit's whole
    contribution. A record that does not fit the plan contributes nothing.
    """

    source: RecordSource
    image: ImageShape
    keep: Callable[[Item], bool] = field(default=lambda _: True)

    def items(self) -> Iterator[Item]:
        """Every record of this side in the source's order, and every bad one in its place."""
        return (item for item in self.source if self.keep(item))

    def records(self) -> Iterator[Unit]:
        """The units; a bad record is dropped.

        Raises:
            UnreadableSourceError: the source as a whole is damaged.
        """
        return ([item] for item in self.items() if isinstance(item, Record))

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """All records at once: images uint8 (n, H, W, C) and labels int64 (n,)."""
        shape = (self.image.height, self.image.width, self.image.channels)
        records = [record for unit in self.records() for record in unit]
        images = np.zeros((len(records), *shape), dtype=np.uint8)
        for row, record in zip(images, records, strict=True):
            row[...] = record.image
        return images, np.array([record.label for record in records], dtype=np.int64)

    @property
    def bad(self) -> list[BadRecord]:
        """The records that do not fit the plan; names and reasons are for the curator room."""
        return [item for item in self.items() if isinstance(item, BadRecord)]
