"""Intervals: against closed forms, and against what repeated draws show that they hold."""

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import load_digits

from dpsynth.assess.bootstrap import (
    frechet_interval,
    mean_interval,
    per_class_frechet_interval,
    share_interval,
)
from dpsynth.assess.metrics import frechet_distance, per_class_frechet
from dpsynth.errors import UsageError

DIGITS = load_digits()


@pytest.mark.parametrize(("hits", "count"), [(0, 1), (1, 1), (3, 10), (977, 1000), (0, 10_000)])
def test_share_by_the_tails_of_the_binomial(hits: int, count: int) -> None:
    found = share_interval(hits, count)
    # The definition: at each end the tail beyond the observed count has 2.5%.
    if hits:
        assert stats.binom.sf(hits - 1, count, found.low) == pytest.approx(0.025, rel=1e-6)
    if hits < count:
        assert stats.binom.cdf(hits, count, found.high) == pytest.approx(0.025, rel=1e-6)
    assert 0 <= found.low <= hits / count <= found.high <= 1
    with pytest.raises(UsageError):
        share_interval(count + 1, count)
    with pytest.raises(UsageError):
        share_interval(0, 0)


def test_bootstrap_of_a_mean_agrees_with_one_written_out() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=150)
    found = mean_interval(values, resamples=4000)
    rng = np.random.default_rng(77)
    means = [rng.choice(values, 150).mean() for _ in range(4000)]
    assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.02)
    assert found.resamples == 4000
    assert found == mean_interval(values, resamples=4000)
    assert found != mean_interval(values, resamples=4000, seed=1)


def test_groups_are_resampled_whole() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 25)
    values = np.repeat(rng.normal(size=40), 25) + rng.normal(size=1000) / 10
    apart, whole = mean_interval(values), mean_interval(values, groups)
    assert whole.high - whole.low > 4 * (apart.high - apart.low)
    assert "groups" in whole.method
    # Groups weigh by their size: the interval lies about the mean of all values.
    uneven = np.array([5] * 900 + list(range(100)))
    found = mean_interval(values, uneven)
    assert found.low < values.mean() < found.high
    with pytest.raises(UsageError, match="named for"):
        mean_interval(values, groups[:5])


def test_indicators_that_all_agree_have_width() -> None:
    assert mean_interval(np.ones(50)).low == pytest.approx(0.025 ** (1 / 50))
    assert mean_interval(np.zeros(50, dtype=bool)) == share_interval(0, 50)
    # 50 records of two captions are two observations.
    assert mean_interval(np.ones(50), np.arange(50) % 2) == share_interval(2, 2)
    for bad in (np.zeros(0), np.array([np.nan]), np.zeros((2, 2))):
        with pytest.raises(UsageError):
            mean_interval(bad)


def test_interval_of_a_mean_holds_it() -> None:
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(300):
        found = mean_interval(rng.choice([0, 1 / 3, 2 / 3, 1], 80, p=[0.1, 0.1, 0.2, 0.6]))
        held += found.low <= 1 / 30 + 0.4 / 3 + 0.6 <= found.high
    assert held / 300 > 0.91


def gaussians(rng: np.random.Generator, shift: float, scale: float) -> tuple[np.ndarray, ...]:
    spread = np.exp(-np.arange(12) / 6)
    return rng.normal(size=(200, 12)) * spread * scale + shift, rng.normal(size=(160, 12)) * spread


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (0.15, 1.0), (0.1, 1.4)])
def test_frechet_intervals_hold_what_they_say(shift: float, scale: float) -> None:
    rng = np.random.default_rng(6)
    spread = np.exp(-np.arange(12) / 6)
    distance = 12 * shift**2 + float(((scale - 1) ** 2 * spread**2).sum())
    pairs = [gaussians(rng, shift, scale) for _ in range(150)]
    values = [frechet_distance(*pair) for pair in pairs]
    found = [frechet_interval(*pair) for pair in pairs]
    here = [one.here.low <= np.mean(values) <= one.here.high for one in found]
    beyond = [one.beyond.low <= distance <= one.beyond.high for one in found]
    assert np.mean(here) > 0.89
    assert np.mean(beyond) > 0.89
    width = np.mean([one.here.high - one.here.low for one in found])
    assert width < 1.8 * 2 * 1.96 * np.std(values)
    # The bias that the plain bootstrap would double is gone, or nearly so at the null's edge.
    bias = np.mean(values) - distance
    left = np.mean([one.unbiased for one in found]) - distance
    assert abs(left) < 0.2 * bias


def test_plain_bootstrap_of_a_frechet_distance_is_biased_upwards() -> None:
    """Why it is not used: the resampled distances lie above the one they should surround."""
    rng = np.random.default_rng(0)
    first, second = gaussians(rng, 0.0, 1.0)
    drawn = [
        frechet_distance(first[rng.integers(200, size=200)], second[rng.integers(160, size=160)])
        for _ in range(100)
    ]
    assert np.quantile(drawn, 0.025) > frechet_distance(first, second)


def test_halves_of_real_digits_have_one_distribution() -> None:
    points = DIGITS.data[:, 16:32]
    order = np.random.default_rng(0).permutation(len(points))
    found = frechet_interval(points[order[:900]], points[order[900:]])
    assert found.beyond.low == 0
    assert found.unbiased < 0.5 * frechet_distance(points[order[:900]], points[order[900:]])
    apart = frechet_interval(points[DIGITS.target < 5], points[DIGITS.target >= 5])
    assert apart.beyond.low > found.beyond.high
    assert apart.beyond.estimate == apart.unbiased


def test_frechet_with_too_few_images_to_know_its_bias() -> None:
    first, second = DIGITS.data[:66], DIGITS.data[66:]
    found = frechet_interval(first, second)
    assert found.unbiased is None
    assert (found.beyond.low, found.beyond.high) == (0.0, found.here.high)
    assert "too few" in found.beyond.method
    with pytest.raises(UsageError, match="more than 64"):
        frechet_interval(first[:64], second)


def test_interval_of_the_mean_over_classes() -> None:
    rng = np.random.default_rng(9)
    labels, held, values, bounds = np.arange(120) % 3, 0, [], []
    for _ in range(120):
        pair = rng.normal(size=(120, 3)) + labels[:, None], rng.normal(size=(120, 3)) + 0.3
        found = per_class_frechet_interval(pair[0], labels, pair[1], labels, 4)
        assert found is not None
        values.append(np.mean(per_class_frechet(pair[0], labels, pair[1], labels, 4)[:3]))
        bounds.append((found.low, found.high))
    held = np.mean([low <= np.mean(values) <= high for low, high in bounds])
    assert held > 0.89
    assert per_class_frechet_interval(pair[0][:3], labels[:3], *pair[1:], labels, 3) is None
    plain = found.to_json()
    assert set(plain) == {"low", "high", "level", "resamples", "method"}
