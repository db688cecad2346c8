"""Records of one unit brought together, wherever they lie in the source, in bounded memory.

A first pass reads names alone. Units are then shared out to scans of the source, so that the
images held at once stay below a limit: one scan does where a unit's images lie side by side.
"""

import heapq
from array import array
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from dpsynth.readers import Record, UnitSource
from dpsynth.vault.split import content_hash

Unit = list[Record]

_NONE = -1
_KEPT = "which images of a unit are kept"


def grouped(
    source: UnitSource, most: int, keep: Callable[[str], bool], limit: int
) -> Iterator[Unit]:
    """Each unit whose name `keep` takes: at most `most` of its records.

    Kept are those whose content hashes are smallest, in that order: a function of the unit's own
    records, not of their order or of another unit. A unit without a usable record is left out.
    `limit`: records held at once, but for one unit's own. Units come as they are complete.

    Raises:
        UnreadableSourceError: the source as a whole is damaged.
    """
    index = _Index.of(source.unit_names(), keep)
    scan_of = _scans(index, most, limit)
    for scan in range(int(scan_of.max(initial=_NONE)) + 1):
        mine = index.places[scan_of[index.owners] == scan]
        yield from _scanned(source, index, mine, most)


@dataclass(frozen=True)
class _Index:
    """Where units lie. Numbers of units (u,) follow their first places; no image is held.

    places (n,) ascending and owners (n,): a record's unit. names (u,), images (u,), last (u,).
    """

    names: list[str]
    places: NDArray[np.int64]
    owners: NDArray[np.int64]
    images: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @classmethod
    def of(cls, names: Iterator[str], keep: Callable[[str], bool]) -> "_Index":
        numbers: dict[str, int] = {}
        owner = array("q")
        for name in names:
            if name and name not in numbers and keep(name):
                numbers[name] = len(numbers)
            owner.append(numbers.get(name, _NONE))
        every = np.array(owner, dtype=np.int64)
        places = np.flatnonzero(every != _NONE)
        owners = every[places]
        first, last = (np.zeros(len(numbers), np.int64) for _ in range(2))
        first[owners[::-1]] = places[::-1]  # the last value given for an index stays
        last[owners] = places
        images = np.bincount(owners, minlength=len(numbers))
        return cls(list(numbers), places, owners, images, first, last)


@dataclass
class _Scan:
    """What one pass holds at the place reached. `ends`: (last place, images) of open units."""

    ends: list[tuple[int, int]] = field(default_factory=list)
    held: int = 0

    def takes(self, first: int, last: int, images: int, limit: int) -> bool:
        """Take a unit that lies from place `first` to `last`, if it may be held with the others."""
        while self.ends and self.ends[0][0] < first:
            self.held -= heapq.heappop(self.ends)[1]
        if self.held and self.held + images > limit:
            return False
        heapq.heappush(self.ends, (last, images))
        self.held += images
        return True


def _scans(index: _Index, most: int, limit: int) -> NDArray[np.int64]:
    """The scan (u,) of each unit, first fit: none holds more than `limit` records at once."""
    images = np.minimum(index.images, most)
    scan_of = np.zeros(len(images), np.int64)
    if images.sum() <= limit:
        return scan_of
    scans: list[_Scan] = []
    spans = zip(index.first.tolist(), index.last.tolist(), images.tolist(), strict=True)
    for unit, span in enumerate(spans):
        found = next((s for s, scan in enumerate(scans) if scan.takes(*span, limit)), len(scans))
        if found == len(scans):
            scans.append(_Scan())
            scans[found].takes(*span, limit)
        scan_of[unit] = found
    return scan_of


def _scanned(
    source: UnitSource, index: _Index, places: NDArray[np.int64], most: int
) -> Iterator[Unit]:
    """One pass over these places; a unit is yielded when its last one is read."""
    owners = index.owners[np.searchsorted(index.places, places)].tolist()
    owner_of = iter(zip(places.tolist(), owners, strict=True))
    held: dict[int, list[tuple[bytes, Record]]] = {}
    for place, item in source.select(array("q", places.tolist())):
        unit = next(owner for wanted, owner in owner_of if wanted == place)
        # A file that changed since its names were read may name another unit here by now.
        if isinstance(item, Record) and item.unit == index.names[unit]:
            mine = held.setdefault(unit, [])
            insort(mine, (content_hash(item, _KEPT), item), key=itemgetter(0))
            del mine[most:]
        if place == index.last[unit] and unit in held:
            yield [record for _, record in held.pop(unit)]
