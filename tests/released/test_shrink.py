"""Shrinkage of noisy covariances: fitted coefficients and spreads; estimates stay positive."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.released import shrink


def symmetric_noise(rng, count, dim, std):
    drawn = rng.normal(size=(count, dim, dim)) * std
    upper = np.triu(drawn, 1) / np.sqrt(2)
    corner = np.einsum("mii->mi", drawn)
    return upper + np.swapaxes(upper, 1, 2) + np.einsum("mi,ij->mij", corner, np.eye(dim))


def wisharts(rng, count, dim, degrees, scale):
    draws = rng.normal(size=(count, degrees, dim)) * np.sqrt(scale)
    return np.einsum("mni,mnj->mij", draws, draws) / degrees


def test_coefficients_of_two_targets_are_recovered_through_noise():
    rng = np.random.default_rng(0)
    first, second = (wisharts(rng, 40, 6, 9, np.linspace(0.5, 2, 6)) for _ in range(2))
    noise = np.full(40, 0.3**2)
    data = 0.7 * first + 0.2 * second + symmetric_noise(rng, 40, 6, 0.3)
    found = shrink.fitted_targets(data, noise, np.ones((6, 6)), 0.05, [first, second])
    assert found == pytest.approx([0.7, 0.2], abs=0.06)


def test_coefficients_are_never_negative():
    rng = np.random.default_rng(1)
    targets = [np.repeat(np.eye(4)[None], 5, 0), wisharts(rng, 5, 4, 6, np.ones(4))]
    found = shrink.fitted_targets(-targets[0], np.ones(5), np.ones((4, 4)), 0.1, targets)
    assert (found >= 0).all() and found[0] == 0


def test_the_spread_is_that_of_the_truth_without_the_noise():
    rng = np.random.default_rng(2)
    scales = np.outer(np.linspace(0.2, 2, 8), np.linspace(0.2, 2, 8))
    signal = symmetric_noise(rng, 600, 8, np.sqrt(0.08)) * np.sqrt(scales)
    noise = rng.uniform(0.01, 0.2, 600)
    noisy = signal + symmetric_noise(rng, 600, 8, 1.0) * np.sqrt(noise)[:, None, None]
    spread = 0.5
    for _ in range(3):
        spread = shrink.fitted_spread(noisy, noise, scales, spread)
    assert spread == pytest.approx(0.08, rel=0.1)
    pure = symmetric_noise(rng, 600, 8, 1.0) * np.sqrt(noise)[:, None, None]
    assert shrink.fitted_spread(pure, noise, scales, 0.1) < 0.01


def test_shrunk_lies_between_target_and_data_and_follows_the_noise():
    rng = np.random.default_rng(3)
    target = wisharts(rng, 3, 5, 20, np.linspace(0.3, 2, 5))
    data = wisharts(rng, 3, 5, 20, np.linspace(0.3, 2, 5))
    precise = shrink.shrunk(data, np.full(3, 1e-8), target, 1.0)
    vague = shrink.shrunk(data, np.full(3, 1e8), target, 1.0)
    assert np.linalg.norm(precise - data) < 0.2 * np.linalg.norm(target - data)
    assert np.linalg.norm(vague - target) < 0.01 * np.linalg.norm(target)
    between = shrink.shrunk(data, np.full(3, 0.01), target, 0.05)
    assert np.linalg.norm(between - target) < np.linalg.norm(data - target)


def test_shrinking_beats_both_the_target_and_the_noisy_data():
    rng = np.random.default_rng(4)
    dim, count = 10, 30
    target = np.repeat(np.diag(np.linspace(0.2, 2, dim))[None], count, 0)
    root = np.sqrt(target)
    move = symmetric_noise(rng, count, dim, np.sqrt(0.1))
    truth = root @ np.linalg.matrix_power(np.eye(dim) + move / 4, 4) @ root
    noise = np.full(count, 0.3**2)
    data = truth + symmetric_noise(rng, count, dim, 0.3)
    found = shrink.shrunk(data, noise, target, 0.1)
    error = [np.square(x - truth).sum() for x in (found, target, data)]
    assert error[0] < 0.8 * min(error[1:])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 6),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    std=st.sampled_from([0.0, 1e-12, 1.0, 1e6]),
    spread=st.sampled_from([1e-4, 0.1, 10.0]),
)
def test_estimates_are_finite_symmetric_and_positive_for_any_noise(seed, dim, size, std, spread):
    rng = np.random.default_rng(seed)
    data = size * symmetric_noise(rng, 3, dim, 1.0)  # not even positive
    target = shrink.positive(size * wisharts(rng, 3, dim, 4, np.ones(dim)))
    found = shrink.shrunk(data, np.full(3, std**2), target, spread)
    assert np.isfinite(found).all()
    assert np.array_equal(found, np.swapaxes(found, 1, 2))
    assert np.linalg.eigvalsh(found).min() >= -1e-9 * np.abs(found).max()


def test_positive_moves_only_what_is_below_the_floor():
    matrix = np.diag([2.0, 0.5, -3.0])[None]
    assert shrink.positive(matrix, 0.1) == pytest.approx(np.diag([2.0, 0.5, 0.1])[None])
