"""From noisy moments to one Gaussian a class: post-processing, free of charge.

StraightDP section 3.1 (iii): counts clamped at 1, small classes fall back to the global mean,
second moments symmetrised and projected, rank truncated after the noise. The noise level is
released too, and means and covariances are shrunk by it; see docs/maths/moments.md.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.moments import ReleasedMoments
from dpsynth.planning.schema import Moments

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ClassGaussians:
    """weights (Y,) that sum to one, means (Y, d), covariances (Y, d, d), positive definite."""

    weights: Array
    means: Array
    covariances: Array


def estimate(moments: ReleasedMoments, settings: Moments) -> ClassGaussians:
    """Gaussians of every declared class; finite and positive definite for any noise."""
    moments.check()
    counts = np.maximum(moments.counts, 1.0)
    large = moments.counts >= settings.least_count
    total = max(float(moments.counts.sum()), 1.0)
    overall = _into_ball(moments.sums.sum(axis=0) / total, moments.radius)
    # The global values hold a class's own noise too, so less of a difference is noise.
    others = np.clip(1.0 - counts / total, 0.0, 1.0)
    means = np.repeat(overall[None], moments.classes, axis=0)
    for y in np.flatnonzero(large).tolist():
        means[y] = _class_mean(moments, y, overall, others[y])
    between = _between(counts * large, total, means, overall)
    pooled = _symmetrised((moments.seconds.sum(axis=0) - between) / total)
    covariances = np.repeat(pooled[None], moments.classes, axis=0)
    if moments.covariance == "class":
        for y in np.flatnonzero(large).tolist():
            covariances[y] = _class_covariance(moments, y, means[y], pooled, others[y])
    floored = np.stack([_positive(c, settings.floor, settings.rank) for c in covariances])
    return ClassGaussians(counts / counts.sum(), means, floored)


def _class_mean(moments: ReleasedMoments, y: int, overall: Array, others: float) -> Array:
    """Mean (d,) of a class, shrunk to the global mean by its known noise (James and Stein)."""
    count = max(float(moments.counts[y]), 1.0)
    difference = moments.sums[y] / count - overall
    kept = _kept(difference, others * moments.dim * (moments.sum_std / count) ** 2)
    return _into_ball(overall + kept * difference, moments.radius)


def _between(counts: Array, total: float, means: Array, overall: Array) -> Array:
    """What the means alone add to the second moment; small classes sit at the global mean."""
    rest = max(total - float(counts.sum()), 0.0)
    between: Array = np.einsum("y,yi,yj->ij", counts, means, means)
    return between + rest * np.outer(overall, overall)


def _class_covariance(
    moments: ReleasedMoments, y: int, mean: Array, pooled: Array, others: float
) -> Array:
    """Covariance (d, d) of a class, shrunk to the pooled one by its known noise."""
    count = max(float(moments.counts[y]), 1.0)
    base = _positive(pooled, 0.0, None)
    difference = _symmetrised(moments.seconds[y] / count - np.outer(mean, mean)) - base
    entries = moments.dim * (moments.dim + 1) / 2
    kept = _kept(difference, others * entries * (moments.second_std / count) ** 2)
    return base + kept * difference


def _kept(difference: Array, noise: float) -> float:
    """Share of a difference that its noise, E ||noise||^2, does not explain, in [0, 1]."""
    size = float(np.square(difference).sum())
    return max(0.0, 1.0 - noise / size) if size > 0 else 0.0


def _positive(matrix: Array, floor: float, rank: int | None) -> Array:
    """Projection on matrices with eigenvalues >= floor; those past `rank` become the floor."""
    values, vectors = np.linalg.eigh(_symmetrised(matrix))
    values = np.maximum(values, floor)
    if rank is not None and rank < len(values):
        values[: len(values) - rank] = floor
    return _symmetrised((vectors * values) @ vectors.T)


def _symmetrised(matrix: Array) -> Array:
    return (matrix + matrix.T) / 2


def _into_ball(vector: Array, radius: float) -> Array:
    """The nearest point of the ball that every code lies in."""
    norm = float(np.linalg.norm(vector))
    return vector * (radius / norm) if norm > radius else vector
