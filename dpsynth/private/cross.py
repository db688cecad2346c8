"""The caption release: one joint mechanism on outer products of (code, feature) (equation 5).

StraightDP, sections 3.1 and C and proposition B.10; derivations in docs/maths/cross.md. A record
adds w w^T of the one whole-number row w = (z; f), of which the noise's blocks are cut.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.statistics import (
    CrossMoments,
    PaperClassSums,
    PaperCrossMoments,
    PaperSecondMoment,
)
from dpsynth.artifacts.cross import ReleasedCross
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.blocks import UP, symmetric
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_BITS, CODE_MAX, Block, ExactSums, quantise_rows
from dpsynth.private.noise import NoiseSource
from dpsynth.private.shares import NOWHERE, unit_sums

CONSTANT = math.isqrt(2 ** (2 * CODE_BITS) // 5)
"""The constant feature in steps of Rf / 2^16: floor(2^16 / sqrt(5)), in every record (X2)."""

Array = NDArray[np.float64]
# A chunk's feature vectors (n, m), each a function of its own record's caption alone.
FeaturesOf = Callable[[UnitCodes], Array]


@dataclass(frozen=True)
class Space:
    """What one release is made in: lengths and radii of codes z and feature vectors f.

    `constant`: whether the first feature is the constant one, `feature_radius` / sqrt(5) long.
    """

    dim: int
    features: int
    radius: float
    feature_radius: float
    constant: bool

    @property
    def real_constant(self) -> float:
        """Value of the constant feature as released; 0 without one."""
        return CONSTANT * self.feature_radius / CODE_MAX if self.constant else 0.0


def is_cross(slots: Sequence[Slot]) -> bool:
    """Whether these slots pay for a caption release."""
    return any(isinstance(slot.statistic, CrossMoments | PaperCrossMoments) for slot in slots)


def quantise_features(features: Array, space: Space) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Whole numbers (n, m) in steps of Rf / 2^16 of feature vectors, and which rows are finite.

    Every row has a norm of at most 2^16, checked in whole numbers. A constant is `CONSTANT` in
    every row, whatever the others are: those that are too long beside it are shortened, to the
    2 Rf / sqrt(5) that is left (X2). A row that is not finite is zero but for its constant, and is
    to contribute nothing. Looks at each row alone.

    Raises:
        UsageError: vectors of another length than the release declares.
    """
    if features.ndim != 2 or features.shape[1] != space.features:
        raise UsageError(f"caption features do not have the expected {space.features} numbers")
    first = int(space.constant)
    # A radius of 2^16 steps for what is not constant, then cut to what the constant leaves.
    rest, finite = quantise_rows(features[:, first:], space.feature_radius)
    whole = np.zeros(features.shape, np.int64)
    whole[:, first:] = rest
    if space.constant:
        whole[:, 0] = CONSTANT
        _shorten(whole[:, 1:], CODE_MAX**2 - CONSTANT**2)
    return whole, finite


def _shorten(rows: NDArray[np.int64], limit: int) -> None:
    """Bring each row, of norm at most 2^16, to a squared norm of at most `limit`, in place."""
    square = np.square(rows).sum(axis=1)
    long = np.flatnonzero(square > limit)
    factors = np.sqrt(limit / square[long])
    cut = np.trunc(rows[long] * factors[:, None]).astype(np.int64)
    while (over := np.square(cut).sum(axis=1) > limit).any():
        cut[over] -= np.sign(cut[over])  # rounding let a number reach a step too far
    rows[long] = cut


