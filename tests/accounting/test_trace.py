"""The posterior-variance trace against dense matrices, regression on draws, and its bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.checks import AccountingError
from dpsynth.accounting.trace import midpoints, posterior_trace, velocity_trace

TIMES = np.array([0.0, 0.1, 0.4, 0.8, 0.99])


def covariances(classes: int, dim: int, seed: int = 0) -> np.ndarray:
    """Random ones (Y, d, d), one of them of low rank."""
    source = np.random.default_rng(seed)
    roots = source.normal(size=(classes, dim, dim))
    roots[0, :, dim // 2 :] = 0.0
    return roots @ roots.transpose(0, 2, 1) / dim


def spectra(sigma: np.ndarray) -> np.ndarray:
    return np.linalg.eigvalsh(sigma).clip(0.0)


def test_it_is_the_trace_of_the_dense_posterior_covariance() -> None:
    sigma, weights = covariances(3, 5), np.array([0.2, 0.3, 0.5])
    found = posterior_trace(TIMES, weights, spectra(sigma))
    for t, value in zip(TIMES, found, strict=True):
        # The block of z in the inverse of the joint precision of (z, xi) given x_t, by Schur.
        each = []
        for one in sigma:
            a = (1 - t) ** 2 * np.eye(5) + t**2 * one
            each.append(np.trace(one - t**2 * one @ np.linalg.solve(a, one)))
        assert value == pytest.approx(float(weights @ each), rel=1e-9, abs=1e-12)


def test_it_is_what_the_best_predictor_leaves_over_in_draws() -> None:
    sigma, t, n = covariances(1, 4, seed=3)[0], 0.6, 200_000
    source = np.random.default_rng(1)
    z = source.multivariate_normal(np.ones(4), sigma, size=n)
    x = (1 - t) * source.normal(size=z.shape) + t * z
    z, x = z - z.mean(0), x - x.mean(0)
    left = z - x @ np.linalg.lstsq(x, z, rcond=None)[0]  # the posterior mean is linear in x
    expected = posterior_trace([t], [1.0], spectra(sigma)[None])[0]
    assert (left**2).sum(1).mean() == pytest.approx(expected, rel=0.01)
    xi = (x - t * z) / (1 - t)
    velocity = z - xi - x @ np.linalg.lstsq(x, z - xi, rcond=None)[0]
    expected = velocity_trace([t], [1.0], spectra(sigma)[None])[0]
    assert (velocity**2).sum(1).mean() == pytest.approx(expected, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=6),
    st.lists(st.floats(0, 1), min_size=2, max_size=6).map(sorted),
)
def test_it_falls_in_t_from_the_whole_variance_to_none(
    values: list[float], times: list[float]
) -> None:
    found = posterior_trace([0.0, *times, 1.0], [1.0], [values])
    assert found[0] == pytest.approx(sum(values)) and found[-1] == 0
    assert (np.diff(found) <= 1e-9 * (1 + sum(values))).all()
    velocity = velocity_trace([0.0, *times, 1.0], [1.0], [values])
    assert np.isfinite(velocity).all() and (velocity >= 0).all()
    assert velocity[-1] == pytest.approx(sum(v > 0 for v in values))


def test_a_shared_spectrum_is_that_of_every_class() -> None:
    values = np.array([[3.0, 0.5]])
    both = velocity_trace(TIMES, [0.4, 0.6], np.repeat(values, 2, axis=0))
    np.testing.assert_allclose(velocity_trace(TIMES, [0.4, 0.6], values), both)


def test_midpoints_average_a_smooth_function() -> None:
    average = np.exp(midpoints(0.2, 0.7)).mean()
    assert average == pytest.approx((np.exp(0.7) - np.exp(0.2)) / 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("t", "weights", "values"),
    [
        ([1.1], [1.0], [[1.0]]),
        ([-0.1], [1.0], [[1.0]]),
        ([0.5], [0.5], [[1.0]]),
        ([0.5], [1.5, -0.5], [[1.0]]),
        ([0.5], [1.0], [[-1.0]]),
        ([0.5], [1.0], [[np.nan]]),
        ([0.5], [0.5, 0.5], [[1.0]] * 3),
        (0.5, [1.0], [[1.0]]),
        ([0.5], [], [[1.0]]),
    ],
)
def test_what_is_no_mixture_is_refused(t, weights, values) -> None:
    with pytest.raises(AccountingError, match="the trace got"):
        velocity_trace(t, weights, values)
