"""The embedding release: counts and sums of features by class, once, with noise.

Of DP-MERF, DP-HP and DP-NTK alike (StraightDP, D.1): they differ in the feature map alone, whose
vectors have norm at most 1. Derivation in docs/maths/embeddings.md.
"""

from collections.abc import Iterable

from dpsynth.accounting.queries import EmbeddingSums
from dpsynth.artifacts.embedding import MapRecipe, ReleasedEmbedding
from dpsynth.artifacts.lock import Slot
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError
from dpsynth.private.blocks import Blocks, blocks_of
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import ExactSums
from dpsynth.private.noise import NoiseSource
from dpsynth.private.shares import unit_sums
from dpsynth.private.together import total_sums

RADIUS = 1.0
"""Bound on the norm of every feature vector."""


def release_embedding(
    chunks: Iterable[UnitCodes],
    slot: Slot,
    recipe: MapRecipe,
    noise: NoiseSource,
    ranks: Ranks = ALONE,
) -> ReleasedEmbedding:
    """The mechanism: exact sums of quantised features, and discrete Gaussian noise on each.

    Args:
        chunks: one pass over the units' features, quantised in steps of 2^-16; a record of an
            undeclared class contributes nothing.
        slot: pays for the release.
        recipe: of the feature map that made the features, public.
        noise: a source for this release alone.
        ranks: this is the main one; the others give their shards' sums (`embedding_sums`).

    Raises:
        PlanError: the slot's statistic is no embedding release, or of another size.
    """
    require_dim(slot, recipe)
    blocks = blocks_of([slot], RADIUS)  # refused before any record is read
    return add_noise(total_sums(embedding_sums(chunks, slot), ranks), blocks, recipe, noise)


def embedding_sums(chunks: Iterable[UnitCodes], slot: Slot) -> ExactSums:
    """Exact counts (Y,) and sums (Y, D), in one pass over one chunk or more: never released.

    Records count whole, the images of a unit of several by its share (docs/maths/units.md).
    """
    statistic = statistic_of(slot)
    return unit_sums(
        chunks,
        statistic.classes,
        lambda chunk: (chunk.codes, chunk.labels),
        statistic,
        second=False,
    )


def add_noise(
    exact: ExactSums, blocks: Blocks, recipe: MapRecipe, noise: NoiseSource
) -> ReleasedEmbedding:
    """Noise on every count and every number of every sum, fresh for each."""
    blocks = blocks.finer(exact.bits)
    noisy = blocks.release(exact, noise)
    return ReleasedEmbedding(
        counts=noisy.counts,
        sums=noisy.sums,
        count_std=blocks.counts.real_std,
        sum_std=blocks.sums.real_std,
        recipe=recipe,
    )


def require_dim(slot: Slot, recipe: MapRecipe) -> None:
    """Refuse a slot of another statistic, or of another size than the map's. Raises PlanError."""
    statistic = statistic_of(slot)
    if statistic.dim != recipe.dim:
        raise PlanError(
            f"slot {slot.name} declares {statistic.dim} features, and the map has {recipe.dim}",
            hint="plan the run again",
        )


def statistic_of(slot: Slot) -> EmbeddingSums:
    """What the slot releases. Raises PlanError for anything but an embedding."""
    if not isinstance(slot.statistic, EmbeddingSums):
        raise PlanError("the lock's embedding stage is not a release that this version knows")
    return slot.statistic
