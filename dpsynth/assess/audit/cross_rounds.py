"""A world's caption release, and what an adversary sees in each of its blocks (equation 5)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.cross import ReleasedCross
from dpsynth.artifacts.lock import Slot
from dpsynth.assess.audit.worlds import Array, Statistic
from dpsynth.private.captioned import Captioned
from dpsynth.private.cross import CrossBlocks, cross_blocks, quantise_features
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import Block, ExactSums


def cross_statistics(
    released: ReleasedCross,
    known: ExactSums,
    slots: tuple[Slot, ...],
    canaries: UnitCodes,
    captioned: Captioned,
) -> Iterator[Statistic]:
    """Blocks in the order in which `private.cross.add_cross_noise` draws their noise.

    Every canary adds w w^T of its own row w = (z; f) to the same entries.

    Args:
        released: what the world's round released.
        known: exact sums of all records but the canaries.
        slots: that paid for it.
        canaries: all of them, as the mechanism takes them.
        captioned: how captions are read, and the radii.
    """
    space = captioned.space
    blocks = cross_blocks(slots, space.radius, space.feature_radius).finer(known.bits)
    features, _ = quantise_features(captioned.features_of(canaries), space)
    codes, whole = canaries.codes.astype(np.float64), float(1 << known.bits)
    made = _Made("cross-moments", whole, len(codes))
    yield from _beside(made, released, known, blocks, codes)
    d, seconds = space.dim, known.seconds[0]
    f = features.astype(np.float64)
    yield from _symmetric(made, "captions", blocks.ff, (released.ff, seconds[d:, d:]), f)
    pairs = (codes[:, :, None] * f[:, None, :]).reshape(len(codes), -1)
    yield made.block("cross", blocks.zf, (released.zf, seconds[:d, d:]), pairs)
    yield from _symmetric(made, "codes", blocks.zz, (released.zz, seconds[:d, :d]), codes)


class _Made:
    """Blocks of one release, to all entries of which each of `count` canaries may add."""

    def __init__(self, release: str, whole: float, count: int) -> None:
        self._release, self._whole, self._count = release, whole, count

    def block(self, part: str, scale: Block, sums: tuple[Any, Any], values: Array) -> Statistic:
        """`sums`: as released, and exact; `values` (m, k): what the canaries add, in steps."""
        noisy, known = (np.asarray(one.reshape(-1), np.float64) for one in sums)
        places = np.broadcast_to(np.arange(values.shape[1]), values.shape)
        real = values * (self._whole * scale.unit)
        return Statistic(
            self._release, part, noisy, known * scale.unit, scale.real_std, places, real
        )

    def ones(self) -> Array:
        """What each canary adds to a count."""
        return np.ones((self._count, 1))


def _beside(
    made: _Made, released: ReleasedCross, known: ExactSums, blocks: CrossBlocks, codes: Array
) -> Iterator[Statistic]:
    """Count and sum of codes, where the paper's mechanisms release them too."""
    if blocks.beside is None:
        return
    counts, total = blocks.beside
    yield made.block("counts", counts, (released.count, known.counts), made.ones())
    sums = released.total, known.sums[:, : codes.shape[1]]
    yield made.block("sums", total, sums, codes)


def _symmetric(
    made: _Made,
    part: str,
    scales: tuple[Block, Block],
    matrices: tuple[NDArray[Any], NDArray[Any]],
    rows: Array,
) -> Iterator[Statistic]:
    """Diagonal and upper triangle of a symmetric block (k, k) of rows (m, k)."""
    axes = np.arange(rows.shape[1])
    diagonals = matrices[0][axes, axes], matrices[1][axes, axes]
    yield made.block(f"{part}-diagonal", scales[0], diagonals, np.square(rows))
    row, column = np.triu_indices(len(axes), k=1)
    others = matrices[0][row, column], matrices[1][row, column]
    yield made.block(f"{part}-off-diagonal", scales[1], others, rows[:, row] * rows[:, column])
