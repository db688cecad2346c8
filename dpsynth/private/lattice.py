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

from dpsynth.errors import PlanError, UsageError
from dpsynth.private.noise import MAX_SCALE, NoiseSource
from dpsynth.private.products import Products, Sums, Whole

CODE_BITS = 16
CODE_MAX = 2**CODE_BITS
# The noise scale in grid steps: so fine that the grid's own error in delta is negligible.
SCALE_BITS = 30
# Numbers quantised at once: they stay in the processor's cache. Changes no bit of any result.
_NEAR = 2**17
# Codes whose sum int32 holds.
_INT_ROWS = 2 ** (30 - CODE_BITS)
# A unit of several images counts by a share k / 2^16 of itself (`private.shares`).
SHARE_BITS = 16
SHARE_MAX = 2**SHARE_BITS
_HALF = SHARE_BITS // 2


def quantise(code: NDArray[np.float64], radius: float) -> NDArray[np.int64] | None:
    """Clip one code (d,) to the ball of `radius`, in steps of radius / 2^16, towards zero.

    Returns int64 (d,) of norm surely at most 2^16, checked in integers; None for a code that is
    not finite, which then contributes nothing. Looks at this one code alone.
    """
    rows, finite = quantise_rows(np.asarray(code, dtype=np.float64)[None], radius)
    return rows[0].astype(np.int64) if finite[0] else None


