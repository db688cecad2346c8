"""Density, coverage and the intervals of all ball measures against slow independent answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits

from dpsynth.assess.density import FEWEST, Neighbourhood, density_coverage, neighbourhood
from dpsynth.assess.metrics import precision_recall
from dpsynth.errors import UsageError

DIGITS = load_digits().data
NAMES = ("precision", "recall", "density", "coverage")


def slow(synthetic: np.ndarray, real: np.ndarray, k: int) -> tuple[float, float]:
    """Naeem et al.'s equations over whole distance matrices of exact differences."""
    radii = np.sort(cdist(real, real), axis=1)[:, k]
    inside = cdist(real, synthetic) <= radii[:, None] * (1 + 1e-9) + 1e-9
    return float(inside.sum() / (k * len(synthetic))), float(inside.any(axis=1).mean())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 25),
    st.integers(7, 25),
    st.integers(1, 6),
    st.booleans(),
)
def test_density_coverage_against_brute_force(
    seed: int, n: int, m: int, k: int, lattice: bool
) -> None:
    rng = np.random.default_rng(seed)
    # A lattice is full of ties and duplicates; an offset costs digits in the products.
    draw = (lambda size: rng.integers(0, 4, size).astype(float)) if lattice else rng.normal
    synthetic, real = draw(size=(n, 2)) + 1000.0, draw(size=(m, 2)) + 1000.0
    assert density_coverage(synthetic, real, k) == pytest.approx(slow(synthetic, real, k))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(4, 25), st.integers(6, 25), st.booleans())
def test_one_comparison_gives_what_each_measure_gives_alone(
    seed: int, n: int, m: int, lattice: bool
) -> None:
    rng = np.random.default_rng(seed)
    draw = (lambda size: rng.integers(0, 4, size).astype(float)) if lattice else rng.normal
    synthetic, real = draw(size=(n, 3)) - 50.0, draw(size=(m, 3)) - 50.0
    found = neighbourhood(synthetic, real)
    assert (found.precision.value, found.recall.value) == precision_recall(synthetic, real)
    assert (found.density.value, found.coverage.value) == density_coverage(synthetic, real)
    assert all(getattr(found, name).interval is None for name in NAMES)


def test_real_digits() -> None:
    first, second = DIGITS[:700], DIGITS[700:]
    density, coverage = density_coverage(first, second)
    assert (density, coverage) == pytest.approx(slow(first, second, 5), rel=1e-4)
    found = neighbourhood(first, second)
    assert (found.density.value, found.coverage.value) == (density, coverage)
    assert (found.precision.value, found.recall.value) == precision_recall(first, second)
    for name in NAMES:
        measured = getattr(found, name)
        assert measured.interval.low < measured.value < measured.interval.high
    # One digit repeated: it crowds one place, and covers a few balls.
    collapsed = density_coverage(np.repeat(DIGITS[:1], 200, axis=0), DIGITS[:200])
    assert collapsed[0] >= 1 / 5
    assert collapsed[1] < 0.2


def test_blocks_and_order_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = density_coverage(DIGITS[:300], DIGITS[300:700])
    monkeypatch.setattr("dpsynth.assess.density.BLOCK", 37)
    assert density_coverage(DIGITS[:300], DIGITS[300:700]) == whole
    assert density_coverage(DIGITS[:300][::-1], DIGITS[300:700]) == pytest.approx(whole)


def test_too_few_or_unfit() -> None:
    with pytest.raises(UsageError, match="k=5"):
        density_coverage(DIGITS[:10], DIGITS[:5])
    with pytest.raises(UsageError, match="k=3"):
        neighbourhood(DIGITS[:3], DIGITS[:10])
    with pytest.raises(UsageError):
        density_coverage(DIGITS[:10], DIGITS[:10, :3])
    with pytest.raises(UsageError, match="finite"):
        density_coverage(DIGITS[:10] * np.nan, DIGITS[:10])
    assert density_coverage(DIGITS[:1], DIGITS[:6]) == slow(DIGITS[:1], DIGITS[:6], 5)


def test_nothing_in_common_still_has_an_interval_of_some_width() -> None:
    rng = np.random.default_rng(0)
    found = neighbourhood(rng.normal(size=(FEWEST, 3)), rng.normal(size=(FEWEST, 3)) + 100)
    for name in NAMES:
        measured = getattr(found, name)
        assert measured.value == measured.interval.low == 0
        assert 0.01 < measured.interval.high < 0.06
    assert neighbourhood(DIGITS[:FEWEST], DIGITS, intervals=False).recall.interval is None


def scored_points_alone(found: Neighbourhood, count: int) -> float:
    share = found.precision.value
    return float(2 * 1.96 * np.sqrt(share * (1 - share) / count))


def test_intervals_hold_the_expected_value_of_fresh_sets() -> None:
    rng = np.random.default_rng(2)
    mix = rng.normal(size=(6, 6)) / 2
    trials, values, bounds, alone = 60, [], [], []
    for _ in range(trials):
        sets = rng.normal(size=(250, 6)) @ mix + 0.3, rng.normal(size=(200, 6)) @ mix
        found = neighbourhood(*sets)
        measured = [getattr(found, name) for name in NAMES]
        values.append([one.value for one in measured])
        bounds.append([(one.interval.low, one.interval.high) for one in measured])
        alone.append(scored_points_alone(found, 250))
    expected, spread = np.mean(values, axis=0), np.std(values, axis=0)
    low, high = np.moveaxis(np.array(bounds), 2, 0)
    held = ((low <= expected) & (expected <= high)).mean(axis=0)
    assert (held > 0.9).all()
    assert ((high - low).mean(axis=0) < 1.8 * 2 * 1.96 * spread).all()
    # What the balls add: without them the interval of precision would be too narrow.
    assert np.mean(alone) < 0.9 * 2 * 1.96 * spread[0]
