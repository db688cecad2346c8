"""The embedding stage in a spending session: charged, made, settled, once.

The mechanism is `private.embedding`; here are its slot, its pass over the records and its file.
"""

from typing import Any

from dpsynth.artifacts.embedding import NAME, ReleasedEmbedding, save_embedding
from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.spending import calibration_hash, spending
from dpsynth.console import progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.planning.verify import VerifiedPlan, require_allocated
from dpsynth.private.blocks import blocks_of
from dpsynth.private.embedding import (
    RADIUS,
    embedding_sums,
    release_embedding,
    require_dim,
)
from dpsynth.private.encoding import CodeStream, private_stream
from dpsynth.private.lattice import SHARE_BITS
from dpsynth.private.noise import NoiseSource
from dpsynth.private.session import Hundredths
from dpsynth.private.together import give_sums, require_same_codes
from dpsynth.public.embedding_stage import embedding_of, load_map
from dpsynth.vault.checked import require_checked

STAGE = "embedding"
"""The stage, and its one release."""


def spend_embedding(verified: VerifiedPlan, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Spend the plan's embedding stage once: `released/embedding.safetensors`.

    Every process of `ranks` calls this; the main one spends and writes, the others give their sums
    and return {}.

    Returns:
        What was released, in declared and released values alone.

    Raises:
        PlanError: the plan has no embedding stage, or the lock is of another feature map.
        BudgetError: already released, or every slot is spent.
        MissingError: `dpsynth pretrain` has not run, or its file is gone.
        ReplayError: the calibration is not the one that the charges name.
        UsageError, DataError: the records were not checked, or do not fit the plan; the feature map
            is not the one that the calibration names.
    """
    run, lock, plan = verified.run, verified.lock, verified.plan
    embedding_of(plan)
    if ranks.is_main:
        require_checked(verified)
        require_allocated(verified)
    recipe, space = load_map(run, plan)
    require_same_codes(space, ranks)
    stream = private_stream(verified, space, ranks)  # reads nothing yet
    if not ranks.is_main:
        _follow(verified, stream, ranks)
        return {}
    with spending(
        run, lock, calibration_hash=calibration_hash(run), noise_source=verified.noise_source
    ) as spender:
        alone = lock.last_stage == STAGE
        if alone and spender.settled_digest(STAGE) is not None:
            spender.close()  # a run that settled but died before its last line
        slot = spender.release_slot(STAGE)
        require_dim(slot, recipe)
        _require_noise(slot, several=plan.budget.column is not None)
        with progress(f"releasing the embedding: {recipe.kind}", 1) as bar:
            noise = NoiseSource.for_run(lock, str(slot.id))
            spender.charge(slot)
            ranks.tell({"charged": slot.id})  # only now: it is on disk
            steps = Hundredths(bar)
            released = release_embedding(stream.chunks(steps.moved), slot, recipe, noise, ranks)
            steps.finish()
        reach("mechanism:done")
        save_embedding(run.released / NAME, released)
        spender.settle(slot, run.released / NAME)
        if alone:
            spender.close()
    return _summary(released, slot)


def _follow(verified: VerifiedPlan, stream: CodeStream, ranks: Ranks) -> None:
    """Give the shard's sums once the main process tells that they are charged."""
    told = ranks.tell(None)
    give_sums(embedding_sums(stream, verified.lock.slots[told["charged"] - 1]), ranks)


def _require_noise(slot: Slot, *, several: bool) -> None:
    """Refuse noise out of range before it is charged, also as fine as shares of units need it."""
    blocks = blocks_of([slot], RADIUS)
    if several:
        blocks.finer(SHARE_BITS)


def _summary(released: ReleasedEmbedding, slot: Slot) -> dict[str, Any]:
    """Declared and released values; `slots` are those charged now."""
    return {
        "released": NAME,
        "slots": [slot.name],
        "features": released.recipe.kind,
        "classes": released.classes,
        "dim": released.dim,
        "count_std": released.count_std,
        "sum_std": released.sum_std,
    }
