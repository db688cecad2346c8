"""Central images (DP-FETA): noisy class means of codes over Poisson subsets of the records.

A step is one Poisson-subsampled Gaussian mechanism: a coin for each unit at the declared rate,
sums by class, noise once on all of them, divisor the declared q N / Y. Sums are exact and noise is
the exact discrete Gaussian, as in the moment releases; derivations in docs/maths/central.md.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.queries import CentralSums
from dpsynth.artifacts.central import ReleasedCentral
from dpsynth.artifacts.lock import Slot
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.blocks import UP
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, SHARE_BITS, Block, RunningSums
from dpsynth.private.noise import NoiseSource
from dpsynth.private.shares import Weights, unit_shares

SUM = Weights(count=0.0, sum=1.0, second=0.0)
"""A unit's sums by class are a vector of codes, of norm at most R (Z3)."""

Codes = NDArray[np.int64]
Whole = NDArray[np.object_]


def release_central(
    chunks: Iterable[UnitCodes],
    slot: Slot,
    noise: NoiseSource,
    ranks: Ranks = ALONE,
    *,
    radius: float,
    divisor: float,
) -> ReleasedCentral:
    """The mechanism: the slot's `steps` noisy sums by class, each over a Poisson subset of its own.

    Args:
        chunks: one pass over the units' quantised codes (one chunk or more, of whole units); a
            record of an undeclared class contributes nothing.
        slot: pays for all steps; its rate is that of the coins.
        noise: a source for this release alone, of coins and noise.
        ranks: this is the main one; the others give their shards' sums by `give_central`.
        radius: R, the norm that codes were clipped to, in real units.
        divisor: what sums are divided by, from declared numbers (`Central.divisor`).

    Raises:
        PlanError: the slot's statistic is none of central images, or noise out of range.
        UsageError: no chunk, codes of another length, or a divisor that is not above 0.
    """
    statistic, rate, _ = _declared(slot)
    if not divisor > 0:
        raise UsageError(f"central images are divided by a number above 0, got {divisor}")
    whole, bits = subset_sums(chunks, slot, noise)
    block = central_block(slot, radius, bits)
    (total,) = ranks.sum_whole([whole])
    return ReleasedCentral(
        sums=block.release(total, noise).reshape(-1, statistic.classes, statistic.dim),
        std=block.real_std,
        rate=rate,
        divisor=divisor,
        radius=radius,
    )


def give_central(chunks: Iterable[UnitCodes], slot: Slot, noise: NoiseSource, ranks: Ranks) -> None:
    """What another process adds to `release_central`; `noise`: its own source of coins."""
    ranks.sum_whole([subset_sums(chunks, slot, noise)[0]])


def central_block(slot: Slot, radius: float, bits: int = 0) -> Block:
    """The noise of one number of a sum, for sums in steps of 2^-bits of R / 2^16 (Z4).

    Raises PlanError as `release_central`.
    """
    _declared(slot)
    block = Block(radius / CODE_MAX, slot.noise_std * UP * CODE_MAX).finer(bits)
    block.check()
    return block


def subset_sums(chunks: Iterable[UnitCodes], slot: Slot, noise: NoiseSource) -> tuple[Whole, int]:
    """Exact sums (M, Y, d) over the M subsets, in steps of 2^-bits, and the bits. Never released.

    One pass: each unit throws M independent coins as it comes by, which is the same as M passes
    with a fresh coin in each.

    Raises as `release_central`.
    """
    statistic, rate, steps = _declared(slot)
    running: list[RunningSums] = []
    bits = 0
    for chunk in chunks:
        if chunk.codes.shape[1] != statistic.dim:
            raise UsageError(f"codes have {chunk.codes.shape[1]} numbers, expected {statistic.dim}")
        labels = _declared_labels(chunk.labels, statistic.classes)
        shares = _shares(chunk, labels)
        if not running:
            bits = 0 if shares is None else SHARE_BITS
            running = [
                RunningSums(statistic.classes, statistic.dim, second=False, bits=bits)
                for _ in range(steps)
            ]
        for sums in running:
            chosen = _chosen(chunk, rate, noise)
            mine = None if shares is None else shares[chosen]
            sums.add(chunk.codes[chosen], labels[chosen], mine)
    if not running:
        raise UsageError("a pass over the codes has one chunk or more, got none")
    return np.stack([sums.total().sums for sums in running]), bits


def _chosen(chunk: UnitCodes, rate: float, noise: NoiseSource) -> NDArray[np.bool_]:
    """Which images (n,) are in a subset: those of the units whose coin says so."""
    coins = noise.coins(chunk.units, rate)
    return coins if chunk.sizes is None else np.repeat(coins, chunk.sizes)


def _shares(chunk: UnitCodes, labels: Codes) -> Codes | None:
    """Share k / 2^16 of each image's unit, whether or not its coin takes it in (Z3)."""
    if chunk.sizes is None:
        return None
    return unit_shares(chunk.codes, labels, chunk.sizes, SUM)


def _declared_labels(labels: Codes, classes: int) -> Codes:
    """Labels with each undeclared one below 0: a unit's norm does not count its image either."""
    return np.where((labels >= 0) & (labels < classes), labels, -1)


def _declared(slot: Slot) -> tuple[CentralSums, float, int]:
    """Statistic, rate and steps of the slot."""
    if not isinstance(slot.statistic, CentralSums) or slot.rate is None or slot.steps is None:
        raise PlanError(f"slot {slot.name} is no release of central images")
    return slot.statistic, slot.rate, slot.steps
