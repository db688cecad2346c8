"""Clopper-Pearson against tails summed in fractions, and its coverage; epsilon from two rates."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpsynth.accounting.intervals import clopper_pearson, epsilon_from_rates
from dpsynth.errors import UsageError


def tail(k, n, p):
    """P[Binomial(n, p) >= k] in exact arithmetic."""
    p = Fraction(p)
    return sum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k, n + 1))


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 30), (3, 30), (15, 30), (29, 30)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_ends_are_where_the_tails_are_half_the_error_rounded_outwards(k, n, confidence):
    low, high = clopper_pearson(k, n, confidence)
    half = (1 - Fraction(confidence)) / 2
    if k > 0:
        assert half * (1 - Fraction(1, 10**7)) <= tail(k, n, low) <= half
    else:
        assert low == 0
    if k < n:
        assert half * (1 - Fraction(1, 10**7)) <= 1 - tail(k + 1, n, high) <= half
    else:
        assert high == 1


def test_scipy_agrees():
    for k, n in [(0, 50), (7, 50), (50, 50), (999, 100_000)]:
        found = stats.binomtest(k, n).proportion_ci(0.99, method="exact")
        assert clopper_pearson(k, n, 0.99) == pytest.approx((found.low, found.high), rel=1e-8)


def test_coverage_is_never_below_the_confidence():
    n = 40
    limits = [clopper_pearson(k, n, 0.9) for k in range(n + 1)]
    for p in np.linspace(0.001, 0.999, 200):
        inside = [low <= p <= high for low, high in limits]
        assert stats.binom.pmf(np.arange(n + 1), n, p)[inside].sum() >= 0.9


def test_one_side_takes_the_whole_error():
    low, high = clopper_pearson(5, 20, 0.95, "low")
    assert high == 1
    assert low == pytest.approx(clopper_pearson(5, 20, 0.9)[0])
    assert clopper_pearson(5, 20, 0.95, "high") == pytest.approx(
        (0.0, clopper_pearson(5, 20, 0.9)[1])
    )
    assert clopper_pearson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("k", "n"), [(3, 2), (-1, 4), (0.5, 4), (1, -1)])
def test_impossible_counts_are_refused(k, n):
    with pytest.raises(UsageError, match="expected"):
        clopper_pearson(k, n)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_randomised_response_is_seldom_held_to_be_less_private(epsilon):
    q, n = 1 / (1 + math.exp(-epsilon)), 60
    hits = stats.binom.pmf(np.arange(n + 1), n, q)  # true positives; false ones mirror them
    wrong = sum(
        hits[tp] * hits[n - fp]
        for tp in range(n + 1)
        for fp in range(n + 1)
        if epsilon_from_rates(tp, n, fp, n, delta=0.0, confidence=0.95) > epsilon
    )
    assert wrong <= 0.05  # exact, no sampling


def test_both_kinds_of_error_are_used():
    # Few members missed, many others called: only TNR against FNR shows it.
    assert epsilon_from_rates(1000, 1000, 500, 1000, delta=1e-5, confidence=0.95) > 4
    assert epsilon_from_rates(500, 1000, 0, 1000, delta=1e-5, confidence=0.95) > 4
    low = epsilon_from_rates(900, 1000, 100, 1000, delta=0.0, confidence=0.95)
    assert (
        0
        < epsilon_from_rates(900, 1000, 100, 1000, delta=0.05, confidence=0.95)
        < low
        < math.log(9)
    )
