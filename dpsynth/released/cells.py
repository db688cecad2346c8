"""From noisy class and cell moments to a Gaussian mixture a class: post-processing, free of charge.

Every covariance is shrunk towards what is better known, level by level: all cells together towards
public shapes, a class towards its share of all, a cell towards its class. What each level is worth
is fitted to the released values and their known noise (docs/maths/cells.md, C7 to C9).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.cells import ReleasedCells
from dpsynth.artifacts.moments import ReleasedMoments
from dpsynth.planning.release import Moments
from dpsynth.released import shrink
from dpsynth.released.centres import cut_covariances
from dpsynth.released.estimate import (
    ClassGaussians,
    ClassMixtures,
    estimate,
    into_ball,
    kept_share,
)

Array = NDArray[np.float64]
Templates = Callable[[Array], list[Array]]
"""Public shapes at cell means (m, d): a list of covariances (m, d, d) each."""

_PASSES = 3  # of fitting coefficients and spreads in turn
_SEED = 6  # of public draws
_SPREAD = 0.05  # where fitting starts


@dataclass(frozen=True)
class _Known:
    """The cells whose noisy count says that they are there, m of them.

    owners (m,): their classes; places (m,): their cells; counts (m,); means (m, d);
    covariances (m, d, d), raw; noise (m,): variance of a diagonal entry of those.
    """

    owners: NDArray[np.int64]
    places: NDArray[np.int64]
    counts: Array
    means: Array
    covariances: Array
    noise: Array

    def by_class(self, values: Array, classes: int) -> Array:
        """Averages (Y, ...) of values (m, ...) over each class's cells, by counts; 0 if none."""
        total = np.zeros((classes, *values.shape[1:]))
        np.add.at(total, self.owners, _spread_out(self.counts, values) * values)
        weight = np.maximum(self.sizes(classes), 1.0)
        return total / _spread_out(weight, total)

    def overall(self, values: Array) -> Array:
        """Average (...) of values (m, ...) over all cells, by counts."""
        average: Array = np.average(values, axis=0, weights=self.counts)
        return average

    def sizes(self, classes: int) -> Array:
        """Sum of counts (Y,) of each class's known cells."""
        sizes: Array = np.bincount(self.owners, self.counts, minlength=classes).astype(np.float64)
        return sizes


def estimate_cells(
    moments: ReleasedMoments,
    cells: ReleasedCells,
    settings: Moments,
    templates: Templates | None = None,
    within: Array | None = None,
) -> ClassMixtures:
    """A mixture for every declared class; finite and positive definite for any noise.

    A class none of whose cells is known has one component, its Gaussian of the first round.

    Args:
        moments: the first round.
        cells: the last round, with second moments.
        settings: the plan's moments stage.
        templates: public shapes at given means; None leaves them out.
        within: public within-class covariance (d, d); None leaves it out.
    """
    cells.check()
    gaussians = estimate(moments, settings)
    known = _known(cells, settings)
    if not len(known.counts):
        return _mixtures(cells, known, known.covariances, gaussians)
    cut = cut_covariances(gaussians, cells.centres, cells.used, cells.clip, _SEED)
    shapes = templates(known.means) if templates is not None else []
    shapes = [*shapes, cut[known.owners, known.places]]
    shaped = _covariances(moments, known, shapes, within)
    floored = shrink.positive(shaped, min(settings.floor, float(cells.radius) ** 2 * 1e-3))
    return _mixtures(cells, known, floored, gaussians)


def _known(cells: ReleasedCells, settings: Moments) -> _Known:
    """Means, shrunk by their noise, and raw covariances of the cells that are surely there."""
    if cells.seconds is None:
        raise ValueError("a Lloyd round has no second moments to estimate from")
    least = max(settings.least_count, 2 * cells.count_std)
    owners, places = np.nonzero(cells.used & (cells.counts >= least))
    counts = cells.counts[owners, places]
    offsets = cells.sums[owners, places] / counts[:, None]
    offsets *= kept_share(offsets, cells.dim * np.square(cells.sum_std / counts))[:, None]
    offsets = into_ball(offsets, cells.radius)
    second = cells.seconds[owners, places] / counts[:, None, None]
    return _Known(
        owners,
        places,
        counts,
        into_ball(cells.centres[owners, places] + offsets, cells.clip),
        second - np.einsum("mi,mj->mij", offsets, offsets),
        np.square(cells.second_std / counts),
    )


