"""What a reader yields: records, records that do not fit, and sources that cannot be read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import DataError
from dpsynth.planning.schema import ImageShape

Image = NDArray[np.uint8]
# The largest public image that is read where no shape is declared.
MOST_PIXELS = 1 << 24


@dataclass(frozen=True, eq=False)
class Record:
    """One labelled image: `image` uint8 (H, W, C), `label` an index into the classes."""

    image: Image
    label: int


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


def check_label(label: int, classes: tuple[str, ...] | None) -> str:
    """Why an integer label is no index into the declared classes; empty where it is one."""
    if label < 0:
        return f"label {label} is negative"
    if classes is not None and label >= len(classes):
        return f"label {label} is undeclared: the plan declares {len(classes)} classes"
    return ""
