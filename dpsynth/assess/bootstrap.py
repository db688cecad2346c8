"""Intervals for the measures of `evaluate`, each with what it treats as random, in words.

Three kinds. A share of independent records has the exact binomial interval (Clopper and Pearson
1934). A mean of other values a record, or a group of records, has a percentile bootstrap (Efron
1979). A distance between two feature sets has a jackknife: resampling with replacement would
repeat records, which lifts a Frechet distance, gives nearest neighbours at distance zero, and so
moves what it should measure the spread of.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpsynth.accounting.intervals import clopper_pearson
from dpsynth.assess.metrics import Features, frechet_distance, gaussian_maps, per_class
from dpsynth.errors import UsageError

LEVEL = 0.95
RESAMPLES = 1000
GROUPS = 10
"""Groups left out in turn to find the bias of a Frechet distance."""
WIDE, WIDE_GROUPS = 512, 3
"""Fewer groups in wider features, where each distance takes seconds."""
ROWS = 200
EXACT = "exact binomial (Clopper-Pearson); records are resampled, networks are not"
RECORDS = "percentile bootstrap of records; networks are fixed"
CLUSTERS = "percentile bootstrap of whole groups of records; networks are fixed"
FRECHET = (
    "infinitesimal jackknife over the images of both sides, about the expected value at these "
    "counts; networks are fixed"
)
UNBIASED = (
    "infinitesimal jackknife over the images of both sides, about the value without the bias of "
    "small counts (jackknife over groups); networks are fixed"
)

UNKNOWN_BIAS = (
    "from 0 to the upper end about the biased value: too few images a feature to estimate the "
    "bias; networks are fixed"
)


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval and how it came about.

    Attributes:
        low: lower end.
        high: upper end.
        level: the stated confidence, such as 0.95.
        resamples: bootstrap resamples; 0 where the interval has a closed form.
        method: in words, what is taken as random and what as fixed.
        estimate: the value that the interval stands about, where that is not the reported one.
    """

    low: float
    high: float
    level: float = LEVEL
    resamples: int = 0
    method: str = ""
    estimate: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; `estimate` only where there is one."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class FrechetSpread:
    """What chance does to a Frechet distance.

    Attributes:
        here: interval of the expected distance at these counts, about the reported value. Two
            values at equal counts are compared by this one.
        unbiased: the distance less its estimated bias, not below 0. None where a tenth of the
            images less would leave no more images than features: the bias is then unknown.
        beyond: interval of the distance between the two distributions themselves, about
            `unbiased`; the reported value, which is biased upwards, may lie above it.
    """

    here: Interval
    unbiased: float | None
    beyond: Interval


def share_interval(hits: int, count: int, *, level: float = LEVEL) -> Interval:
    """Exact interval of a share of independent records: accuracy of one net, consistency, rates.

    Raises:
        UsageError: `count` is 0, or `hits` is not between 0 and `count`.

    >>> found = share_interval(0, 100)
    >>> (found.low, round(found.high, 4))
    (0.0, 0.0362)
    """
    if not 0 <= hits <= count or count < 1:
        raise UsageError(f"a share of {hits} in {count} records has no interval")
    low, high = clopper_pearson(hits, count, level)
    return Interval(low, high, level, 0, EXACT)


