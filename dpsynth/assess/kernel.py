"""Kernel distance between two feature sets (KID), and what chance does to it.

Squared maximum mean discrepancy with the cubic polynomial kernel k(x, y) = (x.y / d + 1)^3 and the
unbiased estimator (Binkowski et al. 2018, sec. 4; Gretton et al. 2012, eq. 3). Unbiased at any
count, so it may fall below 0 where the two sets have one distribution.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpsynth.assess.bootstrap import LEVEL, Interval, around
from dpsynth.assess.metrics import Features
from dpsynth.errors import UsageError

SUBSETS = 100
SIZE = 1000
TILE = 512
METHOD = (
    "jackknife over the images of both sides (Hoeffding projections of the estimator on all "
    "pairs); networks are fixed"
)


@dataclass(frozen=True)
class KernelDistance:
    """KID as it is usually reported.

    Attributes:
        mean: over the subsets.
        std: over the subsets (divisor: their number). Not an error of `mean`: see
            `kernel_interval`.
        subsets: how many subsets.
        size: images of each side in a subset.
    """

    mean: float
    std: float
    subsets: int = SUBSETS
    size: int = SIZE

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def kernel_distance(
    first: Features,
    second: Features,
    *,
    subsets: int = SUBSETS,
    size: int = SIZE,
    seed: int = 0,
) -> KernelDistance:
    """Mean and spread of `squared_mmd` over random subsets of both sides.

    Each subset is drawn without replacement from all images. With fewer than `size` images on a
    side the subsets are as large as that side; where that takes all images of both sides, one
    subset says it all and the spread is 0.

    Args:
        first: features (n, d), n at least 2.
        second: features (m, d), m at least 2.
        subsets: how many.
        size: images of each side in a subset.
        seed: of the subsets.

    Raises:
        UsageError: fewer than 2 images on a side, or features that do not fit.

    >>> points = np.random.default_rng(0).normal(size=(50, 4))
    >>> found = kernel_distance(points, points + 1.0)
    >>> found.subsets, found.size, found.mean > 1
    (1, 50, True)
    """
    _check(first, second)
    size = min(size, len(first), len(second))
    if size < 2 or subsets < 1:
        raise UsageError("a kernel distance needs a subset of at least 2 images a side")
    if size == len(first) == len(second):
        subsets = 1
    rng = np.random.default_rng(seed)
    values = [
        squared_mmd(
            first[rng.choice(len(first), size, replace=False)],
            second[rng.choice(len(second), size, replace=False)],
        )
        for _ in range(subsets)
    ]
    return KernelDistance(float(np.mean(values)), float(np.std(values)), subsets, size)


def squared_mmd(first: Features, second: Features) -> float:
    """Unbiased squared MMD on all pairs of (n, d) and (m, d); pairs of one image are left out."""
    own, other, between, _ = _means(first, second)
    return float(own.mean() + other.mean() - 2 * between.mean())


def kernel_interval(first: Features, second: Features, *, level: float = LEVEL) -> Interval:
    """Interval of the population's kernel distance, about the estimate on all pairs (`estimate`).

    An image x of the first set moves the estimate by (2/n) (mean k(x, others of the first) -
    mean k(x, second)) to first order; the variances of that on both sides, over n and m, add up.
    Where the sets have one distribution the first order vanishes and what remains is above the
    true variance (by about 2): the interval is wide rather than narrow.

    Raises:
        UsageError: fewer than 2 images on a side, or features that do not fit.
    """
    _check(first, second)
    own, other, between, across = _means(first, second)
    estimate = float(own.mean() + other.mean() - 2 * between.mean())
    variance = 4 * np.var(own - between, ddof=1) / len(first)
    variance += 4 * np.var(other - across, ddof=1) / len(second)
    return around(estimate, float(variance), METHOD, level=level, estimate=estimate)


def _means(first: Features, second: Features) -> tuple[Features, Features, Features, Features]:
    """Mean kernel of each image with the others of its side, and with the other side.

    In order: first with first (n,), second with second (m,), first with second (n,), second with
    first (m,).
    """
    n, m = len(first), len(second)
    between, across = _sums(first, second)
    return _within(first) / (n - 1), _within(second) / (m - 1), between / m, across / n


def _within(points: Features) -> Features:
    """Sums of k(x, y) over the other points y of the set; each pair is taken once, in tiles."""
    total = np.zeros(len(points))
    for start in range(0, len(points), TILE):
        block = points[start : start + TILE]
        own = _kernel(block, block)
        np.fill_diagonal(own, 0.0)
        total[start : start + TILE] += own.sum(axis=1)
        rows, columns = _sums(block, points[start + TILE :])
        total[start : start + TILE] += rows
        total[start + TILE :] += columns
    return total


def _sums(left: Features, right: Features) -> tuple[Features, Features]:
    """Row and column sums of the kernel matrix (n, m)."""
    rows, columns = np.zeros(len(left)), np.zeros(len(right))
    for i in range(0, len(left), TILE):
        for j in range(0, len(right), TILE):
            tile = _kernel(left[i : i + TILE], right[j : j + TILE])
            rows[i : i + TILE] += tile.sum(axis=1)
            columns[j : j + TILE] += tile.sum(axis=0)
    return rows, columns


def _kernel(left: Features, right: Features) -> Features:
    base: Features = left @ right.T
    base /= left.shape[1]
    base += 1.0
    cube = base * base
    cube *= base
    return cube


def _check(first: Features, second: Features) -> None:
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise UsageError(f"features are {first.shape} and {second.shape}, expected (n, d), (m, d)")
    if min(len(first), len(second)) < 2:
        raise UsageError("a kernel distance needs at least 2 images on each side")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise UsageError("features are not finite")
