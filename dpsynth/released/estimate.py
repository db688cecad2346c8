"""From noisy moments to one Gaussian a class: post-processing, free of charge.

StraightDP section 3.1 (iii): counts clamped at 1, small classes fall back to the global mean,
second moments symmetrised and projected, rank truncated after the noise. The noise level is
released too, and means and covariances are shrunk by it; see docs/maths/moments.md.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.moments import ReleasedMoments
from dpsynth.errors import UsageError
from dpsynth.planning.release import Moments
from dpsynth.public.within import Spread

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ClassGaussians:
    """weights (Y,) that sum to one, means (Y, d), covariances (Y, d, d), positive definite."""

    weights: Array
    means: Array
    covariances: Array


@dataclass(frozen=True)
class ClassMixtures:
    """A Gaussian mixture for each class: what is drawn from, and what the field is made of.

    weights (Y,), positive, that sum to one; shares (Y, K), rows that sum to one, zero for an unused
    cell; means (Y, K, d); covariances (Y, K, d, d), positive definite also where the share is zero.
    """

    weights: Array
    shares: Array
    means: Array
    covariances: Array


def as_mixtures(gaussians: ClassGaussians) -> ClassMixtures:
    """The same distribution as mixtures of one Gaussian each (K = 1)."""
    return ClassMixtures(
        gaussians.weights,
        np.ones((len(gaussians.weights), 1)),
        gaussians.means[:, None],
        gaussians.covariances[:, None],
    )


def estimate(moments: ReleasedMoments, settings: Moments) -> ClassGaussians:
    """Gaussians of every declared class; finite and positive definite for any noise.

    Of a release of means alone: `estimate_means`.
    """
    moments.check()
    if moments.covariance == "public":
        raise UsageError("a release of means alone has no covariance: it is that of public codes")
    counts = np.maximum(moments.counts, 1.0)
    large = moments.counts >= settings.least_count
    total = max(float(moments.counts.sum()), 1.0)
    overall = into_ball(moments.sums.sum(axis=0) / total, moments.radius)
    # The global values hold a class's own noise too, so less of a difference is noise.
    others = np.clip(1.0 - counts / total, 0.0, 1.0)
    means = _means(moments, large, overall, others)
    between = _between(counts * large, total, means, overall)
    pooled = without_buried(
        symmetrised((moments.seconds.sum(axis=0) - between) / total),
        moments.second_std * np.sqrt(len(moments.seconds)) / total,
    )
    covariances = np.repeat(pooled[None], moments.classes, axis=0)
    if moments.covariance == "class" and large.any():
        covariances[large] = _class_covariances(moments, means, large, pooled, others)
    floored = np.stack([positive(c, settings.floor, settings.rank) for c in covariances])
    return ClassGaussians(counts / counts.sum(), means, floored)


def estimate_means(
    moments: ReleasedMoments, settings: Moments, spread: Spread, classes: int
) -> ClassGaussians:
    """Gaussians of `classes` with released means and a public covariance (d, d).

    Means are shrunk as in `estimate`, and the covariance is that of public codes inside their
    classes. Where one mean was released for all records, every class has it, and the covariance
    of all public codes: then the classes' own means are in it. Finite and positive definite for
    any noise.

    Raises UsageError for a release of another kind, or of other groups.
    """
    moments.check()
    if moments.covariance != "public" or moments.classes not in (1, classes):
        raise UsageError(f"no release of means of {classes} classes, or of all records")
    counts = np.maximum(moments.counts, 1.0)
    total = max(float(moments.counts.sum()), 1.0)
    overall = into_ball(moments.sums.sum(axis=0) / total, moments.radius)
    others = np.clip(1.0 - counts / total, 0.0, 1.0)
    means = _means(moments, moments.counts >= settings.least_count, overall, others)
    public = spread.within
    if moments.classes < classes:
        if spread.total is None:
            raise UsageError("the covariance of all public codes is missing")
        counts, means = np.ones(classes), np.repeat(means, classes, axis=0)
        public = spread.total
    covariance = positive(public, settings.floor, settings.rank)
    covariances = np.repeat(covariance[None], classes, axis=0)
    return ClassGaussians(counts / counts.sum(), means, covariances)


def _means(
    moments: ReleasedMoments, large: NDArray[np.bool_], overall: Array, others: Array
) -> Array:
    """Means (Y, d), shrunk to the global mean by their known noise (James and Stein)."""
    means = np.repeat(overall[None], moments.classes, axis=0)
    for y in np.flatnonzero(large).tolist():
        count = max(float(moments.counts[y]), 1.0)
        difference = moments.sums[y] / count - overall
        kept = kept_share(difference, others[y] * moments.dim * (moments.sum_std / count) ** 2)
        means[y] = into_ball(overall + kept * difference, moments.radius)
    return means


def _between(counts: Array, total: float, means: Array, overall: Array) -> Array:
    """What the means alone add to the second moment; small classes sit at the global mean."""
    rest = max(total - float(counts.sum()), 0.0)
    between: Array = np.einsum("y,yi,yj->ij", counts, means, means)
    return between + rest * np.outer(overall, overall)


def without_buried(matrix: Array, std: float) -> Array:
    """Eigenvalues that noise alone could make are replaced by their mean (the trace stays).

    Symmetric noise of entry std `std` (diagonal; 1/sqrt(2) of it elsewhere) has its spectrum in
    [-std sqrt(2 d), std sqrt(2 d)] (Wigner): below that edge only the sum is known.
    """
    values, vectors = np.linalg.eigh(matrix)
    buried = values < std * np.sqrt(2 * len(values))
    if buried.any():
        values[buried] = max(float(values[buried].mean()), 0.0)
    return symmetrised((vectors * values) @ vectors.T)


def _class_covariances(
    moments: ReleasedMoments,
    means: Array,
    large: NDArray[np.bool_],
    pooled: Array,
    others: Array,
) -> Array:
    """Covariances of the large classes, each entry shrunk to the pooled one by its known noise.

    In the eigenbasis of the pooled covariance, with eigenvalues l, a class differs from it by
    entries of variance k l_i l_j (twice that on the diagonal: a Wishart's proportions), to which
    the release adds noise of variance s_y^2 / 2 (twice that on the diagonal: rotations keep it).
    The one number k is fitted to all classes by second moments; a Wiener filter does the rest.
    """
    counts = np.maximum(moments.counts[large], 1.0)
    outer = np.einsum("yi,yj->yij", means[large], means[large])
    values, vectors = np.linalg.eigh(pooled)
    scales = np.outer(np.maximum(values, 0.0), np.maximum(values, 0.0))
    raw = moments.seconds[large] / counts[:, None, None] - outer - pooled
    difference = np.einsum("ia,yij,jb->yab", vectors, raw, vectors)
    noise = others[large] * (moments.second_std / counts) ** 2
    entries = moments.dim * (moments.dim + 1) / 2
    expected = len(counts) * (float(scales.sum()) + float(np.trace(scales))) / 2
    explained = float(np.square(difference).sum()) - entries * float(noise.sum())
    spread = max(explained / expected, 0.0) if expected > 0 else 0.0
    signal = spread * scales
    both = signal + noise[:, None, None]
    kept = np.divide(signal, both, out=np.zeros_like(both), where=both > 0)
    shrunk: Array = np.einsum("ia,yab,jb->yij", vectors, kept * difference, vectors)
    return pooled + shrunk


def kept_share(differences: Array, noise: Array | float) -> Array:
    """Share (...) of differences (..., d) that their noise, E ||noise||^2, does not explain.

    In [0, 1]: the positive part of James and Stein's factor; 0 where there is no difference.
    """
    size = np.square(differences).sum(axis=-1)
    known = size > noise
    share: Array = 1.0 - np.divide(noise, size, out=np.ones_like(size), where=known)
    return share


def into_ball(points: Array, radius: float) -> Array:
    """Each point (..., d), or the nearest one of the ball of `radius` about 0."""
    norms = np.linalg.norm(points, axis=-1, keepdims=True)
    inside: Array = points * np.minimum(1.0, radius / np.maximum(norms, radius))
    return inside


def positive(matrix: Array, floor: float, rank: int | None) -> Array:
    """Projection on matrices with eigenvalues >= floor; those past `rank` become the floor."""
    values, vectors = np.linalg.eigh(symmetrised(matrix))
    values = np.maximum(values, floor)
    if rank is not None and rank < len(values):
        values[: len(values) - rank] = floor
    return symmetrised((vectors * values) @ vectors.T)


def symmetrised(matrix: Array) -> Array:
    """The symmetric part of a matrix (d, d)."""
    return (matrix + matrix.T) / 2