def _covariances(
    moments: ReleasedMoments, known: _Known, shapes: list[Array], within: Array | None
) -> Array:
    """Covariances (m, d, d) of the known cells, shrunk level by level."""
    pooled = _pooled(moments, known, shapes, within)
    values, basis = np.linalg.eigh(pooled)
    values = np.maximum(values, shrink.FLOOR)
    turned = [_turned(shape, basis) for shape in shapes]
    found = _within_classes(moments, known, basis, values, turned)
    return _turned(found, basis.T)


def _pooled(
    moments: ReleasedMoments, known: _Known, shapes: list[Array], within: Array | None
) -> Array:
    """The mean within-cell covariance (d, d), shrunk towards public shapes."""
    data, noise = _pooled_data(moments, known)
    public = [known.overall(shape) for shape in shapes]
    public += [within] if within is not None else []
    if not public:  # nothing public to say: an isotropic guess of the same trace
        dim = data.shape[0]
        public = [np.eye(dim) * max(float(np.trace(data)) / dim, shrink.FLOOR)]
    target, spread = np.mean(public, axis=0), _SPREAD
    level = np.array([noise])
    for _ in range(_PASSES):
        values, basis = np.linalg.eigh(target)
        scales = _scales(values)
        turned = [_turned(shape, basis)[None] for shape in public]
        own = _turned(data, basis)[None]
        shares = shrink.fitted_targets(own, level, scales, spread, turned)
        if not shares.any():  # noise alone: keep the shape, give it the trace that is known
            shares = np.full(len(public), max(float(np.trace(data)), 0.0) / _trace(public))
        fitted = _combined(shares, turned)
        spread = shrink.fitted_spread(own - fitted, level, scales, spread)
        target = shrink.positive(_combined(shares, [shape[None] for shape in public])[0])
    shrunk: Array = shrink.shrunk(data[None], level, target[None], spread)[0]
    return shrunk


def _within_classes(
    moments: ReleasedMoments, known: _Known, basis: Array, values: Array, shapes: list[Array]
) -> Array:
    """Each cell's covariance (m, d, d) in the pooled eigenbasis.

    A cell's target is a fitted sum of the pooled covariance and its own shapes, moved by what its
    class as a whole differs from that.
    """
    classes, scales = moments.classes, _scales(values)
    own = _turned(known.covariances, basis)
    by_class, class_noise = _class_data(moments, known, basis)
    here = known.sizes(classes) > 0
    targets = [np.repeat(np.diag(values)[None], len(own), axis=0), *shapes]
    moved = np.zeros_like(own)
    class_spread = spread = _SPREAD
    for number in range(_PASSES):
        shares = shrink.fitted_targets(own - moved, known.noise, scales, spread, targets)
        fitted = _combined(shares, targets) if shares.any() else targets[0]
        mean = shrink.positive(known.by_class(fitted, classes)[here])
        difference = by_class[here] - mean
        class_spread = shrink.fitted_spread(difference, class_noise[here], scales, class_spread)
        if number > 0:  # the first guess of the spreads is too rough to be worth a descent
            moves = np.zeros_like(by_class)
            moves[here] = (
                shrink.shrunk(by_class[here], class_noise[here], mean, class_spread) - mean
            )
            moved = moves[known.owners]
        spread = shrink.fitted_spread(own - fitted - moved, known.noise, scales, spread)
    target = _kept_positive(fitted, moved)
    return shrink.shrunk(own, known.noise, target, spread)


