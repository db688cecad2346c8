"""Released statistics on an integer grid: exact sums, discrete Gaussian noise.

Every code is cut to a vector of whole numbers of norm at most 2^16 (`quantise`), so that sums
of codes and of their outer products are exact integers: the same under any order, batching or
sharding. Derivation in docs/maths/moments.md.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import PlanError
from dpsynth.private.noise import MAX_SCALE, NoiseSource

CODE_BITS = 16
CODE_MAX = 2**CODE_BITS
# The noise scale in grid steps: so fine that the grid's own error in delta is negligible.
SCALE_BITS = 30
# Rows summed at once in float64: 2^20 products below 2^32 stay far below 2^53, hence exact.
_ROWS = 2**20
_HUGE = 2.0**500


def quantise(code: NDArray[np.float64], radius: float) -> NDArray[np.int64] | None:
    """Clip one code (d,) to the ball of `radius`, in steps of radius / 2^16, towards zero.

    Returns int64 (d,) of norm surely at most 2^16, checked in integers; None for a code that is
    not finite, which then contributes nothing. Looks at this one code alone.
    """
    values = np.asarray(code, dtype=np.float64)
    if not np.isfinite(values).all():
        return None
    if np.abs(values).max(initial=0.0) > _HUGE:
        values, radius = values / _HUGE, radius / _HUGE
    norm = math.hypot(*values.tolist())
    scale = CODE_MAX / max(norm, radius)
    whole: NDArray[np.int64] = np.trunc(values * scale).astype(np.int64)
    while int(whole @ whole) > CODE_MAX**2:
        # Rounding in the scale let a component reach one step too far: take one step back.
        whole = whole - np.sign(whole)
    return whole


@dataclass(frozen=True)
class Block:
    """One group of released coordinates that share a scale.

    `unit`: real value of one whole number. `std`: noise in whole numbers, before rounding up.
    """

    unit: float
    std: float

    @property
    def refine(self) -> int:
        """Binary places added below the whole numbers, so that `scale` reaches 2^30."""
        return max(0, SCALE_BITS - math.floor(math.log2(self.std)))

    @property
    def scale(self) -> int:
        """Scale of the discrete Gaussian in grid steps, rounded up: towards privacy."""
        return math.ceil(Fraction(self.std) * (1 << self.refine))

    @property
    def real_std(self) -> float:
        """The noise as released, in real units."""
        return self.scale * 2.0**-self.refine * self.unit

    def check(self) -> None:
        """Raise PlanError unless the noise fits the sampler's range."""
        if not (math.isfinite(self.std) and self.std > 0 and self.unit > 0):
            raise PlanError(f"the noise of a released block must be positive, got {self.std}")
        if self.scale > MAX_SCALE:
            raise PlanError(
                "the noise of a released block exceeds the sampler's range",
                hint="raise this block's share in stages.moments.blocks, or the budget",
            )

    def release(self, exact: NDArray[np.object_], noise: NoiseSource) -> NDArray[np.float64]:
        """Add noise to exact whole numbers (any shape, Python ints); real values, float64."""
        drawn = noise.discrete_gaussian(self.scale, exact.size)
        flat = exact.reshape(-1).tolist()
        noisy = [(int(v) << self.refine) + n for v, n in zip(flat, drawn, strict=True)]
        step = Fraction(self.unit) / 2**self.refine
        return np.array([float(step * x) for x in noisy]).reshape(exact.shape)


@dataclass(frozen=True)
class ExactSums:
    """Sums over the records, as Python ints: never released, dies in the mechanism.

    counts (Y,), sums (Y, d) of codes, seconds (Y, d, d) of outer products, by class (or by
    class-cell); seconds is (Y, 0, 0) where it was not asked for.
    """

    counts: NDArray[np.object_]
    sums: NDArray[np.object_]
    seconds: NDArray[np.object_]


def exact_sums(
    codes: NDArray[np.int64],
    labels: NDArray[np.int64],
    classes: int,
    rows: int = _ROWS,
    *,
    second: bool = True,
) -> ExactSums:
    """Per-class count, sum and second moment of quantised codes (n, d), labels (n,).

    Exact for any n: float64 products within `rows` records, Python ints across. A label outside
    0..classes - 1 contributes nothing. `second=False` leaves the second moments out.
    """
    dim = codes.shape[1]
    size = dim if second else 0
    counts = np.zeros(classes, dtype=object)
    sums = np.zeros((classes, dim), dtype=object)
    seconds = np.zeros((classes, size, size), dtype=object)
    for y in range(classes):
        mine = codes[labels == y]
        for start in range(0, len(mine), rows):
            part = mine[start : start + rows].astype(np.float64)
            counts[y] += len(part)
            sums[y] += _whole(part.sum(axis=0))
            if second:
                seconds[y] += _whole(part.T @ part)
    return ExactSums(counts, sums, seconds)


def _whole(values: NDArray[np.float64]) -> NDArray[np.object_]:
    return values.astype(np.int64).astype(object)
