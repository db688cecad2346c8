"""The share of itself that a unit of several images contributes to a moment release.

A unit adds its images' moments, all by one factor k / 2^16, so that its whole contribution keeps
to the sensitivity of one image. A unit of one image has k = 2^16: its own moments, whole.
Derivation in docs/maths/units.md.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.queries import ClassMeans, EmbeddingSums
from dpsynth.accounting.statistics import (
    CellMoments,
    CellSums,
    ClassMoments,
    ConfusionMatrix,
    CrossMoments,
    Statistic,
)
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.cross_shares import CrossWeights
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_BITS, SHARE_BITS, SHARE_MAX, ExactSums, RunningSums
from dpsynth.private.products import Whole

NOWHERE = -1
"""Group of an image that contributes nothing."""
# Of the factor: far above the rounding of the few float operations that lead to it (U6).
_MARGIN = 2.0**-40
# Numbers in one block of Gram matrices or codes: bounds memory, changes no bit of any result.
_BLOCK = 2**20
_HALF = CODE_BITS

Codes = NDArray[np.int64]
# Rows (n, d) of norm at most 2^16, and their groups (n,).
Placed = tuple[Whole, Codes]


@dataclass(frozen=True)
class Weights:
    """Whitened weights a, b, c of a release's blocks; c is 0 without second moments.

    `shared`: one second moment for all groups, so that pairs across groups add up in it too.
    """

    count: float
    sum: float
    second: float
    shared: bool = False

    @property
    def limit(self) -> float:
        """Squared L2 norm that one image may reach: a^2 + b^2 + c^2."""
        return self.count**2 + self.sum**2 + self.second**2


def weights_of(statistic: Statistic) -> Weights | CrossWeights:
    """The weights of a release of joint sensitivity.

    Raises:
        PlanError: another statistic: units of several images cannot be released by it.
    """
    match statistic:
        case ClassMoments(count=a, sum=b, second=c, covariance=covariance):
            return Weights(a, b, c, covariance == "shared")
        case CellMoments(count=a, sum=b, second=c):
            return Weights(a, b, c)
        case ClassMeans(count=a, sum=b) | CellSums(count=a, sum=b) | EmbeddingSums(count=a, sum=b):
            return Weights(a, b, 0.0)
        case CrossMoments(caption=a, cross=b, second=c, dim=dim):
            return CrossWeights(a, b, c, dim)
        case ConfusionMatrix(cell=a, total=b):
            return Weights(a, 0.0, b, shared=True)  # answers as codes of length one (V3)
    raise PlanError(
        f"{statistic.kind} bounds one record alone, and the plan's unit has several",
        hint="declare sensitivity: tight, or budget.unit: record",
    )


def unit_sums(
    chunks: Iterable[UnitCodes],
    groups: int,
    place: Callable[[UnitCodes], Placed],
    statistic: Statistic,
    *,
    second: bool = True,
    pooled: bool = False,
) -> ExactSums:
    """Exact sums of a round by group, in one pass over one chunk of whole units or more.

    Records count whole, the images of a unit of several by its share. Never released.

    Args:
        chunks: the units' codes.
        groups: how many there are (classes, or class-cells).
        place: a chunk's rows and their groups; a group that is none contributes nothing.
        statistic: what the round releases; its weights decide on shares.
        second: whether there are second moments.
        pooled: one second moment for all groups, (1, d, d).

    Raises:
        PlanError: units of several images, which `statistic` does not bound.
        UsageError: no chunk.
    """
    running: RunningSums | None = None
    for chunk in chunks:
        rows, owners = place(chunk)
        shares = None
        if chunk.sizes is not None:
            shares = unit_shares(rows, owners, chunk.sizes, weights_of(statistic))
        if running is None:
            bits, dim = 0 if shares is None else SHARE_BITS, rows.shape[1]
            running = RunningSums(groups, dim, second=second, pooled=pooled, bits=bits)
        running.add(rows, owners, shares)
    if running is None:
        raise UsageError("a pass over the codes has one chunk or more, got none")
    return running.total()


def unit_shares(
    codes: Whole, groups: Codes, sizes: Codes, weights: Weights | CrossWeights
) -> Codes:
    """Numerator k of k / 2^16 of each image's unit (n,): whole numbers from 0 to 2^16.

    Args:
        codes: quantised codes or residuals (n, d), each of norm at most 2^16; of a caption
            release rows (z; f) of two such parts.
        groups: class or class-cell of each (n,); one below 0 contributes nothing.
        sizes: images of each unit (u,), at most 1024, which lie side by side in `codes`.
        weights: of the release.

    A unit's k is a function of its own codes and groups, whatever order they are in: every sum
    that leads to it is exact in whole numbers.
    """
    shares = np.full(len(codes), SHARE_MAX, np.int64)
    starts = np.cumsum(sizes) - sizes
    for size in np.unique(sizes[sizes > 1]).tolist():
        mine = starts[sizes == size]
        step = max(1, _BLOCK // (size * max(size, codes.shape[1])))
        for at in range(0, len(mine), step):
            rows = mine[at : at + step, None] + np.arange(size)
            shares[rows] = _shares(codes[rows], groups[rows], weights)[:, None]
    return shares


def _shares(codes: Whole, groups: Codes, weights: Weights | CrossWeights) -> Codes:
    """K (u,) of units of one size: codes (u, m, d), groups (u, m)."""
    square = norm_squares(codes, groups, weights)
    ratio = weights.limit / np.maximum(square, weights.limit)
    cut = np.floor(SHARE_MAX * (1 - _MARGIN) * np.sqrt(ratio)).astype(np.int64)
    whole = square <= weights.limit * (1 - _MARGIN)
    found: Codes = np.where(whole, SHARE_MAX, cut)
    return found


def norm_squares(
    codes: Whole, groups: Codes, weights: Weights | CrossWeights
) -> NDArray[np.float64]:
    """Squared whitened norms (u,) of whole units, by their Gram matrices (U4).

    Sums over pairs are exact in whole numbers; the few float operations on them are elementwise.
    """
    known = groups >= 0
    flat = np.where(known[..., None], codes, 0).astype(np.float64)
    if isinstance(weights, CrossWeights):
        return weights.norm_squares(flat)
    # Whole numbers of size at most 2^32 by Cauchy and Schwarz, as every partial sum is.
    gram = (flat @ flat.transpose(0, 2, 1)).astype(np.int64)
    same = (groups[:, :, None] == groups[:, None, :]) & known[:, :, None]
    pairs = same.sum(axis=(1, 2))
    inner = np.where(same, gram, 0)
    linear = inner.sum(axis=(1, 2))
    squares = _sum_of_squares(gram if weights.shared else inner)
    found: NDArray[np.float64] = weights.count**2 * pairs
    found += weights.sum**2 * (linear * 2.0 ** (-2 * CODE_BITS))
    found += weights.second**2 * squares
    return found


def _sum_of_squares(values: Codes) -> NDArray[np.float64]:
    """Sum of (value / 2^32)^2 over the last two axes, for |value| <= 2^32 and 2^20 values.

    In two halves of 16 bits, so that each of the three sums is exact.
    """
    high, low = np.divmod(np.abs(values), 1 << _HALF)
    exact = [(x * y).sum(axis=(1, 2)) for x, y in ((high, high), (high, low), (low, low))]
    found: NDArray[np.float64] = exact[0] * 2.0 ** (-2 * _HALF)
    found += exact[1] * 2.0 ** (1 - 3 * _HALF)
    found += exact[2] * 2.0 ** (-4 * _HALF)
    return found