def _kept_positive(fitted: Array, moved: Array, least: float = 0.2) -> Array:
    """The sum of both (m, d, d), with no direction below `least` of what `fitted` has there."""
    values, vectors = np.linalg.eigh(fitted)
    root = np.sqrt(np.maximum(values, shrink.FLOOR))[:, None, :]
    whitened = np.swapaxes(vectors / root, 1, 2) @ (fitted + moved) @ (vectors / root)
    coloured: Array = vectors * root
    return coloured @ shrink.positive(whitened, least) @ np.swapaxes(coloured, 1, 2)


def _pooled_data(moments: ReleasedMoments, known: _Known) -> tuple[Array, float]:
    """Mean within-cell covariance, and its noise: by the last round, joined with the first's."""
    share = known.counts / known.counts.sum()
    last, last_noise = known.overall(known.covariances), float(np.square(share) @ known.noise)
    total = max(float(moments.counts.sum()), 1.0)
    between = np.einsum("m,mi,mj->ij", share, known.means, known.means)
    first = moments.seconds.sum(axis=0) / total - between
    first_noise = len(moments.seconds) * (moments.second_std / total) ** 2
    return _joined(last, last_noise, first, first_noise)


def _class_data(moments: ReleasedMoments, known: _Known, basis: Array) -> tuple[Array, Array]:
    """Within-cell covariance (Y, d, d) of each class in `basis`, and its noise (Y,).

    What the last round's cells say together, joined with what the first round says of the class:
    its second moment less what lies between the cells.
    """
    classes = moments.classes
    sizes = np.maximum(known.sizes(classes), 1.0)
    last = known.by_class(known.covariances, classes)
    last_noise = np.bincount(
        known.owners, np.square(known.counts) * known.noise, minlength=classes
    ) / np.square(sizes)
    between = known.by_class(np.einsum("mi,mj->mij", known.means, known.means), classes)
    total = np.maximum(moments.counts, 1.0)
    first = moments.seconds / total[:, None, None] - between
    first_noise = np.square(moments.second_std / total)
    joined = [_joined(*values) for values in zip(last, last_noise, first, first_noise, strict=True)]
    return _turned(np.stack([j for j, _ in joined]), basis), np.array([n for _, n in joined])


def _joined(
    first: Array, first_noise: float, second: Array, second_noise: float
) -> tuple[Array, float]:
    """Two independent measurements as one, weighted by the inverse of their variances."""
    tiny = np.finfo(float).tiny
    one, two = 1 / max(first_noise, tiny), 1 / max(second_noise, tiny)
    share = one / (one + two)
    return share * first + (1 - share) * second, 1 / (one + two)


def _mixtures(
    cells: ReleasedCells, known: _Known, covariances: Array, gaussians: ClassGaussians
) -> ClassMixtures:
    """All classes' mixtures; components that are not known stand at the class's Gaussian."""
    classes, most, dim = cells.centres.shape
    shares = np.zeros((classes, most))
    means = np.repeat(gaussians.means[:, None], most, axis=1)
    every = np.repeat(gaussians.covariances[:, None], most, axis=1)
    at = known.owners, known.places
    shares[at], means[at], every[at] = known.counts, known.means, covariances.reshape(-1, dim, dim)
    shares[shares.sum(axis=1) == 0, 0] = 1.0
    return ClassMixtures(
        gaussians.weights, shares / shares.sum(axis=1, keepdims=True), means, every
    )


def _combined(shares: Array, targets: list[Array]) -> Array:
    total: Array = np.tensordot(shares, np.stack(targets), axes=1)
    return total


def _trace(matrices: list[Array]) -> float:
    return max(float(sum(np.trace(matrix) for matrix in matrices)), shrink.FLOOR)


def _scales(values: Array) -> Array:
    """l_i l_j: the proportions in which covariances with eigenvalues l differ (a Wishart's)."""
    values = np.maximum(values, shrink.FLOOR)
    return np.outer(values, values)


def _turned(matrices: Array, basis: Array) -> Array:
    """The matrices (..., d, d) in the orthonormal `basis` (d, d), its columns."""
    turned: Array = basis.T @ matrices @ basis
    return turned


def _spread_out(weights: Array, values: Array) -> Array:
    return weights.reshape(-1, *[1] * (values.ndim - 1))
