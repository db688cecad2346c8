"""How well scores tell members from others: AUC, points of the ROC curve, and their intervals.

Scores are higher for what is held to be a member. Nothing here knows what the scores come from.
Derivations: docs/maths/audit.md (R13 to R16).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from dpsynth.accounting.intervals import clopper_pearson
from dpsynth.errors import UsageError

Array = NDArray[np.float64]
_BLOCK = 64


@dataclass(frozen=True)
class OperatingPoint:
    """One threshold: everything scored strictly above it is called a member.

    Attributes:
        asked: the FPR that was asked for.
        fpr: share of the others above the threshold, at most `asked`.
        tpr: share of members above it.
        threshold: the highest score that is still called an other.
        tpr_interval: Clopper-Pearson, exact given the threshold, which others alone decide.
        fpr_interval: Clopper-Pearson of the FPR that the threshold really has.
        resolved: whether there are others enough for one of them to lie above: n fpr >= 1.
    """

    asked: float
    fpr: float
    tpr: float
    threshold: float
    tpr_interval: tuple[float, float]
    fpr_interval: tuple[float, float]
    resolved: bool


def auc(scores: ArrayLike, member: ArrayLike) -> float:
    """Chance that a member scores above an other, ties counted half (Mann and Whitney 1947).

    Args:
        scores: float (n,), infinite ones too, no NaN.
        member: bool (n,), both kinds present.

    Raises:
        UsageError: shapes that differ, a NaN, or one kind alone.

    >>> auc([3, 2, 2, 1], [True, True, False, False])
    0.875
    """
    own, _ = _placements(*_split(scores, member))
    return float(own.mean())


def auc_interval(
    scores: ArrayLike, member: ArrayLike, confidence: float = 0.95
) -> tuple[float, float]:
    """DeLong interval of the AUC on the logit scale: the default (R14).

    DeLong, DeLong and Clarke-Pearson 1988. Its variance is of placement values, so that ties count
    half as in `auc`. No random numbers, so that a report is the same twice; near 0.5, where an
    audit decides, it covers as well as the bootstrap (measured in the tests). Where all pairs
    agree, the variance is 0 and says nothing: there the bound is of min(n, m) disjoint pairs (R15).

    Args:
        scores: float (n,).
        member: bool (n,), at least two of each kind.
        confidence: above 0, below 1.

    Raises:
        UsageError: as for `auc`, or fewer than two of a kind.

    >>> low, high = auc_interval([1, 2, 3, 4, 5, 6], [False, True, False, False, True, True])
    >>> round(low, 2), round(high, 2)
    (0.17, 0.98)
    """
    own, others = _placements(*_split(scores, member))
    error = _error(confidence)
    if min(len(own), len(others)) < 2:
        raise UsageError("an interval of an AUC needs two members and two others, or more")
    area = float(own.mean())
    variance = float(own.var(ddof=1) / len(own) + others.var(ddof=1) / len(others))
    if variance <= 0 or area in (0.0, 1.0):
        sure = error ** (1 / min(len(own), len(others)))
        return area * sure, area * sure + (1 - sure)
    half = float(special.ndtri(1 - error / 2)) * math.sqrt(variance) / (area * (1 - area))
    centre = float(special.logit(area))
    return float(special.expit(centre - half)), float(special.expit(centre + half))


def auc_bootstrap(
    scores: ArrayLike,
    member: ArrayLike,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the AUC, members and others drawn apart.

    A second opinion that assumes no normal limit. Where all pairs agree it has no width.

    Args:
        scores: float (n,).
        member: bool (n,).
        confidence: above 0, below 1.
        resamples: at least 100.
        seed: of the resampling, which is no privacy noise.

    Raises:
        UsageError: as for `auc`, or a number out of range.
    """
    own, others = _split(scores, member)
    error = _error(confidence)
    if resamples < 100:
        raise UsageError(f"{resamples} resamples; expected at least 100")
    _, place = np.unique(np.concatenate([own, others]), return_inverse=True)
    levels = int(place.max()) + 1
    shares = [
        np.bincount(part, minlength=levels) / len(part)
        for part in (place[: len(own)], place[len(own) :])
    ]
    rng = np.random.default_rng(seed)
    found = []
    for start in range(0, resamples, _BLOCK):
        count = min(_BLOCK, resamples - start)
        above = rng.multinomial(len(own), shares[0], size=count) / len(own)
        below = rng.multinomial(len(others), shares[1], size=count) / len(others)
        under = np.cumsum(below, axis=1) - below / 2  # others below each level, ties half
        found.append(np.einsum("bl,bl->b", above, under))
    low, high = np.quantile(np.concatenate(found), [error / 2, 1 - error / 2])
    return float(low), float(high)


