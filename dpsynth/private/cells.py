"""One cell round: each record in the nearest of its class's released cells, in whole numbers.

A record's cell, residual and contribution follow from its own quantised code and the released
frame alone; derivations in docs/maths/cells.md.
"""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.statistics import CellMoments, CellSums, Statistic
from dpsynth.artifacts.cells import ReleasedCells
from dpsynth.artifacts.lock import Slot
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.blocks import blocks_of
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, ExactSums, quantise, quantise_rows
from dpsynth.private.noise import NoiseSource
from dpsynth.private.products import Whole
from dpsynth.private.shares import NOWHERE, unit_sums
from dpsynth.private.together import total_sums

# Rows compared with the centres at once: bounds memory, and changes no bit of any result.
_ROWS = 2**16

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Frame:
    """What a round may know of the cells beforehand: released values alone.

    centres (Y, K, d) int64: whole numbers in steps of R / 2^16, each of norm at most 2^16. used
    (Y, K): a class's cells; the others receive no record. `radius`: rho, `clip`: R, in real units.
    Raises UsageError for anything else: the exactness of `assign` rests on it.
    """

    centres: Codes
    used: NDArray[np.bool_]
    radius: float
    clip: float

    def __post_init__(self) -> None:
        _check_radii(self.radius, self.clip)
        if not self.used.any(axis=1).all():
            raise UsageError("a class has no cell that is used; expected one or more")
        if self.centres.dtype != np.int64:
            raise UsageError(f"cells' centres are {self.centres.dtype}, expected int64")
        # Each number first: the square of a large one would wrap around to a small sum.
        wide = (self.centres > CODE_MAX) | (self.centres < -CODE_MAX)
        if wide.any() or (np.square(self.centres).sum(axis=-1) > CODE_MAX**2).any():
            raise UsageError("a cell's centre lies outside the codes' ball")

    def to_bytes(self) -> bytes:
        """The frame for another process."""
        out = io.BytesIO()
        radii = np.array([self.radius, self.clip])
        np.savez(out, allow_pickle=False, centres=self.centres, used=self.used, radii=radii)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Frame":
        """What `to_bytes` wrote, to the bit."""
        with np.load(io.BytesIO(data), allow_pickle=False) as held:
            radius, clip = held["radii"].tolist()
            return cls(held["centres"], held["used"], radius, clip)

    @property
    def real_centres(self) -> NDArray[np.float64]:
        """The centres as used, in real units."""
        real: NDArray[np.float64] = self.centres * (self.clip / CODE_MAX)
        return real


def frame_of(
    centres: NDArray[np.float64], used: NDArray[np.bool_], *, radius: float, clip: float
) -> Frame:
    """Centres (Y, K, d) in real units, cut to the codes' own grid and ball before any use.

    Raises UsageError for a centre or a radius that is not finite, or a class without cells.
    """
    _check_radii(radius, clip)
    whole = np.zeros(centres.shape, np.int64)
    for place in np.argwhere(used).tolist():
        cut = quantise(centres[tuple(place)], clip)
        if cut is None:
            raise UsageError("a cell's centre is not finite")
        whole[tuple(place)] = cut
    return Frame(whole, used, radius, clip)


def release_cells(
    chunks: Iterable[UnitCodes], frame: Frame, slot: Slot, noise: NoiseSource, ranks: Ranks = ALONE
) -> ReleasedCells:
    """The round's mechanism: counts, sums and, in the last round, second moments by class-cell.

    Args:
        chunks: one pass over the units' quantised codes, of norm at most 2^16; a record of an
            undeclared class contributes nothing.
        frame: the cells, from released values.
        slot: pays for the round; its statistic says what is released.
        noise: a source for this round alone.
        ranks: this is the main one; the others give the sums of their shards by `shard_sums`.

    Raises PlanError where the slot's statistic is no cell release of the frame's shape.
    """
    _check(slot, frame)
    classes, most, dim = frame.centres.shape
    exact = total_sums(shard_sums(chunks, frame, slot), ranks)
    blocks = blocks_of([slot], frame.radius).finer(exact.bits)
    noisy = blocks.release(exact, noise)
    return ReleasedCells(
        centres=frame.real_centres,
        used=frame.used,
        counts=noisy.counts.reshape(classes, most),
        sums=noisy.sums.reshape(classes, most, dim),
        seconds=None if noisy.seconds is None else noisy.seconds.reshape(classes, most, dim, dim),
        count_std=blocks.counts.real_std,
        sum_std=blocks.sums.real_std,
        second_std=blocks.second_std,
        radius=frame.radius,
        clip=frame.clip,
    )


