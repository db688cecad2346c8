"""Where the cells of a class lie: centres and residual radius, from released values alone.

Post-processing, free of charge: the randomness is public and seeded, and only what the cells are
good for depends on it, never privacy (docs/maths/cells.md, C6).
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.artifacts.cells import ReleasedCells
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread
from dpsynth.released.estimate import ClassGaussians, into_ball, kept_share

Array = NDArray[np.float64]

DRAWS = 4000  # public samples of each released Gaussian
QUANTILE = 0.9
# A cell should hold this share of the records that the plan's usual cell holds, or more ...
_LEAST_SHARE = 0.5
# ... and so many deviations of a count's noise, or nobody knows whether it is there.
_LEAST_STDS = 2.0
_SMALLEST_RADIUS = 2.0**-10  # of R
_LEAN = 100.0  # draws that a class's whole covariance counts for, in a cell's


def cells_by_class(
    counts: Array, count_std: float, *, most: int, capacity: int
) -> NDArray[np.int64]:
    """Number of cells (Y,) of each class, 1 to `most`, from released counts (Y,).

    A class of the usual size, capacity / Y, or of half of it has `most` cells; a smaller one so
    many that its cells stay as large. `count_std`: the counts' noise.

    >>> counts = np.array([6000.0, 3000.0, 800.0, 40.0, -9.0])
    >>> cells_by_class(counts, 12.0, most=8, capacity=30_000)
    array([8, 8, 2, 1, 1])
    """
    usual = capacity / (len(counts) * most)
    least = max(_LEAST_SHARE * usual, _LEAST_STDS * count_std)
    cells: NDArray[np.int64] = np.clip(np.floor(counts / least), 1, most).astype(np.int64)
    return cells


def first_centres(
    gaussians: ClassGaussians, cells: NDArray[np.int64], radius: float, seed: int, *, most: int
) -> tuple[Array, NDArray[np.bool_]]:
    """Centres (Y, K, d) in the ball of `radius`, and which are used (Y, K): k-means of draws.

    `cells` (Y,) is how many each class has, at most K = `most`; unused centres are zeros. The
    draws come from the class's own released Gaussian.
    """
    from sklearn.cluster import KMeans

    classes, dim = gaussians.means.shape
    centres = np.zeros((classes, most, dim))
    used: NDArray[np.bool_] = np.arange(most) < cells[:, None]
    with one_thread():
        for y, draws in enumerate(_draws(gaussians, radius, seed)):
            means = KMeans(int(cells[y]), n_init=1, random_state=seed % 2**32).fit(draws)
            centres[y, : cells[y]] = into_ball(means.cluster_centers_, radius)
    return centres, used


def moved_centres(cells: ReleasedCells, least: float) -> Array:
    """Centres (Y, K, d) after a Lloyd round: each moved to its cell's mean, as far as is known.

    The move S / n is shrunk by its known noise (James and Stein's positive part), is no longer
    than a clipped residual can be, and stays away where the noisy count is below `least`.
    """
    counts = np.maximum(cells.counts, max(least, 1.0))
    means = cells.sums / counts[..., None]
    kept = kept_share(means, cells.dim * (cells.sum_std / counts) ** 2)
    kept = np.where(cells.used & (cells.counts >= least), kept, 0.0)
    moves = kept[..., None] * into_ball(means, cells.radius)
    return into_ball(cells.centres + moves, cells.clip)


def residual_radius(
    gaussians: ClassGaussians,
    centres: Array,
    used: NDArray[np.bool_],
    radius: float,
    seed: int,
    *,
    quantile: float = QUANTILE,
) -> float:
    """Clip radius rho of residuals: this quantile of |z - nearest centre| over released draws.

    Classes count by their released weights. Above 0 and at most 2 R, which no residual exceeds.
    """
    found = []
    for y, draws in enumerate(_draws(gaussians, radius, seed)):
        own = centres[y, used[y]]
        found.append(np.sqrt(np.min([_square(draws - c) for c in own], axis=0)))
    distances = np.concatenate(found)
    order = np.argsort(distances)
    passed = np.cumsum(np.repeat(gaussians.weights, DRAWS)[order])
    place = int(np.searchsorted(passed, quantile * passed[-1]))
    chosen = float(distances[order[min(place, len(order) - 1)]])
    return min(max(chosen, _SMALLEST_RADIUS * radius), 2 * radius)


def cut_covariances(
    gaussians: ClassGaussians, centres: Array, used: NDArray[np.bool_], radius: float, seed: int
) -> Array:
    """Covariances (Y, K, d, d) of the released draws that fall into each cell.

    How cutting a class into cells shapes them, where the class is Gaussian. A cell that few draws
    reach leans towards its class's whole covariance; so does an unused one.
    """
    found = np.repeat(gaussians.covariances[:, None], centres.shape[1], axis=1)
    for y, draws in enumerate(_draws(gaussians, radius, seed)):
        places = np.flatnonzero(used[y])
        nearest = np.argmin([_square(draws - centre) for centre in centres[y, places]], axis=0)
        for number, place in enumerate(places.tolist()):
            own = draws[nearest == number]
            if len(own) > 1:
                share = len(own) / (len(own) + _LEAN)
                found[y, place] += share * (
                    np.cov(own.T).reshape(found[y, place].shape) - found[y, place]
                )
    return found


def _draws(gaussians: ClassGaussians, radius: float, seed: int) -> Iterator[Array]:
    """`DRAWS` points (n, d) of each class's Gaussian in turn, clipped as codes are."""
    source = generator(seed)
    for mean, covariance in zip(gaussians.means, gaussians.covariances, strict=True):
        values, basis = np.linalg.eigh(covariance)
        root = basis * np.sqrt(np.maximum(values, 0.0))
        normal = torch.randn(DRAWS, len(mean), generator=source, dtype=torch.float64).numpy()
        points: Array = mean + normal @ root.T
        yield into_ball(points, radius)


def _square(differences: Array) -> Array:
    square: Array = np.square(differences).sum(axis=-1)
    return square
