"""The central stage of a plan: noisy sums over random subsets of the records, released once.

The mechanism is `private.central`; derivations in docs/maths/central.md. What learns from them is
post-processing (`released.warm`), and DP-SGD comes after.
"""

from dataclasses import replace
from typing import Any

from dpsynth.artifacts.central import NAME as FILE
from dpsynth.artifacts.central import ReleasedCentral, save_central
from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.spending import calibration_hash, spending
from dpsynth.console import progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError
from dpsynth.planning.central import NAME
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan, require_allocated
from dpsynth.private.central import central_block, give_central, release_central
from dpsynth.private.encoding import private_stream
from dpsynth.private.lattice import SHARE_BITS
from dpsynth.private.noise import NoiseSource
from dpsynth.private.together import own_noise, require_same_codes
from dpsynth.public.representation import Representation, load_representation
from dpsynth.vault.checked import require_checked


def release_central_images(verified: VerifiedPlan, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Spend the plan's central stage once: `released/central.safetensors`.

    Every process of `ranks` calls this; the main one spends and writes, the others give their
    records' sums, with coins of their own, and return {}.

    Returns:
        What was released, in declared and released values alone.

    Raises:
        PlanError: the plan has no central stage, its noise is out of range, or it must be planned
            again after `pretrain`.
        BudgetError: already released, or every slot is spent.
        MissingError: `dpsynth pretrain` has not run.
        UsageError, DataError: the records were not checked, or do not fit the plan; a public file
            is not the one that the calibration names.
    """
    plan, run, lock = verified.plan, verified.run, verified.lock
    space = _space(verified)
    require_same_codes(space, ranks)
    if not ranks.is_main:
        _follow(verified, space, ranks)
        return {}
    require_checked(verified)
    require_allocated(verified)
    with spending(
        run, lock, calibration_hash=calibration_hash(run), noise_source=verified.noise_source
    ) as spender:
        slot = spender.release_slot(NAME)
        several = plan.budget.column is not None
        central_block(slot, space.radius, SHARE_BITS if several else 0)  # refused uncharged
        spender.charge(slot)
        ranks.tell({"charged": slot.id})  # only now: it is on disk
        with progress("releasing central images"):
            released = _released(verified, space, slot, ranks)
        reach("mechanism:done")
        save_central(run.released / FILE, released)
        spender.settle(slot, run.released / FILE)
    return _summary(released, slot)


def _released(
    verified: VerifiedPlan, space: Representation, slot: Slot, ranks: Ranks
) -> ReleasedCentral:
    return release_central(
        private_stream(verified, space, ranks),
        slot,
        _noise(verified, slot, ranks),
        ranks,
        radius=space.radius,
        divisor=_divisor(verified.plan),
    )


def _follow(verified: VerifiedPlan, space: Representation, ranks: Ranks) -> None:
    """Give the shard's sums once the main process says that they are charged for."""
    slot = verified.lock.slots[ranks.tell(None)["charged"] - 1]
    noise = _noise(verified, slot, ranks)
    give_central(private_stream(verified, space, ranks), slot, noise, ranks)


def _noise(verified: VerifiedPlan, slot: Slot, ranks: Ranks) -> NoiseSource:
    """Coins of this process, and in the main one the noise too."""
    return own_noise(verified.lock, str(slot.id), ranks)


def _space(verified: VerifiedPlan) -> Representation:
    """The plan's code space, at the stage's clip radius. Raises PlanError without the stage."""
    settings = verified.plan.stages.central
    if settings is None:
        raise PlanError("this plan has no central stage", hint="declare stages.central and re-plan")
    space = load_representation(verified.run, verified.plan)
    return space if settings.clip is None else replace(space, radius=settings.clip)


def _divisor(plan: Plan) -> float:
    settings = plan.stages.central
    if settings is None:
        raise PlanError("this plan has no central stage")
    return settings.divisor(plan.private.capacity, plan.private.conditions)


def _summary(released: ReleasedCentral, slot: Slot) -> dict[str, Any]:
    steps, classes, dim = released.sums.shape
    return {
        "released": FILE,
        "slots": [slot.name],
        "images": steps,
        "classes": classes,
        "dim": dim,
        "rate": released.rate,
        "std": released.std,
        "code_std": released.code_std,
        "radius": released.radius,
    }
