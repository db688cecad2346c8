"""Samples of each class beside what was released of it: rows of pictures for a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import read_samples, read_summary
from dpsynth.artifacts.sheet import shrunk
from dpsynth.errors import DpsynthError
from dpsynth.released.page.means import decoded_means
from dpsynth.released.page.pictures import Stamp, uris

if TYPE_CHECKING:
    from dpsynth.planning.schema import Plan

COLUMNS = 10
MOST_ROWS = 20


class HandOut(RunDir):
    """A hand-out folder seen as a run: its copies stand for lock, transcript and public files.

    What reads a run by it sees what a recipient has, and nothing else.
    """

    @property
    def released(self) -> Path:
        """The folder itself."""
        return self.root

    @property
    def curator(self) -> Path:
        """There is none. Raises LookupError."""
        raise LookupError("a hand-out folder has no curator room")


@dataclass(frozen=True)
class Row:
    """One class: its released mean where there is one, and its first samples; `data:` addresses."""

    name: str
    mean: str | None = None
    samples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gallery:
    """Rows of pictures of `height` by `width` pixels.

    `notes`: what is missing, and why. `count`: of all samples. `left_out`: classes without a row.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    count: int
    left_out: int
    height: int
    width: int

    @property
    def means(self) -> int:
        """How many rows have a released mean."""
        return sum(row.mean is not None for row in self.rows)

    @property
    def drawn(self) -> int:
        """How many samples are shown."""
        return sum(len(row.samples) for row in self.rows)


def gallery(run: RunDir, plan: "Plan", stamp: Stamp, *, samples: str = "samples") -> Gallery:
    """The first `COLUMNS` samples of each of the first `MOST_ROWS` classes, beside its mean.

    `samples`: a folder of `run.released`; `stamp`: text fields of each picture. What cannot be
    read is left out, and a note says so: nothing here raises for a run that is not so far.
    """
    private = plan.private
    names, image = private.classes[:MOST_ROWS], private.image
    means, missing = decoded_means(run, plan, MOST_ROWS)
    found, count, notes = _samples(run.released / samples, plan, stamp)
    try:
        rows = [
            Row(
                name,
                uris(shrunk(means[name][None]), stamp)[0] if name in means else None,
                found[name],
            )
            for name in names
        ]
    except DpsynthError:
        rows, missing = [], [*missing, "Pictures need Pillow, which is not installed here."]
    left_out = len(private.classes) - len(names)
    return Gallery(tuple(rows), (*notes, *missing), count, left_out, image.height, image.width)


def _samples(
    folder: Path, plan: "Plan", stamp: Stamp
) -> tuple[dict[str, tuple[str, ...]], int, list[str]]:
    """Pictures by class, the number of all samples, and notes."""
    private = plan.private
    shape = (private.image.height, private.image.width, private.image.channels)
    none: dict[str, tuple[str, ...]] = dict.fromkeys(private.classes, ())
    try:
        summary = read_summary(folder)
        if summary is None:
            return none, 0, ["No images were drawn yet."]
        images, labels = read_samples(folder, private.classes, shape, most=COLUMNS, first=MOST_ROWS)
        found = {
            name: uris(shrunk(images[labels == y]), stamp)
            for y, name in enumerate(private.classes[:MOST_ROWS])
        }
        return none | found, int(summary["count"]), []
    except DpsynthError:  # whose message may name a folder of this machine
        return none, 0, ["The samples could not be read: some are damaged, or not of this plan."]
