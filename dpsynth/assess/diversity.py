"""How different the images of one class are from each other: the mean distance of two of them.

Beside the same figure of real records it shows a collapse that accuracy and consistency do not see:
copies of one good image score 1 on both.
"""

import numpy as np
from numpy.typing import NDArray

from dpsynth.assess.bootstrap import LEVEL, Interval, around
from dpsynth.assess.metrics import Features, Labels
from dpsynth.errors import UsageError

BLOCK = 500
METHOD = (
    "jackknife over the images of each class (Hoeffding projections of the mean over all pairs); "
    "networks are fixed"
)


def within_class(features: Features, labels: Labels, classes: int) -> list[float | None]:
    """Mean Euclidean distance over all pairs of different images of each class.

    Args:
        features: (n, d).
        labels: (n,) in 0..classes-1.
        classes: the declared number; a class that was never generated still counts.

    Returns:
        One value a class; None with fewer than 2 images.

    Raises:
        UsageError: features are not (n, d) and finite, or labels do not fit them.

    >>> points = np.array([[0.0, 0], [3, 4], [1, 1]])
    >>> within_class(points, np.array([0, 0, 1]), 3)
    [5.0, None, None]
    """
    return [
        None if means is None else float(means.mean()) for means in _all(features, labels, classes)
    ]


def diversity_interval(
    features: Features, labels: Labels, classes: int, *, level: float = LEVEL
) -> Interval | None:
    """Interval of the mean of `within_class` over the classes that have a value; None without one.

    In a class of n images, one at a mean distance r from the others moves the class's value by
    2 (r - value) / n to first order; classes are independent.

    Raises:
        UsageError: as `within_class`.
    """
    found = [means for means in _all(features, labels, classes) if means is not None]
    if not found:
        return None
    value = float(np.mean([means.mean() for means in found]))
    variance = sum(4 * float(np.var(means, ddof=1)) / len(means) for means in found)
    return around(value, variance / len(found) ** 2, METHOD, level=level, floor=0.0, estimate=value)


def _all(features: Features, labels: Labels, classes: int) -> list[NDArray[np.float64] | None]:
    """Of each class, the mean distance of each image to the others; None below 2 images."""
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise UsageError(f"{features.shape} features have {labels.shape} labels")
    if not np.isfinite(features).all():
        raise UsageError("features are not finite")
    chosen = (features[labels == label] for label in range(classes))
    return [None if len(points) < 2 else _mean_distances(points) for points in chosen]


def _mean_distances(points: Features) -> NDArray[np.float64]:
    from scipy.spatial.distance import cdist

    sums = [
        cdist(points[start : start + BLOCK], points).sum(axis=1)
        for start in range(0, len(points), BLOCK)
    ]
    means: NDArray[np.float64] = np.concatenate(sums) / (len(points) - 1)
    return means
