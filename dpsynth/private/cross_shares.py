"""Norms of what a unit of several images adds to a caption release (docs/maths/cross.md, X4)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.private.lattice import CODE_BITS

_HALF = CODE_BITS
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class CrossWeights:
    """Whitened weights a, b, c of f f^T, z f^T and z z^T; rows are (z; f), z the first `dim`."""

    caption: float
    cross: float
    second: float
    dim: int

    @property
    def limit(self) -> float:
        """Squared L2 norm that one image may reach: a^2 + b^2 + c^2."""
        return self.caption**2 + self.cross**2 + self.second**2

    def norm_squares(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Squared whitened norms (u,) of whole units, by their Gram matrices.

        Args:
            rows: whole numbers (u, k, d + m), z and f each of norm at most 2^16; zero rows for
                images that contribute nothing.
        """
        codes, features = (_gram(part) for part in np.split(rows, [self.dim], axis=2))
        found: NDArray[np.float64] = self.caption**2 * _inner(features, features)
        found += self.cross**2 * _inner(codes, features)
        found += self.second**2 * _inner(codes, codes)
        return found


def _gram(rows: NDArray[np.float64]) -> Whole:
    """Inner products (u, k, k): whole numbers of size at most 2^32, as every partial sum is."""
    found: Whole = (rows @ rows.transpose(0, 2, 1)).astype(np.int64)
    return found


def _inner(first: Whole, second: Whole) -> NDArray[np.float64]:
    """Sum over pairs of products, in units of 2^64: one rounding each, that of the whole number.

    Terms may be negative and cancel, so the sum is put together exactly: numbers are cut into
    halves of 16 bits, each of the four sums is at most 2^20 * 2^32 in size, and joined as
    Python integers.
    """
    (high, low), (top, bottom) = (np.divmod(x, 1 << _HALF) for x in (first, second))
    exact = [
        (x * y).sum(axis=(1, 2)).astype(object)
        for x, y in ((high, top), (high, bottom), (low, top), (low, bottom))
    ]
    whole = (exact[0] << (2 * _HALF)) + ((exact[1] + exact[2]) << _HALF) + exact[3]
    return np.array([int(n) / 2 ** (4 * CODE_BITS) for n in whole.tolist()], np.float64)
