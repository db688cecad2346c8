"""One cell round: each record in the nearest of its class's released cells, in whole numbers.

A record's cell, residual and contribution follow from its own quantised code and the released
frame alone; derivations in docs/maths/cells.md.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.statistics import CellMoments, CellSums
from dpsynth.artifacts.cells import ReleasedCells
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.blocks import blocks_of
from dpsynth.private.lattice import CODE_MAX, ExactSums, exact_sums, quantise
from dpsynth.private.noise import NoiseSource

NOWHERE = -1
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
    codes: Codes, labels: Codes, frame: Frame, slot: Slot, noise: NoiseSource
) -> ReleasedCells:
    """The round's mechanism: counts, sums and, in the last round, second moments by class-cell.

    Args:
        codes: quantised codes (n, d) of norm at most 2^16, from `lattice.quantise`.
        labels: classes (n,); a record of an undeclared one contributes nothing.
        frame: the cells, from released values.
        slot: pays for the round; its statistic says what is released.
        noise: a source for this round alone.

    Raises PlanError where the slot's statistic is no cell release of the frame's shape.
    """
    _check(slot, frame)
    classes, most, dim = frame.centres.shape
    blocks = blocks_of([slot], frame.radius)
    exact = cell_sums(codes, labels, frame, second=blocks.second is not None)
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


def cell_sums(codes: Codes, labels: Codes, frame: Frame, *, second: bool) -> ExactSums:
    """Counts, sums and second moments of residuals by class-cell (Y K, ...): never released.

    A record adds (1, u, u u^T) to one class-cell, |u| <= 2^16, whatever the others are.
    """
    classes, most, _ = frame.centres.shape
    cells = assign(codes, labels, frame)
    return exact_sums(residuals(codes, cells, frame), cells, classes * most, second=second)


def assign(codes: Codes, labels: Codes, frame: Frame, rows: int = _ROWS) -> Codes:
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


def residuals(codes: Codes, cells: Codes, frame: Frame) -> Codes:
    """Each record's q - c (n, d), clipped to rho, in steps of rho / 2^16: norm at most 2^16.

    One record at a time, by the rule of codes; q - c itself is exact, of norm at most 2^17. The
    row of a record that is NOWHERE is zero, and no sum takes it in.
    """
    centres = frame.centres.reshape(-1, codes.shape[1])
    radius = frame.radius / frame.clip * CODE_MAX  # rho in the codes' own steps
    clipped = np.zeros_like(codes)
    for row in np.flatnonzero(cells != NOWHERE).tolist():
        residual = codes[row] - centres[cells[row]]
        cut = quantise(residual.astype(np.float64), radius)
        clipped[row] = 0 if cut is None else cut  # whole numbers are finite: never None
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
