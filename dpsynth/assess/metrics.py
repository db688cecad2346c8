"""Distances between two sets of features: Frechet distance, improved precision and recall.

Both are functions of the features alone; which network made them is said beside every value.
`counts.shortage` says at which counts one has no value, or one of little worth.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import UsageError

Features = NDArray[np.float64]
Labels = NDArray[np.int64]
NEIGHBOURS = 3
BLOCK = 1000
TIE = 1e-9
"""Relative width within which two squared distances count as equal (rounding of the products)."""


@dataclass(frozen=True)
class Manifold:
    """A feature set with the squared distance of each point to its k-th nearest other point.

    Attributes:
        points: features (n, d), centred at `centre`.
        squares: squared norms (n,).
        radii: squared distances (n,) to the k-th neighbour, the point itself not counted.
        centre: what was subtracted (d,).
    """

    points: Features
    squares: Features
    radii: Features
    centre: Features


def frechet_distance(first: Features, second: Features) -> float:
    """Squared 2-Wasserstein distance between the Gaussians fitted to two feature sets.

    ||m1 - m2||^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), Heusel et al. (2017), eq. 6, with
    pytorch-fid's estimators: means and covariances in float64, divisor n - 1. The trace of
    the root is taken from the symmetric C1^(1/2) C2 C1^(1/2), whose eigenvalues are those of
    C1 C2: equal to pytorch-fid's `sqrtm` where that is accurate, and defined where C1 C2 is
    singular.

    Args:
        first: features (n, d).
        second: features (m, d).

    Raises:
        UsageError: n or m is not above d, so that a covariance cannot have full rank.

    >>> rng = np.random.default_rng(0)
    >>> points = rng.normal(size=(100, 3))
    >>> round(frechet_distance(points, points + [3.0, 0, 4.0]), 6)
    25.0
    """
    check_pair(first, second)
    width = first.shape[1]
    if min(len(first), len(second)) <= width:
        raise UsageError(
            f"a Frechet distance in {width} features needs more than {width} images on each side"
        )
    gap = first.mean(axis=0) - second.mean(axis=0)
    cov1 = np.atleast_2d(np.cov(first, rowvar=False))
    cov2 = np.atleast_2d(np.cov(second, rowvar=False))
    values, vectors = np.linalg.eigh(cov1)
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    product = np.linalg.eigvalsh(root @ cov2 @ root)
    cross = np.sqrt(np.clip(product, 0, None)).sum()
    return float(gap @ gap + np.trace(cov1) + np.trace(cov2) - 2 * cross)


def per_class_frechet(
    first: Features,
    first_labels: Labels,
    second: Features,
    second_labels: Labels,
    classes: int,
) -> list[float | None]:
    """Frechet distance between the images of each class (StraightDP, D.1, Table 5).

    The paper's per-class FID is the mean over classes. It sees what a distance of the whole sets
    cannot: images of the right kind under the wrong label.

    Args:
        first: features (n, d).
        first_labels: classes (n,) in 0..classes-1.
        second: features (m, d).
        second_labels: classes (m,).
        classes: the declared number; a class that was never generated still counts.

    Returns:
        One value a class; None where a side has too few images of it.
    """
    pairs = per_class(first, first_labels, second, second_labels, classes)
    return [None if pair is None else frechet_distance(*pair) for pair in pairs]


def per_class(
    first: Features,
    first_labels: Labels,
    second: Features,
    second_labels: Labels,
    classes: int,
) -> Iterator[tuple[Features, Features] | None]:
    """The features of each class on both sides; None where a side has not more than d images.

    Raises:
        UsageError: the widths differ, a value is not finite, or labels do not fit the features.
    """
    check_pair(first, second)
    if len(first) != len(first_labels) or len(second) != len(second_labels):
        raise UsageError("each image needs one label")
    for label in range(classes):
        pair = first[first_labels == label], second[second_labels == label]
        yield None if min(map(len, pair)) <= first.shape[1] else pair


def gaussian_maps(first: Features, second: Features) -> tuple[Features, Features]:
    """Linear parts (d, d) of the optimal maps from the first Gaussian to the second, and back.

    T = C1^(-1/2) (C1^(1/2) C2 C1^(1/2))^(1/2) C1^(-1/2), so that T C1 T = C2 (Dowson and Landau
    1982); I - T is the derivative of the Frechet distance with respect to C1. Directions without
    variance are left out of the inverse roots.
    """
    cov1 = np.atleast_2d(np.cov(first, rowvar=False))
    cov2 = np.atleast_2d(np.cov(second, rowvar=False))
    root, inverse = _roots(cov1)
    middle, unmiddle = _roots(root @ cov2 @ root)
    return inverse @ middle @ inverse, root @ unmiddle @ root


def _roots(matrix: Features) -> tuple[Features, Features]:
    """Symmetric square root and its pseudo-inverse."""
    values, vectors = np.linalg.eigh(matrix)
    values[values <= len(values) * np.finfo(np.float64).eps * max(values[-1], 0.0)] = 0.0
    roots = np.sqrt(values)
    inverse = np.divide(1.0, roots, out=np.zeros_like(roots), where=roots > 0)
    return (vectors * roots) @ vectors.T, (vectors * inverse) @ vectors.T


def manifold(points: Features, k: int = NEIGHBOURS) -> Manifold:
    """Radii of the k-nearest-neighbour balls of a feature set (n, d).

    Raises:
        UsageError: n is not above k.
    """
    if len(points) <= k:
        raise UsageError(f"k={k} neighbours need more than {k} images on each side")
    # Centred, the products lose fewer digits; distances do not change.
    centre = points.mean(axis=0)
    centred = points - centre
    squares = np.einsum("nd,nd->n", centred, centred)
    radii = np.empty(len(points))
    for start in range(0, len(points), BLOCK):
        rows = slice(start, start + BLOCK)
        squared = squared_distances(centred[rows], squares[rows], centred, squares)
        # Column k in order: the point itself is among the k + 1 smallest.
        np.fill_diagonal(squared[:, start:], 0.0)
        radii[rows] = np.partition(squared, k, axis=1)[:, k]
    return Manifold(centred, squares, radii, centre)


def coverage(of: Features, by: Manifold) -> float:
    """Share of points `of` (m, d) that lie in at least one ball of `by` (ties count as inside)."""
    points = of - by.centre
    squares = np.einsum("nd,nd->n", points, points)
    inside = 0
    for start in range(0, len(points), BLOCK):
        rows = slice(start, start + BLOCK)
        squared = squared_distances(points[rows], squares[rows], by.points, by.squares)
        # Rounding grows with the points' norms, not with their distance.
        slack = TIE * (squares[rows, None] + by.squares) * 1e-3 + TIE * by.radii
        inside += int((squared <= by.radii + slack).any(axis=1).sum())
    return inside / len(points)


def precision_recall(
    synthetic: Features, real: Features, k: int = NEIGHBOURS
) -> tuple[float, float]:
    """Improved precision and recall, Kynkaanniemi et al. (2019), eqs. 1 and 2.

    Precision: share of synthetic points inside the union of the real points' k-NN balls.
    Recall: share of real points inside the union of the synthetic points' k-NN balls.
    Exact: all pairs are compared, in blocks.

    Args:
        synthetic: features (n, d).
        real: features (m, d).
        k: neighbours that set a ball's radius.

    Raises:
        UsageError: n or m is not above k, or the widths differ.
    """
    check_pair(synthetic, real)
    return coverage(synthetic, manifold(real, k)), coverage(real, manifold(synthetic, k))


def squared_distances(
    left: Features, left_sq: Features, right: Features, right_sq: Features
) -> Features:
    """Squared distances (n, m), never negative."""
    squared: Features = left @ right.T
    squared *= -2
    squared += left_sq[:, None]
    squared += right_sq
    return np.maximum(squared, 0, out=squared)


def check_pair(first: Features, second: Features) -> None:
    """Refuse features that do not fit each other.

    Raises:
        UsageError: not (n, d) and (m, d), or a value that is not finite.
    """
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise UsageError(f"features are {first.shape} and {second.shape}, expected (n, d), (m, d)")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise UsageError("features are not finite")