def mean_interval(
    values: NDArray[Any],
    groups: NDArray[Any] | None = None,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a mean over records, or over groups of records.

    For values that are not plain indicators: right answers averaged over the seeds of a probe,
    LPIPS of a pair. Indicators that are all 0 or all 1 would give an interval of width zero, so
    `share_interval` answers for them, over the number of groups where there are groups.

    Args:
        values: (n,) finite.
        groups: (n,) which records belong together, such as the captions of pairs: groups are
            then resampled whole and weigh by their size. None: each record is its own group.
        level: two-sided confidence.
        resamples: how many.
        seed: of the resampling.

    Raises:
        UsageError: no value, one that is not finite, or `groups` of another length.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise UsageError(f"an interval of a mean needs finite values (n,), got {values.shape}")
    sums, counts = _grouped(values, groups)
    first = values[0]
    if first in (0.0, 1.0) and (values == first).all():
        return share_interval(int(first) * len(sums), len(sums), level=level)
    drawn = np.concatenate(list(_means(sums, counts, resamples, np.random.default_rng(seed))))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    method = RECORDS if groups is None else CLUSTERS
    return Interval(float(low), float(high), level, resamples, method)


def around(
    value: float,
    variance: float,
    method: str,
    *,
    level: float = LEVEL,
    floor: float = -math.inf,
    estimate: float | None = None,
    freedom: float = math.inf,
) -> Interval:
    """Interval value -+ t sqrt(variance), not below `floor`; normal where `freedom` is infinite."""
    reach = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(max(variance, 0.0))
    low, high = max(value - reach, floor), max(value + reach, floor)
    return Interval(low, high, level, 0, method, estimate)


def frechet_interval(
    first: Features, second: Features, *, level: float = LEVEL, seed: int = 0
) -> FrechetSpread:
    """Intervals of `frechet_distance`, with and without its upward bias.

    Variance: infinitesimal jackknife (Efron 1982, ch. 6). One image x of the first set moves the
    distance by (1/n) h(x), h(x) = 2 (m1 - m2).(x - m1) + (x - m1)' (I - T) (x - m1) - mean, where
    T is the optimal map between the two Gaussians, the derivative of the trace term. Where the
    sets have one distribution that derivative vanishes, the estimate then stays above the true
    variance (by 2), and the interval is wide rather than narrow.

    Bias: delete-a-group jackknife (Quenouille 1956), (G - 1) (mean of the distances without one
    group - distance), both sides at once. It removes the terms of order 1/n and 1/m. G is 10, or 3
    above 512 features where that leaves enough images.

    Args:
        first: features (n, d).
        second: features (m, d).
        level: two-sided confidence.
        seed: of the random grouping.

    Raises:
        UsageError: as `frechet_distance`.
    """
    value = frechet_distance(first, second)
    variance = _frechet_variance(first, second)
    here = around(value, variance, FRECHET, level=level, floor=0.0)
    bias = _frechet_bias(first, second, value, seed)
    if bias is None:
        return FrechetSpread(here, None, Interval(0.0, here.high, level, 0, UNKNOWN_BIAS))
    unbiased = max(value - bias, 0.0)
    beyond = around(unbiased, variance, UNBIASED, level=level, floor=0.0, estimate=unbiased)
    return FrechetSpread(here, unbiased, beyond)


def per_class_frechet_interval(
    first: Features,
    first_labels: NDArray[np.int64],
    second: Features,
    second_labels: NDArray[np.int64],
    classes: int,
    *,
    level: float = LEVEL,
) -> Interval | None:
    """Interval of the mean of `per_class_frechet` over the classes that have a value.

    Classes are independent, so the variance of their mean is the sum of theirs over their number
    squared. None when no class has a value.
    """
    pairs = [
        pair for pair in per_class(first, first_labels, second, second_labels, classes) if pair
    ]
    if not pairs:
        return None
    value = float(np.mean([frechet_distance(*pair) for pair in pairs]))
    variance = sum(_frechet_variance(*pair) for pair in pairs) / len(pairs) ** 2
    return around(value, variance, FRECHET, level=level, floor=0.0)


def _grouped(values: Features, groups: NDArray[Any] | None) -> tuple[Features, Features]:
    """Sum of values and count of records of each group."""
    if groups is None:
        return values, np.ones(len(values))
    if len(groups) != len(values):
        raise UsageError(f"{len(groups)} groups are named for {len(values)} values")
    _, which = np.unique(groups, return_inverse=True)
    sums = np.bincount(which, weights=values).astype(np.float64)
    return sums, np.bincount(which).astype(np.float64)


def _means(
    sums: Features, counts: Features, resamples: int, rng: np.random.Generator
) -> Iterator[Features]:
    """Means over resampled groups; equal groups are drawn by one count, which changes nothing."""
    kinds, sizes = np.unique(np.stack([sums, counts], axis=1), axis=0, return_counts=True)
    for start in range(0, resamples, ROWS):
        rows = min(ROWS, resamples - start)
        times = rng.multinomial(len(sums), sizes / len(sums), size=rows)
        yield (times @ kinds[:, 0]) / (times @ kinds[:, 1])


def _frechet_variance(first: Features, second: Features) -> float:
    gap = first.mean(axis=0) - second.mean(axis=0)
    forth, back = gaussian_maps(first, second)
    return _influence(first, gap, forth) + _influence(second, -gap, back)


def _influence(points: Features, gap: Features, transport: Features) -> float:
    """Variance over one side's images of h(x), divided by their number."""
    moved = points - points.mean(axis=0)
    linear = moved @ (2 * gap)
    square = np.einsum("nd,nd->n", moved, moved - moved @ transport)
    return float(np.var(linear + square, ddof=1)) / len(points)


def _frechet_bias(first: Features, second: Features, value: float, seed: int) -> float | None:
    """None where leaving out a group leaves no more images than features."""
    groups = _groups(min(len(first), len(second)), first.shape[1])
    if groups is None:
        return None
    rng = np.random.default_rng(seed)
    marks = [rng.permutation(np.arange(len(side)) % groups) for side in (first, second)]
    without = [
        frechet_distance(first[marks[0] != group], second[marks[1] != group])
        for group in range(groups)
    ]
    return (groups - 1) * (float(np.mean(without)) - value)


def _groups(count: int, width: int) -> int | None:
    choices = (WIDE_GROUPS, GROUPS) if width > WIDE else (GROUPS,)
    return next((g for g in choices if count - math.ceil(count / g) > width), None)
