"""From noisy cross moments to one Gaussian a condition: ridge regression of codes on captions.

StraightDP, sections 3.1 and C: mu(c) = mu0 + W e(c), and one covariance of what W leaves. All of
it is post-processing of released values and of their known noise; docs/maths/cross.md, X5 to X8.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.cross import ReleasedCross
from dpsynth.errors import UsageError
from dpsynth.planning.captions import CaptionRelease, Template
from dpsynth.planning.release import Moments
from dpsynth.planning.schema import HashHeldOut, Plan
from dpsynth.released.estimate import (
    ClassGaussians,
    into_ball,
    kept_share,
    positive,
    symmetrised,
    without_buried,
)

# Below this share of the largest, an eigenvalue of exact moments is float rounding.
_ROUNDING = 1e-12

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Conditions:
    """What is publicly known of the conditions that images are drawn for.

    features (Y, m): their captions' vectors as the release sees them, its constant included.
    fillings: each condition's place in every slot, where features are one indicator block a slot
    (one-hot is one slot); None where nothing is known, and all weigh the same.
    """

    features: Array
    fillings: Sequence[tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Centred:
    """Moments about the means, the constant regressed out exactly (X5).

    `count` n, means `code` (d,) and `feature` (m,); spread (m, m) and cross (d, m) are sums over
    the records, second (d, d) an average. Without an intercept both means are zero.
    """

    count: float
    code: Array
    feature: Array
    spread: Array
    cross: Array
    second: Array

    @classmethod
    def of(cls, moments: ReleasedCross, release: CaptionRelease, declared: float) -> Self:
        """Moments of the features but for their constant.

        `declared`: the public number of records, which stands for a count where none is released.
        """
        features, dim = moments.features, moments.dim
        count, code, feature = declared, np.zeros(dim), np.zeros(features)
        spread, cross = moments.ff, moments.zf
        if moments.constant:
            c, feature_radius = moments.constant, moments.feature_radius
            count = max(float(spread[0, 0]) / c**2, 1.0)
            code = into_ball(cross[:, 0] / c / count, moments.radius)
            feature = into_ball(spread[0, 1:] / c / count, np.sqrt(feature_radius**2 - c**2))
            spread = spread[1:, 1:] - count * np.outer(feature, feature)
            cross = cross[:, 1:] - count * np.outer(code, feature)
        elif moments.sensitivity == "paper":
            count = max(float(moments.count[0]), 1.0)
            # The paper's mu0, to which features add nothing on average: they are centred.
            if release.intercept and release.centre:
                code = into_ball(moments.total[0] / count, moments.radius)
        second = moments.zz / count - np.outer(code, code)
        return cls(count, code, feature, symmetrised(spread), cross, symmetrised(second))


def conditions_of(plan: Plan, features: Array, moments: ReleasedCross) -> Conditions:
    """Conditions of these feature vectors (Y, m), their constant as it was released."""
    if moments.constant:
        features = np.concatenate(
            [np.full((len(features), 1), moments.constant), features[:, 1:]], axis=1
        )
    stage = plan.stages.moments
    kind = stage.captions if stage else None
    if kind is None or kind.features == "sentence":
        return Conditions(features)
    if kind.features == "slots" and isinstance(plan.private.captions, Template):
        return Conditions(features, plan.private.captions.fillings(plan.private.classes))
    return Conditions(features, [(y,) for y in range(len(features))])


def declared_count(plan: Plan) -> float:
    """The public number of records on the training side: declared, never counted."""
    held_out = plan.private.held_out
    share = held_out.fraction if isinstance(held_out, HashHeldOut) else 0.0
    return plan.private.capacity * (1.0 - share)


def estimate_conditions(
    moments: ReleasedCross,
    conditions: Conditions,
    settings: Moments,
    declared: float,
    *,
    shrink: bool = True,
) -> ClassGaussians:
    """Gaussians of the conditions; finite and positive definite for any noise.

    Args:
        moments: as released.
        conditions: features of m numbers each.
        settings: of the release; `ridge`, `floor` and `rank` are used.
        declared: public number of records, used where the release holds no count.
        shrink: with the noise that is known taken into account; else the paper's plain estimate,
            to which this one comes as the noise goes to zero.

    Raises:
        UsageError: settings without captions, or features of another length than released.
    """
    moments.check()
    release = settings.captions
    if release is None:
        raise UsageError("the plan's moments are not released with captions")
    if conditions.features.ndim != 2 or conditions.features.shape[1] != moments.features:
        raise UsageError(
            f"conditions have features of shape {conditions.features.shape}, and the release "
            f"has (Y, {moments.features})"
        )
    centred = Centred.of(moments, release, declared)
    ff_std, zf_std, zz_std = (
        (moments.ff_std, moments.zf_std, moments.zz_std) if shrink else (0.0, 0.0, 0.0)
    )
    slopes, between = regression(centred, release.ridge, ff_std, zf_std)
    features = conditions.features[:, int(moments.constant > 0) :]
    means = into_ball(centred.code + (features - centred.feature) @ slopes.T, moments.radius)
    within = without_buried(centred.second - between, zz_std / centred.count)
    covariance = positive(within, settings.floor, settings.rank)
    weights = _weights(moments, centred, features, conditions.fillings)
    return ClassGaussians(weights, means, np.repeat(covariance[None], len(means), axis=0))


def regression(centred: Centred, ridge: float, ff_std: float, zf_std: float) -> tuple[Array, Array]:
    """W (d, m) of mu(c) = mu0 + W (e(c) - mean), and W's part (d, d) of the codes' covariance.

    W = Z (E + ridge n I)^-1 for cross moments Z and feature moments E, in E's eigenbasis. Noise of
    E has its spectrum inside an edge: what lies below is dropped, and what is left is larger than
    the truth by a known amount (X6). Columns of Z in that basis are shrunk by their known noise
    (X7). With both noises zero this is the ridge estimate itself, of least norm.
    """
    values, vectors = np.linalg.eigh(centred.spread)
    edge = ff_std * np.sqrt(2 * len(values))
    sizes = np.abs(values)
    kept = sizes > _ROUNDING * float(sizes.max(initial=0.0))
    if edge > 0:
        kept &= values > edge
    values, vectors = np.maximum(values[kept], 0.0), vectors[:, kept]
    values = (values + np.sqrt(np.square(values) - edge**2)) / 2 if edge > 0 else values
    along = centred.cross @ vectors
    along = along * kept_share(along.T, len(along) * zf_std**2)
    scaled = along / (values + ridge * centred.count)
    between = (scaled * values) @ scaled.T / centred.count
    return scaled @ vectors.T, between


def _weights(
    moments: ReleasedCross,
    centred: Centred,
    features: Array,
    fillings: Sequence[tuple[int, ...]] | None,
) -> Array:
    """Weights (Y,): products of the slots' released shares, or all the same without slots (X8)."""
    if fillings is None:
        return np.full(len(features), 1.0 / len(features))
    places = np.array(fillings)
    weights, start = np.ones(len(places)), 0
    for slot in places.T:
        values, rows = np.unique(slot, return_index=True)
        block = slice(start, start + len(values))
        start += len(values)
        table = features[rows, block]  # one row a value: its indicators as the release sees them
        if moments.constant:
            seen = centred.feature[block]
        else:
            table, seen = np.square(table), np.diag(centred.spread)[block] / centred.count
        weights = weights * _shares(table, seen, centred.count)[slot]
    if start != features.shape[1]:
        raise UsageError(f"slots of {start} values got features of {features.shape[1]} numbers")
    return np.asarray(weights / weights.sum())


def _shares(table: Array, seen: Array, count: float) -> Array:
    """Shares (V,) of values whose table rows (V, V) average to `seen`; a record each at least."""
    rows = np.concatenate([table.T, np.ones((1, len(table)))])
    found = np.linalg.lstsq(rows, np.append(seen, 1.0), rcond=None)[0]
    clamped = np.maximum(found, 1.0 / count)
    return np.asarray(clamped / clamped.sum())
