"""Precision, recall, density and coverage by nearest-neighbour balls, each with its interval.

Around each point of a set lies the ball that reaches to its k-th nearest other point. Precision and
recall: Kynkaanniemi et al. (2019), eqs. 1 and 2 (`metrics.precision_recall` gives the same values).
Density and coverage: Naeem et al. (2020), eqs. 3 and 4. All pairs are compared; ties are inside.

Both sets are random, and the balls with them: counting the scored points alone gives intervals up
to a third too narrow. Resampling with replacement would put copies at distance 0 and shrink the
balls, and a jackknife gives intervals up to twice too wide. So both sets are cut at random into
disjoint parts, which are independent: the spread of a measure over the parts, against what its
scored points alone would give, is its design effect (Kish 1965), and the interval is that of as
many fewer points.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn.neighbors import NearestNeighbors

from dpsynth.assess.bootstrap import LEVEL, Interval
from dpsynth.assess.metrics import NEIGHBOURS, TIE, Features, check_pair, squared_distances
from dpsynth.errors import UsageError

K_DENSITY = 5
PARTS = 10
CUTS = 5
"""How often both sets are cut anew; the variances over the parts are averaged."""
FEWEST = 200
"""Fewest images on each side for an interval: parts of 20."""
BLOCK = 100
METHOD = (
    "design effect from 10 disjoint random parts of both sides (cut 5 times): the images of both "
    "sides are random, the balls with them; about the expected value at these counts; networks "
    "are fixed"
)

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Measured:
    """A value and its interval: None unasked for, or where a side has under `FEWEST` images."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Neighbourhood:
    """The four measures of synthetic against real features.

    Attributes:
        precision: share of synthetic points in at least one ball of a real point.
        recall: share of real points in at least one ball of a synthetic point.
        density: mean over synthetic points of the number of real balls around each, over k. About 1
            for equal distributions; above 1 where samples crowd where real points are dense.
        coverage: share of real points with at least one synthetic point in their ball.
    """

    precision: Measured
    recall: Measured
    density: Measured
    coverage: Measured


def density_coverage(
    synthetic: Features, real: Features, k: int = K_DENSITY
) -> tuple[float, float]:
    """Density and coverage, Naeem et al. (2020), eqs. 3 and 4.

    Args:
        synthetic: features (n, d).
        real: features (m, d).
        k: neighbours that set the radius of a real point's ball.

    Raises:
        UsageError: m is not above k, n is 0, or the features do not fit.

    >>> points = np.random.default_rng(0).normal(size=(50, 3))
    >>> density_coverage(points + 100.0, points)
    (0.0, 0.0)
    """
    check_pair(synthetic, real)
    found = _scores(synthetic, real, 0, k)
    return float(found.density.mean()), float(found.coverage.mean())


def neighbourhood(
    synthetic: Features,
    real: Features,
    *,
    k: int = NEIGHBOURS,
    k_density: int = K_DENSITY,
    intervals: bool = True,
    level: float = LEVEL,
    seed: int = 0,
) -> Neighbourhood:
    """All four measures from one comparison of all pairs, with intervals.

    Args:
        synthetic: features (n, d).
        real: features (m, d).
        k: neighbours for precision and recall.
        k_density: neighbours for density and coverage.
        intervals: whether they are wanted; without them it takes half the time.
        level: two-sided confidence.
        seed: of the cuts behind the intervals.

    Raises:
        UsageError: n is not above `k`, m not above both, or the features do not fit.
    """
    check_pair(synthetic, real)
    found = _scores(synthetic, real, k, k_density)
    if not intervals or min(len(synthetic), len(real)) < FEWEST:
        bare = (Measured(float(scores.mean()), None) for scores in found.all)
        return Neighbourhood(*bare)
    rng = np.random.default_rng(seed)
    parts = [_parts(synthetic, real, k, k_density, rng) for _ in range(CUTS)]
    effects = [_design_effect([[part.all[i] for part in cut] for cut in parts]) for i in range(4)]
    precision, recall, density, coverage = zip(found.all, effects, strict=True)
    return Neighbourhood(
        _share(*precision, level),
        _share(*recall, level),
        _positive(*density, level),
        _share(*coverage, level),
    )