def quantise_rows(
    codes: NDArray[np.float64], radius: float, out: NDArray[np.int32] | None = None
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """`quantise` of many codes (n, d): int32 (n, d), and which rows (n,) are finite.

    A row that is not finite is zero. Each row's bits are a function of that row alone, on any
    machine: elementwise operations, and sums that are exact in whole numbers. (Their squares do
    not fit int32: widen before a product.) `out` (n, d) is overwritten, and then what is returned.
    """
    whole = np.empty(codes.shape, np.int32) if out is None else out
    finite = np.ones(len(codes), np.bool_)
    scale = CODE_MAX / radius
    step = max(1, _NEAR // max(1, codes.shape[1]))
    for start in range(0, len(codes), step):
        part = codes[start : start + step]
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.multiply(part, scale, order="C")
            np.trunc(steps, out=steps)
            # Exact where it is at most 2^32; above, or not a number, the code is cut below.
            fits = _inside(steps)
        if not fits.all():
            steps[~fits], finite[start : start + step][~fits] = _cut(part[~fits], radius)
        whole[start : start + step] = steps
    return whole, finite


def _cut(
    codes: NDArray[np.float64], radius: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Codes (m, d) that lie outside the ball, scaled to its surface; which of them are finite."""
    finite = np.logical_and.reduce(np.isfinite(codes), axis=1)
    values = np.where(finite[:, None], codes, 0.0)
    # By a power of two, which is exact, to a norm below 2^26: then whole parts have a norm whose
    # square is exact in any order, and which is not above the code's own.
    _, exponent = np.frexp(np.abs(values).max(axis=1, initial=0.0))
    places = 26 - exponent - math.ceil(math.log2(max(1, codes.shape[1])) / 2)
    values = np.ldexp(values, places[:, None])
    below = np.trunc(values)
    norms = np.sqrt(np.einsum("ij,ij->i", below, below))
    lengths = np.maximum(np.maximum(norms, np.ldexp(radius, places)), 1.0)
    whole = np.trunc(values * (CODE_MAX / lengths)[:, None])
    while not (fits := _inside(whole)).all():
        # Rounding let a component reach a step too far: take one step back.
        whole[~fits] -= np.sign(whole[~fits])
    return whole, finite


def _inside(whole: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows (n,) of whole numbers have a norm of at most 2^16; not a number has none."""
    # A BLAS product for each row: a third of the time of einsum's loop.
    squares = whole[:, None, :] @ whole[:, :, None]
    found: NDArray[np.bool_] = squares[:, 0, 0] <= CODE_MAX**2
    return found


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

    def finer(self, bits: int) -> "Block":
        """The same block and noise in whole numbers of 2^-bits: exact."""
        return Block(self.unit * 2.0**-bits, self.std * 2.0**bits)

    def check(self) -> None:
        """Raise PlanError unless the noise fits the sampler's range."""
        if not (math.isfinite(self.std) and self.std > 0 and self.unit > 0):
            raise PlanError(f"the noise of a released block must be positive, got {self.std}")
        if self.scale > MAX_SCALE:
            raise PlanError(
                "the noise of a released block exceeds the sampler's range",
                hint="raise this block's share under `blocks` of its stage, or the budget",
            )

    def release(self, exact: NDArray[np.object_], noise: NoiseSource) -> NDArray[np.float64]:
        """Add noise to exact whole numbers (any shape, Python ints); real values, float64."""
        drawn = noise.discrete_gaussian(self.scale, exact.size).tolist()
        refine, flat = self.refine, exact.reshape(-1).tolist()
        # unit / 2^refine is a whole number of a power of two: one rounding, that of the product.
        mantissa, exponent = math.frexp(self.unit)
        step, places = int(math.ldexp(mantissa, 53)), exponent - 53 - refine
        noisy = ((int(v) << refine) + n for v, n in zip(flat, drawn, strict=True))
        released = (math.ldexp(step * x, places) for x in noisy)
        return np.fromiter(released, np.float64, exact.size).reshape(exact.shape)


@dataclass(frozen=True)
class ExactSums:
    """Sums over the records, as Python ints: never released, dies in the mechanism.

    counts (Y,), sums (Y, d) of codes, seconds (Y, d, d) of outer products, by class (or by
    class-cell); seconds is (Y, 0, 0) where it was not asked for. All are in steps of 2^-bits:
    0 for records, SHARE_BITS for units that count by shares.
    """

    counts: NDArray[np.object_]
    sums: NDArray[np.object_]
    seconds: NDArray[np.object_]
    bits: int = 0

    def __add__(self, other: "ExactSums") -> "ExactSums":
        """Sums over both: of shards or batches of whole units, in any order.

        Raises UsageError for sums in other steps.
        """
        if self.bits != other.bits:
            raise UsageError(f"sums in steps of 2^-{self.bits} and 2^-{other.bits} do not add up")
        return ExactSums(
            self.counts + other.counts,
            self.sums + other.sums,
            self.seconds + other.seconds,
            self.bits,
        )


class RunningSums:
    """`ExactSums` of chunk after chunk of records, or of whole units by their shares.

    Holds the sums and a few thousand rows: memory does not grow with the records. `pooled`: one
    second moment for all classes together, (1, d, d). `bits`: 0, or SHARE_BITS where records
    count by shares.
    """

    def __init__(
        self, classes: int, dim: int, *, second: bool = True, pooled: bool = False, bits: int = 0
    ) -> None:
        self._bits, self._pooled = bits, pooled
        self._counts = np.zeros(classes, object)
        self._sums = Sums(classes, dim, CODE_BITS + bits)
        groups, size = 1 if pooled else classes, dim if second else 0
        self._whole = Products(groups, size, 2 * CODE_BITS)
        # Shares in two halves of 8 bits, so that products stay below 2^40 and float64 holds them.
        halves = (groups, size, 2 * CODE_BITS + _HALF)
        self._high = Products(*halves) if bits else None
        self._low = Products(*halves) if bits else None
        self._second = second

    def add(
        self, codes: Whole, labels: NDArray[np.int64], shares: NDArray[np.int64] | None = None
    ) -> None:
        """Add quantised codes (n, d); a label (n,) that is no class contributes nothing.

        `shares` (n,) from 0 to 2^16 where the sums are in steps of 2^-16, else none.

        Raises:
            UsageError: shares where none are counted, or none where they are.
        """
        if (shares is None) is not (self._bits == 0):
            raise UsageError("shares and sums in steps of 2^-16 go together")
        order = np.argsort(labels, kind="stable")
        ends = np.searchsorted(labels[order], np.arange(len(self._counts) + 1))
        together = shares is None and self._pooled and self._second
        if together:  # one product for all classes: no class's rows wait to be picked out
            known = order[ends[0] : ends[-1]]
            self._whole.add(0, codes if len(known) == len(codes) else codes[np.sort(known)])
        for y in np.flatnonzero(np.diff(ends)).tolist():
            mine = order[ends[y] : ends[y + 1]]
            rows = codes.take(mine, axis=0)
            if shares is None:
                self._add_whole(y, rows, second=self._second and not together)
            else:
                self._add_shared(y, rows, shares[mine])

    def total(self) -> ExactSums:
        """The sums of all that was added."""
        seconds = self._whole.total()
        if self._high is not None and self._low is not None:
            high, low = self._high.total(), self._low.total()
            seconds = seconds * SHARE_MAX + high * (1 << _HALF) + low
        return ExactSums(self._counts.copy(), self._sums.total(), seconds, self._bits)

    def _add_whole(self, y: int, codes: Whole, *, second: bool) -> None:
        """Records that count once each: a share of 2^16 where there are shares."""
        self._counts[y] += len(codes) << self._bits
        for start in range(0, len(codes), _INT_ROWS):
            part = codes[start : start + _INT_ROWS]
            # Sums of int32 in int32 are far faster than in int64, and fit: 2^14 rows of 2^16.
            total = np.add.reduce(part, axis=0, dtype=np.int32).astype(np.int64)
            self._sums.add(y, total << self._bits, len(part))
        if second:
            self._whole.add(0 if self._pooled else y, codes)

    def _add_shared(self, y: int, codes: Whole, shares: NDArray[np.int64]) -> None:
        full = shares == SHARE_MAX
        if full.any():
            self._add_whole(y, codes[full], second=self._second)
        codes, shares = codes[~full], shares[~full]
        self._counts[y] += int(shares.sum())
        self._sums.add(y, (shares[:, None] * codes).sum(axis=0), len(codes))
        if self._second and self._high is not None and self._low is not None:
            high, low = np.divmod(shares, 1 << _HALF)
            group = 0 if self._pooled else y
            self._high.add_weighted(group, codes, high)
            self._low.add_weighted(group, codes, low)