def cross_sums(
    chunks: Iterable[UnitCodes], features_of: FeaturesOf, space: Space, slots: Sequence[Slot]
) -> ExactSums:
    """Exact sums of w = (z; f) and w w^T, in one pass over one chunk or more. Never released.

    counts (1,), sums (1, d + m), seconds (1, d + m, d + m). A record whose feature vector is not
    finite contributes nothing; images of a unit of several count by one share of it (X4).

    Raises:
        PlanError: units of several images, and a statistic that bounds one record alone.
        UsageError: features of another length than declared, or no chunk.
    """

    def place(chunk: UnitCodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        whole, finite = quantise_features(features_of(chunk), space)
        if len(whole) != len(chunk.codes):
            raise UsageError("a chunk does not have as many captions as records")
        return np.concatenate([chunk.codes, whole], axis=1), np.where(finite, 0, NOWHERE)

    return unit_sums(chunks, 1, place, slots[0].statistic, pooled=True)


@dataclass(frozen=True)
class CrossBlocks:
    """Scales of a caption release. `ff`, `zz`: diagonal and other entries of a symmetric block.

    `beside`: of the count and the sum of codes, where the paper's mechanisms release them.
    `bits`: the sums come in steps of 2^-bits, as `ExactSums.bits` says of them.
    """

    ff: tuple[Block, Block]
    zf: Block
    zz: tuple[Block, Block]
    beside: tuple[Block, Block] | None = None
    bits: int = 0

    def finer(self, bits: int) -> "CrossBlocks":
        """The same noise on sums in steps of 2^-bits. Raises PlanError where it is out of range."""
        beside = self.beside
        finer = CrossBlocks(
            (self.ff[0].finer(bits), self.ff[1].finer(bits)),
            self.zf.finer(bits),
            (self.zz[0].finer(bits), self.zz[1].finer(bits)),
            None if beside is None else (beside[0].finer(bits), beside[1].finer(bits)),
            self.bits + bits,
        )
        finer.check()
        return finer

    def check(self) -> None:
        """Raise PlanError unless every scale fits the sampler's range."""
        for block in (*self.ff, self.zf, *self.zz, *(self.beside or ())):
            block.check()


def cross_blocks(slots: Sequence[Slot], radius: float, feature_radius: float) -> CrossBlocks:
    """Scales of the blocks, from the slots' declared statistics and noise (X1, X3).

    Raises:
        PlanError: statistics that are no caption release, or noise out of range.
    """
    stds = [slot.noise_std for slot in slots]
    beside = None
    match [slot.statistic for slot in slots]:
        case [CrossMoments() as joint]:
            ff, zf, zz = (stds[0] / w for w in (joint.caption, joint.cross, joint.second))
        case [PaperClassSums(classes=1), PaperSecondMoment() as second, PaperCrossMoments() as own]:
            # Released are (n, S / 2R) and averages over N; all are scaled back to plain sums.
            ff = zf = own.capacity * stds[2]
            zz = second.capacity * stds[1]
            beside = (
                Block(1.0, stds[0] * UP),
                Block(radius / CODE_MAX, 2 * stds[0] * UP * CODE_MAX),
            )
        case _:
            raise PlanError("the lock's moments stage is no caption release of this version")
    made = CrossBlocks(
        _symmetric_blocks(feature_radius**2, ff),
        _block(radius * feature_radius, zf),
        _symmetric_blocks(radius**2, zz),
        beside,
    )
    made.check()
    return made


def _block(bound: float, std: float) -> Block:
    """Of a product of two quantised numbers whose radii's product is `bound`."""
    square = float(CODE_MAX) ** 2
    return Block(bound / square, std * UP * square)


def _symmetric_blocks(bound: float, std: float) -> tuple[Block, Block]:
    """Diagonal and other entries of a symmetric matrix in Frobenius norm (M3)."""
    return _block(bound, std), _block(bound, std / math.sqrt(2))


def add_cross_noise(
    exact: ExactSums, slots: Sequence[Slot], space: Space, noise: NoiseSource
) -> ReleasedCross:
    """The mechanism itself: discrete Gaussian noise on exact sums, fresh for every entry.

    Raises PlanError for slots that are no caption release of this `space`.
    """
    _check(slots, space)
    blocks = cross_blocks(slots, space.radius, space.feature_radius).finer(exact.bits)
    d, seconds = space.dim, exact.seconds[0]
    count, total = np.zeros(0), np.zeros((0, d))
    if blocks.beside is not None:
        count = blocks.beside[0].release(exact.counts, noise)
        total = blocks.beside[1].release(exact.sums[:, :d], noise)
    return ReleasedCross(
        ff=symmetric(seconds[None, d:, d:], blocks.ff, noise)[0],
        zf=blocks.zf.release(seconds[:d, d:], noise),
        zz=symmetric(seconds[None, :d, :d], blocks.zz, noise)[0],
        count=count,
        total=total,
        ff_std=blocks.ff[0].real_std,
        zf_std=blocks.zf.real_std,
        zz_std=blocks.zz[0].real_std,
        count_std=blocks.beside[0].real_std if blocks.beside else 0.0,
        total_std=blocks.beside[1].real_std if blocks.beside else 0.0,
        radius=space.radius,
        feature_radius=space.feature_radius,
        constant=space.real_constant,
        sensitivity="paper" if blocks.beside else "tight",
    )


def _check(slots: Sequence[Slot], space: Space) -> None:
    """Raise PlanError unless the slots declare codes and features of these lengths."""
    last = slots[-1].statistic
    declared = isinstance(last, CrossMoments | PaperCrossMoments) and (last.dim, last.features)
    if declared != (space.dim, space.features):
        raise PlanError(
            f"slot {slots[-1].name} does not declare codes of {space.dim} numbers with caption "
            f"features of {space.features}",
            hint="start a new run folder with --run: dpsynth plan PLAN",
        )