def shard_sums(chunks: Iterable[UnitCodes], frame: Frame, slot: Slot) -> ExactSums:
    """Exact sums of the round that `slot` pays for, in one pass over one chunk or more."""
    return cell_sums(chunks, frame, slot.statistic, second=isinstance(slot.statistic, CellMoments))


def cell_sums(
    chunks: Iterable[UnitCodes], frame: Frame, statistic: Statistic, *, second: bool
) -> ExactSums:
    """Counts, sums and second moments of residuals by class-cell (Y K, ...): never released.

    A record adds (1, u, u u^T) to one class-cell, |u| <= 2^16, whatever the others are; images of a
    unit of several count by one share of it (docs/maths/units.md, U7).
    """

    def place(chunk: UnitCodes) -> tuple[Codes, Codes]:
        cells = assign(chunk.codes, chunk.labels, frame)
        return residuals(chunk.codes, cells, frame), cells

    classes, most, _ = frame.centres.shape
    return unit_sums(chunks, classes * most, place, statistic, second=second)


def assign(codes: Whole, labels: Codes, frame: Frame, rows: int = _ROWS) -> Codes:
    """Class-cell y K + k of each record (n,): the nearest used centre, ties to the lowest k.

    NOWHERE for an undeclared label. |q - c|^2 is compared as |c|^2 - 2 q.c, exactly: |q| and |c|
    are at most 2^16, so that by Cauchy and Schwarz sum |q_i c_i| <= 2^32. Every partial sum of
    the product, in any order, fused or not, is a whole number below 2^53, and so is the score.
    """
    classes, most, _ = frame.centres.shape
    found = np.full(len(codes), NOWHERE, np.int64)
    for y in range(classes):
        used = np.flatnonzero(frame.used[y])
        centres = frame.centres[y, used].astype(np.float64)
        lengths = np.square(centres).sum(axis=1)
        mine = np.flatnonzero(labels == y)
        for start in range(0, len(mine), rows):
            part = mine[start : start + rows]
            scores = lengths - 2.0 * (codes[part].astype(np.float64) @ centres.T)
            found[part] = y * most + used[scores.argmin(axis=1)]  # argmin takes the first
    return found


def residuals(codes: Whole, cells: Codes, frame: Frame) -> Codes:
    """Each record's q - c (n, d), clipped to rho, in steps of rho / 2^16: norm at most 2^16.

    By the rule of codes; q - c itself is exact, of norm at most 2^17. The row of a record that is
    NOWHERE is zero, and no sum takes it in.
    """
    centres = frame.centres.reshape(-1, codes.shape[1])
    radius = frame.radius / frame.clip * CODE_MAX  # rho in the codes' own steps
    clipped = np.zeros(codes.shape, np.int64)
    known = np.flatnonzero(cells != NOWHERE)
    for start in range(0, len(known), _ROWS):
        mine = known[start : start + _ROWS]
        apart = (codes[mine] - centres[cells[mine]]).astype(np.float64)
        clipped[mine], _ = quantise_rows(apart, radius)  # whole numbers are finite: all are kept
    return clipped


def _check_radii(radius: float, clip: float) -> None:
    if not all(math.isfinite(r) and r > 0 for r in (radius, clip)):
        raise UsageError(f"cells need finite radii above 0, got rho {radius}, R {clip}")


def _check(slot: Slot, frame: Frame) -> None:
    statistic = slot.statistic
    if not isinstance(statistic, CellSums | CellMoments):
        raise PlanError(f"slot {slot.name} is no cell release")
    declared = (statistic.classes, statistic.cells, statistic.dim)
    if declared != frame.centres.shape:
        raise PlanError(
            f"slot {slot.name} declares classes, cells and code {declared}, "
            f"and the cells are {frame.centres.shape}"
        )
