"""Noise on a release of counts, sums and second moments: one scale for each block.

Shared by the class moments and by every cell round. The scales follow from a slot's declared
statistic and noise (docs/maths/moments.md, M3 and M4; docs/maths/cells.md, C3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.queries import ClassMeans, EmbeddingSums
from dpsynth.accounting.statistics import (
    CellMoments,
    CellSums,
    ClassMoments,
    PaperClassSums,
    PaperSecondMoment,
)
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.lattice import CODE_BITS, Block, ExactSums
from dpsynth.private.noise import NoiseSource

UP = 1 + 2.0**-40
"""Covers the float rounding of scales: noise is rounded up, towards privacy."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class NoisySums:
    """What a release says, in real units: counts (G,), sums (G, d), seconds (G, d, d) or None."""

    counts: Array
    sums: Array
    seconds: Array | None


@dataclass(frozen=True)
class Blocks:
    """The scales of one release. `second`: diagonal and other entries of a second moment.

    `bits`: the sums come in steps of 2^-bits, as `ExactSums.bits` says of them.
    """

    counts: Block
    sums: Block
    second: tuple[Block, Block] | None
    bits: int = 0

    def finer(self, bits: int) -> "Blocks":
        """The same noise on sums in steps of 2^-bits. Raises PlanError where it is out of range."""
        second = self.second
        finer = Blocks(
            self.counts.finer(bits),
            self.sums.finer(bits),
            None if second is None else (second[0].finer(bits), second[1].finer(bits)),
            self.bits + bits,
        )
        finer.check()
        return finer

    def check(self) -> None:
        """Raise PlanError unless every scale fits the sampler's range."""
        for block in (self.counts, self.sums, *(self.second or ())):
            block.check()

    @property
    def second_std(self) -> float:
        """Noise on a diagonal entry of a second moment, real units; 0 without one."""
        return self.second[0].real_std if self.second else 0.0

    def release(self, exact: ExactSums, noise: NoiseSource) -> NoisySums:
        """The mechanism itself: discrete Gaussian noise on exact sums, fresh for every entry.

        Raises UsageError for sums in other steps than these scales are for.
        """
        if exact.bits != self.bits:
            raise UsageError(f"scales for steps of 2^-{self.bits} got sums of 2^-{exact.bits}")
        return NoisySums(
            counts=self.counts.release(exact.counts, noise),
            sums=self.sums.release(exact.sums, noise),
            seconds=None if self.second is None else symmetric(exact.seconds, self.second, noise),
        )


def blocks_of(slots: Sequence[Slot], radius: float) -> Blocks:
    """Scales of the released blocks, from the slots' declared statistics and noise.

    Args:
        slots: those that pay for one release.
        radius: the bound on a contribution's norm in real units: R, or a cell round's rho.

    Raises:
        PlanError: statistics that are not a moment release, or noise out of range.
    """
    count, total, second = _scales(slots)
    code = 2.0**CODE_BITS  # whole numbers in one radius
    square = code**2
    blocks = Blocks(
        counts=Block(1.0, count * UP),
        sums=Block(radius / code, total * UP * code),
        second=None
        if second is None
        else (
            Block(radius**2 / square, second * UP * square),
            Block(radius**2 / square, second * UP * square / math.sqrt(2)),
        ),
    )
    blocks.check()
    return blocks


def _scales(slots: Sequence[Slot]) -> tuple[float, float, float | None]:
    """Noise on n, S / radius and M / radius^2 of what these slots release."""
    stds = [slot.noise_std for slot in slots]
    match [slot.statistic for slot in slots]:
        case [ClassMoments() | CellMoments() as joint]:
            return stds[0] / joint.count, stds[0] / joint.sum, stds[0] / joint.second
        case [ClassMeans() | CellSums() | EmbeddingSums() as joint]:
            return stds[0] / joint.count, stds[0] / joint.sum, None
        case [PaperClassSums(), PaperSecondMoment() as second]:
            # Released are (n, S / 2R) and M / (N R^2); both are scaled back to plain sums.
            return stds[0], 2 * stds[0], second.capacity * stds[1]
        case _:
            raise PlanError("the lock's moments stage is not a release that this version knows")


def symmetric(
    seconds: NDArray[np.object_], blocks: tuple[Block, Block], noise: NoiseSource
) -> Array:
    """Noise on the upper triangle alone, mirrored: the lower one repeats what was released."""
    diagonal, off_diagonal = blocks
    dim = seconds.shape[-1]
    corner = np.arange(dim)
    row, column = np.triu_indices(dim, k=1)
    released = np.zeros(seconds.shape)
    released[:, corner, corner] = diagonal.release(seconds[:, corner, corner], noise)
    upper = off_diagonal.release(seconds[:, row, column], noise)
    released[:, row, column] = released[:, column, row] = upper
    return released