@dataclass(frozen=True)
class _Scores:
    """One number a scored point, float64: precision (n,), recall (m,), density (n,), coverage (m,).

    Each measure is the mean of its row.
    """

    precision: Features
    recall: Features
    density: Features
    coverage: Features

    @property
    def all(self) -> tuple[Features, Features, Features, Features]:
        """In the order of `Neighbourhood`."""
        return self.precision, self.recall, self.density, self.coverage


def _scores(synthetic: Features, real: Features, k: int, k_density: int) -> _Scores:
    """Compare all pairs, in blocks; k = 0 leaves precision and recall at 0."""
    centre = real.mean(axis=0)
    ours, theirs = synthetic - centre, real - centre
    own, wide = _radii(ours, [k])[0], _radii(theirs, [k, k_density])
    # Rounding grows with the points' norms, not with their distance: so does this slack for ties.
    squares = [np.einsum("nd,nd->n", x, x) * (1 - TIE * 1e-3) for x in (ours, theirs)]
    n, m = len(ours), len(theirs)
    found = _Scores(*(np.zeros(count) for count in (n, m, n, m)))
    for start in range(0, n, BLOCK):
        rows = slice(start, start + BLOCK)
        squared = squared_distances(ours[rows], squares[0][rows], theirs, squares[1])
        if k:
            found.precision[rows] = (squared <= wide[0]).any(axis=1)
            found.recall[(squared <= own[rows, None]).any(axis=0)] = 1.0
        inside = squared <= wide[1]
        found.density[rows] = inside.sum(axis=1) / k_density
        found.coverage[inside.any(axis=0)] = 1.0
    return found


def _radii(points: Features, ks: list[int]) -> list[Features]:
    """Squared distances (n,) to the k-th nearest other point, for each k; zeros for k = 0."""
    most = max(ks)
    if len(points) <= most:
        raise UsageError(f"k={most} neighbours need more than {most} images on each side")
    if most == 0:
        return [np.zeros(len(points))]
    search = NearestNeighbors(n_neighbors=most, algorithm="brute", metric="sqeuclidean")
    near, _ = search.fit(points).kneighbors()
    return [near[:, k - 1] * (1 + TIE) for k in ks]


def _parts(
    synthetic: Features, real: Features, k: int, k_density: int, rng: np.random.Generator
) -> list[_Scores]:
    """The scores of `PARTS` disjoint random parts of both sides."""
    cuts = (np.array_split(rng.permutation(len(side)), PARTS) for side in (synthetic, real))
    return [
        _scores(synthetic[ours], real[theirs], k, k_density)
        for ours, theirs in zip(*cuts, strict=True)
    ]


def _design_effect(cuts: list[list[Features]]) -> float:
    """Variance of a measure over disjoint parts, over that of a mean of independent scores.

    At least 1: given the balls, the scored points are independent.
    """
    seen = np.mean([np.var([scores.mean() for scores in cut], ddof=1) for cut in cuts])
    alone = np.mean([scores.var() / len(scores) for cut in cuts for scores in cut])
    return max(float(seen / alone), 1.0) if alone > 0 else 1.0


def _positive(scores: Features, effect: float, level: float) -> Measured:
    """Interval of a mean that is never negative: normal on its logarithm, so skewed near 0.

    Where no score is above 0 the upper end is that of the share of points inside a ball.
    """
    value = float(scores.mean())
    if value == 0:
        nothing = _share(scores, effect, level)
        return Measured(value, nothing.interval)
    error = math.sqrt(effect * float(scores.var(ddof=1)) / len(scores)) / value
    factor = math.exp(float(stats.t.ppf((1 + level) / 2, PARTS - 1)) * error)
    return Measured(value, Interval(value / factor, value * factor, level, 0, METHOD))


def _share(scores: Features, effect: float, level: float) -> Measured:
    """Wilson's interval of as many points as the design effect leaves.

    So 0 and 1 have intervals of a width above zero.
    """
    value, count = float(scores.mean()), len(scores) / effect
    z = float(stats.t.ppf((1 + level) / 2, PARTS - 1))
    scale = 1 + z * z / count
    centre = (value + z * z / (2 * count)) / scale
    reach = z / scale * math.sqrt(value * (1 - value) / count + (z / (2 * count)) ** 2)
    low, high = min(max(centre - reach, 0.0), value), max(min(centre + reach, 1.0), value)
    return Measured(value, Interval(low, high, level, 0, METHOD))
