"""Records with caption features in memory, and whitened norms of cross moments, exactly."""

import math
from fractions import Fraction

import numpy as np

from dpsynth.accounting.statistics import (
    CrossMoments,
    PaperClassSums,
    PaperCrossMoments,
    PaperSecondMoment,
)
from dpsynth.artifacts.lock import Slot
from dpsynth.private.cross import Space, cross_sums
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, quantise_rows

DIM, FEATURES, RADIUS, LONGEST, CAPACITY = 4, 3, 2.5, 1.7, 400
A, B, C = math.sqrt(0.1), math.sqrt(0.5), math.sqrt(0.4)
JOINT = CrossMoments(A, B, C, features=FEATURES, dim=DIM)
SPACE = Space(DIM, FEATURES, RADIUS, LONGEST, constant=True)
PLAIN = Space(DIM, FEATURES, RADIUS, LONGEST, constant=False)
SPACES = {"constant": SPACE, "plain": PLAIN}


def tight(std=3.0, statistic=JOINT):
    return (Slot(1, "moments", "cross-moments", statistic, std),)


def paper(std=3.0):
    return (
        Slot(1, "moments", "cross-moments-sums", PaperClassSums(1, DIM), 2 * std),
        Slot(2, "moments", "cross-moments-second", PaperSecondMoment(CAPACITY, DIM), std),
        Slot(3, "moments", "cross-moments-captions", PaperCrossMoments(CAPACITY, FEATURES, DIM),
             2 * std),
    )  # fmt: skip


def chunk(codes, sizes=None):
    """Codes (n, d) in real units, whose labels number the records: features are looked up."""
    whole, finite = quantise_rows(np.asarray(codes, float).reshape(-1, DIM), RADIUS)
    assert finite.all()
    return UnitCodes(whole, np.arange(len(whole)), None if sizes is None else np.array(sizes))


def sums(codes, features, space=SPACE, slots=None, sizes=None):
    """Exact sums of records with these codes and feature vectors, in one chunk."""
    table = np.asarray(features, float).reshape(-1, FEATURES)
    return cross_sums(
        [chunk(codes, sizes)], lambda part: table[part.labels], space, slots or tight()
    )


def parts_of(exact):
    """Mff, Mzf and Mzz as Python integers."""
    seconds = exact.seconds[0]
    return seconds[DIM:, DIM:], seconds[:DIM, DIM:], seconds[:DIM, :DIM]


def whitened_square(moved, weights=(A, B, C), bits=0):
    """Squared whitened norm of a move of (ff, zf, zz), in whole numbers, as a Fraction."""
    squares = [sum(int(x) ** 2 for x in part.reshape(-1)) for part in moved]
    whole = sum(
        Fraction(w) ** 2 * Fraction(s, CODE_MAX**4) for w, s in zip(weights, squares, strict=True)
    )
    return whole / 4**bits


def some_features(rng, n, wild=True):
    """Feature vectors of every size: zero, tiny, on the ball, far outside, not numbers."""
    rows = rng.normal(size=(n, FEATURES)) * 10.0 ** rng.uniform(-3, 3, (n, 1))
    if wild:
        for row, kind in zip(rows, rng.integers(0, 8, n), strict=True):
            if kind < 5:
                row[rng.integers(FEATURES)] = (np.nan, np.inf, -np.inf, 1e308, 5e-324)[kind]
    return rows