def curve(scores: ArrayLike, member: ArrayLike) -> tuple[Array, Array]:
    """Points (fpr, tpr) of the ROC curve from (0, 0) to (1, 1), one for each distinct score.

    A tied group is one step: the straight line between its ends is what flipping coins gives.

    Raises:
        UsageError: as for `auc`.
    """
    own, others = _split(scores, member)
    levels = np.unique(np.concatenate([own, others]))
    tpr = 1 - np.searchsorted(np.sort(own), levels, side="left") / len(own)
    fpr = 1 - np.searchsorted(np.sort(others), levels, side="left") / len(others)
    return np.append(0.0, fpr[::-1]), np.append(0.0, tpr[::-1])


def tpr_at_fpr(
    scores: ArrayLike, member: ArrayLike, fpr: float, confidence: float = 0.95
) -> OperatingPoint:
    """The attack's TPR where at most a share `fpr` of the others is called a member (R16).

    Conservative with ties: with k = floor(n fpr) allowed false alarms the threshold is the
    (k + 1)-th highest score of an other, and only what lies strictly above it is called. A tied
    group that would pass `fpr` is left out whole, so that no luck of the order enters.

    Args:
        scores: float (n,).
        member: bool (n,).
        fpr: at least 0, below 1.
        confidence: of each of the two intervals.

    Raises:
        UsageError: as for `auc`, or an fpr out of range.

    >>> point = tpr_at_fpr([5, 4, 3, 3, 2, 1], [True, True, False, True, False, False], 0.4)
    >>> point.tpr, round(point.fpr, 3), point.threshold
    (1.0, 0.333, 2.0)
    >>> tpr_at_fpr([5, 4, 3, 3, 2, 1], [True, True, False, True, False, False], 0.1).resolved
    False
    """
    own, others = _split(scores, member)
    if not 0 <= fpr < 1:
        raise UsageError(f"fpr is {fpr!r}; expected a number from 0 to below 1")
    error = _error(confidence)
    allowed = min(math.floor(fpr * len(others) + 1e-9), len(others) - 1)
    threshold = float(np.sort(others)[len(others) - 1 - allowed])
    hits, alarms = int((own > threshold).sum()), int((others > threshold).sum())
    return OperatingPoint(
        asked=float(fpr),
        fpr=alarms / len(others),
        tpr=hits / len(own),
        threshold=threshold,
        tpr_interval=clopper_pearson(hits, len(own), 1 - error),
        fpr_interval=clopper_pearson(alarms, len(others), 1 - error),
        resolved=fpr * len(others) + 1e-9 >= 1,
    )


def _placements(own: Array, others: Array) -> tuple[Array, Array]:
    """Share of others below each member (n,), and of members above each other (m,), ties half."""
    return _below(own, others), 1 - _below(others, own)


def _below(points: Array, among: Array) -> Array:
    ordered = np.sort(among)
    left = np.searchsorted(ordered, points, side="left")
    right = np.searchsorted(ordered, points, side="right")
    return np.asarray((left + right) / (2 * len(among)))


def _split(scores: ArrayLike, member: ArrayLike) -> tuple[Array, Array]:
    """Scores of members and of others, checked."""
    values, kinds = np.asarray(scores, dtype=np.float64), np.asarray(member)
    if values.ndim != 1 or values.shape != kinds.shape or kinds.dtype != np.bool_:
        raise UsageError(
            f"scores are {values.shape} and members {kinds.dtype} {kinds.shape}; expected numbers "
            "and booleans, (n,) each"
        )
    if np.isnan(values).any():
        raise UsageError("a score is not a number (NaN); expected one for each record")
    if kinds.all() or not kinds.any():
        raise UsageError("scores are of members alone or of others alone; expected both")
    return values[kinds], values[~kinds]


def _error(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise UsageError(f"confidence is {confidence!r}; expected a number above 0 and below 1")
    return 1 - confidence
