"""The moment release (StraightDP, section 3.1): counts, sums and second moments by class.

Sensitivities in docs/maths/moments.md; a slot's statistic carries its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.statistics import ClassMoments, PaperClassSums, PaperSecondMoment
from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.moments import NAME, ReleasedMoments, save_moments
from dpsynth.artifacts.spending import Spender, calibration_hash, spending
from dpsynth.errors import PlanError
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.encoding import encode_private
from dpsynth.private.lattice import CODE_BITS, Block, ExactSums, exact_sums
from dpsynth.private.noise import NoiseSource
from dpsynth.public.representation import load_representation
from dpsynth.vault.checked import require_checked

# Covers the float rounding of the scales below: noise is rounded up, towards privacy.
_UP = 1 + 2.0**-40


@dataclass(frozen=True)
class Blocks:
    """The scales of one release. `diagonal`, `off_diagonal`: entries of the second moment."""

    counts: Block
    sums: Block
    diagonal: Block
    off_diagonal: Block


def release_moments(verified: VerifiedPlan) -> dict[str, Any]:
    """Spend the plan's moments stage once; write `released/moments.safetensors`.

    Returns:
        What was released, in declared and released values alone.

    Raises:
        PlanError: the plan has no moments stage.
        BudgetError: already released, or every slot of it is spent.
        MissingError: `dpsynth pretrain` has not run.
        UsageError, DataError: the records were not checked, or do not fit the plan.
    """
    run, lock, settings = verified.run, verified.lock, verified.plan.stages.moments
    if settings is None:
        raise PlanError("this plan has no moments stage", hint="declare stages.moments and re-plan")
    require_checked(verified)
    representation = load_representation(run, verified.plan)
    path = run.released / NAME
    with spending(
        run, lock, calibration_hash=calibration_hash(run), noise_source=verified.noise_source
    ) as spender:
        slots = _slots(spender, lock, close=verified.plan.stages.train is None)
        blocks = blocks_of(slots, representation.radius)
        noise = NoiseSource.for_run(lock, "+".join(str(slot.id) for slot in slots))
        for slot in slots:
            spender.charge(slot)
        codes, labels = encode_private(verified, representation)
        exact = exact_sums(codes, labels, len(verified.plan.private.classes))
        moments = add_noise(exact, blocks, settings.covariance, representation.radius, noise)
        del codes, labels, exact
        reach("mechanism:done")
        save_moments(path, moments)
        for slot in slots:
            spender.settle(slot, path)
        if verified.plan.stages.train is None:
            spender.close()
    return _summary(moments, slots)


def _slots(spender: Spender, lock: Lock, *, close: bool) -> tuple[Slot, ...]:
    """The slot to charge for each release of the stage: its own, or a free spare.

    A run that settled but died before its last line is closed here, then refused as spent.
    """
    planned = lock.stage_slots("moments")
    if close and any(slot.id in spender.state.settled for slot in planned):
        spender.close()
    return tuple(spender.release_slot(name) for name in dict.fromkeys(s.release for s in planned))


def blocks_of(slots: Sequence[Slot], radius: float) -> Blocks:
    """Scales of the released blocks, from the slots' declared statistics and noise.

    Raises:
        PlanError: statistics that are not a moment release, or noise out of range.
    """
    stds = [slot.noise_std for slot in slots]
    match [slot.statistic for slot in slots]:
        case [ClassMoments() as joint]:
            scales = (stds[0] / joint.count, stds[0] / joint.sum, stds[0] / joint.second)
        case [PaperClassSums(), PaperSecondMoment() as second]:
            # Released are (n, S / 2R) and M / (N R^2); both are scaled back to plain sums.
            scales = (stds[0], 2 * stds[0], second.capacity * stds[1])
        case _:
            raise PlanError("the lock's moments stage is not a release that this version knows")
    count, total, second_std = (scale * _UP for scale in scales)
    code = 2.0**CODE_BITS  # whole numbers in one clip radius
    square = code**2
    blocks = Blocks(
        counts=Block(1.0, count),
        sums=Block(radius / code, total * code),
        diagonal=Block(radius**2 / square, second_std * square),
        off_diagonal=Block(radius**2 / square, second_std * square / math.sqrt(2)),
    )
    for block in (blocks.counts, blocks.sums, blocks.diagonal, blocks.off_diagonal):
        block.check()
    return blocks


def add_noise(
    exact: ExactSums, blocks: Blocks, covariance: str, radius: float, noise: NoiseSource
) -> ReleasedMoments:
    """The mechanism itself: discrete Gaussian noise on exact sums, fresh for every entry."""
    seconds = exact.seconds if covariance == "class" else exact.seconds.sum(axis=0, keepdims=True)
    return ReleasedMoments(
        counts=blocks.counts.release(exact.counts, noise),
        sums=blocks.sums.release(exact.sums, noise),
        seconds=_symmetric(seconds, blocks, noise),
        count_std=blocks.counts.real_std,
        sum_std=blocks.sums.real_std,
        second_std=blocks.diagonal.real_std,
        radius=radius,
        covariance=covariance,
    )


def _symmetric(
    seconds: NDArray[np.object_], blocks: Blocks, noise: NoiseSource
) -> NDArray[np.float64]:
    """Noise on the upper triangle alone, mirrored: the lower one repeats what was released."""
    dim = seconds.shape[-1]
    corner = np.arange(dim)
    row, column = np.triu_indices(dim, k=1)
    released = np.zeros(seconds.shape)
    released[:, corner, corner] = blocks.diagonal.release(seconds[:, corner, corner], noise)
    upper = blocks.off_diagonal.release(seconds[:, row, column], noise)
    released[:, row, column] = released[:, column, row] = upper
    return released


def _summary(moments: ReleasedMoments, slots: Sequence[Slot]) -> dict[str, Any]:
    return {
        "released": NAME,
        "slots": [slot.name for slot in slots],
        "classes": moments.classes,
        "dim": moments.dim,
        "covariance": moments.covariance,
        "count_std": moments.count_std,
        "sum_std": moments.sum_std,
        "second_std": moments.second_std,
    }
