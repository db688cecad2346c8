"""The closed form against mpmath and against its own inverses."""

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting import gaussian


def slow_delta(epsilon, sigma):
    """Balle and Wang 2018, theorem 8, in 80 digits."""
    with mpmath.workdps(80):
        e, s = mpmath.mpf(epsilon), mpmath.mpf(sigma)
        near, far = 1 / (2 * s) - e * s, -1 / (2 * s) - e * s
        phi = lambda x: mpmath.erfc(-x / mpmath.sqrt(2)) / 2  # noqa: E731
        return phi(near) - mpmath.exp(e) * phi(far)


@pytest.mark.parametrize(
    ("epsilon", "sigma"),
    [(0.0, 1.0), (1.0, 1.0), (0.01, 300.0), (50.0, 1.0), (8.0, 12.0), (3.0, 0.2), (0.1, 1e4)],
)
def test_log_delta_is_mpmaths(epsilon, sigma):
    expected = float(mpmath.log(slow_delta(epsilon, sigma)))
    assert gaussian.log_delta(epsilon, sigma) == pytest.approx(expected, rel=1e-9, abs=1e-7)


def test_a_published_value():
    # sigma of the analytic Gaussian mechanism at (1, 1e-5); the classic bound gives 4.84.
    assert gaussian.sigma(1.0, 1e-5) == pytest.approx(3.730632, abs=1e-6)
    assert gaussian.sigma(1.0, 1e-5) < math.sqrt(2 * math.log(1.25e5))


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-3, 50), st.floats(-11, -1))
def test_sigma_and_epsilon_are_inverse_and_rounded_towards_privacy(epsilon, log10_delta):
    delta = 10.0**log10_delta
    sigma = gaussian.sigma(epsilon, delta)
    assert gaussian.log_delta(epsilon, sigma) <= math.log(delta)
    back = gaussian.epsilon(delta, sigma)
    assert back == pytest.approx(epsilon, rel=1e-7, abs=1e-9)
    assert gaussian.log_delta(back, sigma) <= math.log(delta)


def test_epsilon_is_zero_where_total_variation_is_below_delta():
    assert gaussian.epsilon(0.4, 1.0) == 0.0  # the total variation is 0.383


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        gaussian.delta(1.0, bad)
    with pytest.raises(ValueError, match="expected"):
        gaussian.sigma(bad, 1e-5)
    with pytest.raises(ValueError, match="expected"):
        gaussian.epsilon(bad if bad != math.inf else 2.0, 1.0)
