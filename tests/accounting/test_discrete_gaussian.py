"""The bound on the discrete Gaussian's distance against the distance itself, in mpmath."""

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.discrete import delta_slack, tv_per_coordinate


def slow_tv(scale):
    """Total variation between N_Z(0, s^2) and N(0, s^2) rounded to integers, in 40 digits."""
    with mpmath.workdps(40):
        s = mpmath.mpf(scale)
        reach = range(-math.ceil(14 * scale), math.ceil(14 * scale) + 1)
        weights = [mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * s**2)) for k in reach]
        total = mpmath.fsum(weights)
        half = mpmath.mpf(1) / 2
        rounded = [mpmath.ncdf((k + half) / s) - mpmath.ncdf((k - half) / s) for k in reach]
        pairs = zip(weights, rounded, strict=True)
        return float(mpmath.fsum(abs(w / total - r) for w, r in pairs) / 2)


@pytest.mark.parametrize("scale", [1.0, 1.5, 3.0, 5.0, 12.0, 50.0])
def test_the_bound_holds_and_is_of_the_right_order(scale):
    exact = slow_tv(scale)
    assert exact <= tv_per_coordinate(scale) <= 5 * exact


def test_the_distance_falls_as_the_inverse_square():
    assert slow_tv(40.0) == pytest.approx(slow_tv(10.0) / 16, rel=0.01)
    assert tv_per_coordinate(2.0**30) == pytest.approx(tv_per_coordinate(2.0**10) / 2**40)


def test_slack_for_the_release_is_negligible_beside_delta():
    coordinates = 10 * (1 + 48 + 48 * 49 // 2)
    assert 0 < delta_slack(coordinates, 2.0**30, 3.0) < 1e-13


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**6), st.floats(1, 1e12), st.floats(1e-3, 20))
def test_slack_is_monotone_and_a_probability(coordinates, scale, epsilon):
    slack = delta_slack(coordinates, scale, epsilon)
    assert 0 < slack <= 1
    assert slack <= delta_slack(coordinates + 1, scale, epsilon * 1.1)
    assert slack >= delta_slack(coordinates, scale * 2, epsilon)


def test_a_huge_epsilon_is_no_overflow():
    assert delta_slack(10, 2.0**30, 1e5) == 1.0


@pytest.mark.parametrize("bad", [0.0, 0.5, -3.0, math.nan, math.inf, True])
def test_scales_without_a_proof_are_refused(bad):
    with pytest.raises(ValueError, match="scale"):
        tv_per_coordinate(bad)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True])
def test_bad_counts_are_refused(bad):
    with pytest.raises(ValueError, match="coordinates"):
        delta_slack(bad, 2.0**30, 1.0)
