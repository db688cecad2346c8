"""Sums of whole numbers and of their outer products: exact, in bounded memory, by the BLAS.

Products are added up in float64 while no sum can reach 2^53, then in int64, then as Python ints.
"""

import numpy as np
from numpy.typing import NDArray

# Rows that a group waits for before they are multiplied, and numbers that all may hold meanwhile:
# BLAS wants many rows at once. Both bound memory, and change no bit of any result.
_ROWS, _NUMBERS = 2**13, 2**24
_FLOAT_BITS, _INT_BITS = 52, 62

Whole = NDArray[np.int32] | NDArray[np.int64]


class Sums:
    """Sums of whole vectors, by group: in int64 while none can reach 2^62, then as Python ints.

    `bits`: one row adds at most 2^bits to the size of an entry.
    """

    def __init__(self, groups: int, dim: int, bits: int) -> None:
        self._ints, self._huge = np.zeros((groups, dim), np.int64), np.zeros((groups, dim), object)
        self._rows, self._most = 0, 2 ** (_INT_BITS - bits)

    def add(self, group: int, total: NDArray[np.int64], rows: int) -> None:
        """Add the sum (d,) of so many rows."""
        if self._rows + rows > self._most:
            self._huge = self.total()
            self._ints[...] = 0
            self._rows = 0
        self._ints[group] += total
        self._rows += rows

    def total(self) -> NDArray[np.object_]:
        """The sums (groups, d) as Python ints, a copy."""
        found: NDArray[np.object_] = self._huge + self._ints.astype(object)
        return found


class Products:
    """Sums of q q^T, or of k q q^T with whole k, by group.

    `bits`: one row adds at most 2^bits to the size of an entry, and every |q_i q_j| <= 2^32.
    Whatever the order, batches and threads: every partial sum is a whole number that its type
    holds exactly, so that the total is the same bit for bit.
    """

    def __init__(self, groups: int, dim: int, bits: int) -> None:
        rows = max(1, min(_ROWS, _NUMBERS // max(1, groups * dim)))
        self._waiting, self._filled = np.empty((groups, rows, dim)), [0] * groups
        self._floats, self._product = np.zeros((groups, dim, dim)), np.empty((dim, dim))
        self._ints: NDArray[np.int64] | None = None
        self._huge: NDArray[np.object_] | None = None
        # Rows that the floats and the ints have taken since they were last emptied.
        self._in_floats = self._in_ints = 0
        self._most_floats, self._most_ints = 2 ** (_FLOAT_BITS - bits), 2 ** (_INT_BITS - bits)

    def add(self, group: int, rows: Whole) -> None:
        """Add whole rows (n, d)."""
        waiting = self._waiting[group]
        start = 0
        while start < len(rows):
            filled = self._filled[group]
            part = rows[start : start + len(waiting) - filled]
            waiting[filled : filled + len(part)] = part
            self._filled[group] += len(part)
            start += len(part)
            if self._filled[group] == len(waiting):
                self._multiply(group)

    def add_weighted(self, group: int, rows: Whole, weights: NDArray[np.int64]) -> None:
        """Add whole rows (n, d), each as often as its whole weight (n,) says."""
        step = min(_ROWS, self._most_floats)
        for start in range(0, len(rows), step):
            part = rows[start : start + step].astype(np.float64)
            self._make_room(len(part))
            np.matmul((weights[start : start + step, None] * part).T, part, out=self._product)
            self._floats[group] += self._product

    def _multiply(self, group: int) -> None:
        """Empty what waits; of an array and its own transpose NumPy computes half (BLAS's syrk)."""
        rows = self._waiting[group, : self._filled[group]]
        self._filled[group] = 0
        for start in range(0, len(rows), self._most_floats):
            part = rows[start : start + self._most_floats]
            self._make_room(len(part))
            np.matmul(part.T, part, out=self._product)
            self._floats[group] += self._product

    def total(self) -> NDArray[np.object_]:
        """The sums (groups, d, d) as Python ints."""
        for group in np.flatnonzero(self._filled).tolist():
            self._multiply(group)
        ints = self._floats.astype(np.int64)
        if self._ints is not None:
            ints += self._ints  # below 2^62 + 2^52
        found = ints.astype(object)
        if self._huge is not None:
            found += self._huge
        return found

    def _make_room(self, rows: int) -> None:
        if self._in_floats + rows > self._most_floats:
            self._empty_floats()
        self._in_floats += rows

    def _empty_floats(self) -> None:
        if self._ints is None:
            self._ints = np.zeros(self._floats.shape, np.int64)
        if self._in_ints + self._in_floats > self._most_ints:
            self._empty_ints(self._ints)
        self._ints += self._floats.astype(np.int64)
        self._in_ints += self._in_floats
        self._floats[...] = 0.0
        self._in_floats = 0

    def _empty_ints(self, ints: NDArray[np.int64]) -> None:
        huge = ints.astype(object)
        self._huge = huge if self._huge is None else self._huge + huge
        ints[...] = 0
        self._in_ints = 0
