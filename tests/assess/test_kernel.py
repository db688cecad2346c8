"""Kernel distance against scikit-learn's dense kernel matrices; its interval against repetition."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits
from sklearn.metrics.pairwise import polynomial_kernel

from dpsynth.assess.kernel import kernel_distance, kernel_interval, squared_mmd
from dpsynth.errors import UsageError

DIGITS = load_digits().data


def dense(first: np.ndarray, second: np.ndarray) -> float:
    """The estimator as torch-fidelity and clean-fid write it, from whole kernel matrices."""
    both = np.concatenate([first, second])
    kernel = polynomial_kernel(both, degree=3, gamma=1 / both.shape[1], coef0=1)
    n, m = len(first), len(second)
    own, other, cross = kernel[:n, :n], kernel[n:, n:], kernel[:n, n:]
    return float(
        (own.sum() - np.trace(own)) / (n * (n - 1))
        + (other.sum() - np.trace(other)) / (m * (m - 1))
        - 2 * cross.mean()
    )


@pytest.mark.parametrize(("n", "m", "width"), [(2, 2, 1), (7, 5, 3), (700, 1100, 64)])
def test_estimator_on_all_pairs(n: int, m: int, width: int) -> None:
    first, second = DIGITS[:n, 20 : 20 + width], DIGITS[n - 2 : n - 2 + m, 20 : 20 + width]
    first, second = np.pad(first, ((0, 0), (0, 1))), np.pad(second, ((0, 0), (0, 1)))
    assert squared_mmd(first, second) == pytest.approx(dense(first, second), rel=1e-8, abs=1e-8)


def test_estimator_one_pair_at_a_time() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(6, 3)), rng.normal(size=(4, 3)) + 1

    def k(x: np.ndarray, y: np.ndarray) -> float:
        return float((x @ y / 3 + 1) ** 3)

    own = np.mean([k(x, y) for i, x in enumerate(first) for j, y in enumerate(first) if i != j])
    other = np.mean([k(x, y) for i, x in enumerate(second) for j, y in enumerate(second) if i != j])
    between = np.mean([k(x, y) for x in first for y in second])
    assert squared_mmd(first, second) == pytest.approx(own + other - 2 * between)


def test_subsets_are_drawn_from_both_sides_without_replacement() -> None:
    first, second = DIGITS[:500] / 16, DIGITS[500:1300] / 16
    found = kernel_distance(first, second, subsets=12, size=90, seed=5)
    rng = np.random.default_rng(5)
    values = []
    for _ in range(12):
        ours = rng.choice(500, 90, replace=False)
        values.append(dense(first[ours], second[rng.choice(800, 90, replace=False)]))
    assert found.mean == pytest.approx(np.mean(values), rel=1e-6)
    assert found.std == pytest.approx(np.std(values), rel=1e-6)
    assert (found.subsets, found.size) == (12, 90)
    assert found == kernel_distance(first, second, subsets=12, size=90, seed=5)


def test_few_images_make_smaller_subsets_and_one_where_that_is_all() -> None:
    first, second = DIGITS[:40], DIGITS[40:140]
    assert kernel_distance(first, second, subsets=3).size == 40
    whole = kernel_distance(first, second[:40])
    assert (whole.subsets, whole.std) == (1, 0.0)
    assert whole.mean == pytest.approx(dense(first, second[:40]))
    with pytest.raises(UsageError, match="at least 2"):
        kernel_distance(first[:1], second)
    with pytest.raises(UsageError):
        kernel_distance(first, second[:, :3])
    with pytest.raises(UsageError, match="finite"):
        kernel_interval(np.full((5, 64), np.inf), second)


def test_unbiased_and_sees_a_difference() -> None:
    rng = np.random.default_rng(0)
    null = [squared_mmd(rng.normal(size=(40, 4)), rng.normal(size=(30, 4))) for _ in range(300)]
    assert abs(np.mean(null)) < 4 * np.std(null) / np.sqrt(len(null))
    assert min(null) < 0
    spread = cdist(DIGITS[:300], DIGITS[300:600]).std()
    assert squared_mmd(DIGITS[:300], DIGITS[300:600] + spread) > 100


def kernel_between(shift: float, width: int) -> float:
    """Population value for N(0, I) and N(shift, I): E k over independent pairs, by moments."""

    def third(mean: float, one: np.ndarray, two: np.ndarray) -> float:
        # x.y of independent x ~ N(one, I), y ~ N(two, I), expanded about its three moments.
        a, b = one @ one, two @ two
        second = mean**2 + a + b + width
        cubed = mean**3 + 3 * mean * (a + b + width) + 6 * mean
        return 1 + 3 * mean / width + 3 * second / width**2 + cubed / width**3

    zero, moved = np.zeros(width), np.full(width, shift)
    same, other = third(0, zero, zero), third(float(moved @ moved), moved, moved)
    return same + other - 2 * third(0, zero, moved)


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_interval_holds_the_population_value(shift: float) -> None:
    rng = np.random.default_rng(8)
    truth, width, trials = kernel_between(shift, 3), 3, 200
    held, reaches, estimates = 0, [], []
    for _ in range(trials):
        first, second = rng.normal(size=(100, width)), rng.normal(size=(80, width)) + shift
        found = kernel_interval(first, second)
        held += found.low <= truth <= found.high
        reaches.append(found.high - found.low)
        estimates.append(found.estimate)
    assert np.mean(estimates) == pytest.approx(truth, abs=4 * np.std(estimates) / np.sqrt(trials))
    assert held / trials > 0.89  # 95% less what chance in 200 repetitions and skewness may take
    # Wide by at most the square root of 2 that the null costs.
    assert np.mean(reaches) < 1.6 * 2 * 1.96 * np.std(estimates)
