"""Frechet distance, precision and recall against slow independent answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_fid.fid_score import calculate_frechet_distance
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits

from dpsynth.assess.metrics import (
    coverage,
    frechet_distance,
    gaussian_maps,
    manifold,
    per_class_frechet,
    precision_recall,
)
from dpsynth.errors import UsageError

DIGITS = load_digits().data


def slow_frechet(first: np.ndarray, second: np.ndarray) -> float:
    m, n = first.mean(axis=0), second.mean(axis=0)
    c, d = np.cov(first, rowvar=False), np.cov(second, rowvar=False)
    root = sqrtm(c @ d)
    return float(((m - n) ** 2).sum() + np.trace(c) + np.trace(d) - 2 * np.trace(root).real)


def slow_precision(synthetic: np.ndarray, real: np.ndarray, k: int = 3) -> float:
    """Straight from the definition, one pair at a time in exact differences."""
    radii = []
    for i, point in enumerate(real):
        others = np.delete(real, i, axis=0)
        radii.append(np.sort(np.linalg.norm(others - point, axis=1))[k - 1])
    inside = [
        any(np.linalg.norm(real[j] - point) <= radii[j] + 1e-9 for j in range(len(real)))
        for point in synthetic
    ]
    return float(np.mean(inside))


@pytest.mark.parametrize("width", [2, 5, 84])
def test_frechet_agrees_with_sqrtm_and_pytorch_fid(width: int) -> None:
    rng = np.random.default_rng(width)
    mix = rng.normal(size=(width, width))
    first = np.maximum(rng.normal(size=(400, width)) @ mix, 0)
    second = np.maximum(rng.normal(size=(300, width)) + 0.3, 0)
    got = frechet_distance(first, second)
    assert got == pytest.approx(slow_frechet(first, second), rel=1e-6)
    sides = [f(side) for side in (first, second) for f in (mean, covariance)]
    try:
        theirs = calculate_frechet_distance(*sides)
    except TypeError:  # it calls sqrtm with an argument that SciPy 1.18 dropped
        return
    assert got == pytest.approx(theirs, rel=1e-6)


def mean(points: np.ndarray) -> np.ndarray:
    return points.mean(axis=0)


def covariance(points: np.ndarray) -> np.ndarray:
    return np.cov(points, rowvar=False)


def test_frechet_of_one_feature_in_closed_form() -> None:
    first, second = DIGITS[:, 20:21], DIGITS[:, 43:44]
    gap = first.mean() - second.mean()
    spread = first.std(ddof=1) - second.std(ddof=1)
    assert frechet_distance(first, second) == pytest.approx(gap**2 + spread**2)


def test_frechet_on_real_digits_with_dead_pixels() -> None:
    # Several of the 64 pixels are always 0: the product of covariances is singular.
    first, second = DIGITS[:900], DIGITS[900:]
    assert frechet_distance(first, second) == pytest.approx(slow_frechet(first, second), rel=1e-4)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-4)
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first))


def test_frechet_refuses_fewer_images_than_features() -> None:
    with pytest.raises(UsageError, match="more than 64"):
        frechet_distance(DIGITS[:64], DIGITS)
    frechet_distance(DIGITS[:65], DIGITS)
    with pytest.raises(UsageError):
        frechet_distance(DIGITS, DIGITS[:, :5])
    with pytest.raises(UsageError, match="finite"):
        frechet_distance(np.full((10, 2), np.nan), np.zeros((10, 2)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(4, 25), st.integers(4, 25), st.booleans())
def test_precision_recall_against_brute_force(seed: int, n: int, m: int, lattice: bool) -> None:
    rng = np.random.default_rng(seed)
    # A lattice is full of ties and duplicates; an offset costs digits in the products.
    draw = (lambda size: rng.integers(0, 4, size).astype(float)) if lattice else rng.normal
    synthetic, real = draw(size=(n, 2)) + 1000.0, draw(size=(m, 2)) + 1000.0
    precision, recall = precision_recall(synthetic, real)
    assert precision == slow_precision(synthetic, real)
    assert recall == slow_precision(real, synthetic)


def test_precision_recall_on_real_digits() -> None:
    assert precision_recall(DIGITS[:500], DIGITS[:500]) == (1.0, 1.0)
    precision, recall = precision_recall(DIGITS[:200], DIGITS[1000:1200])
    assert precision == slow_precision(DIGITS[:200], DIGITS[1000:1200])
    assert recall == slow_precision(DIGITS[1000:1200], DIGITS[:200])
    # One digit repeated: inside the real manifold, but it covers nothing else.
    collapsed = np.repeat(DIGITS[:1], 200, axis=0)
    assert precision_recall(collapsed, DIGITS[:200]) == (1.0, 1 / 200)
    assert precision_recall(DIGITS[:200] + 100.0, DIGITS[200:400])[0] == 0.0


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = precision_recall(DIGITS[:300], DIGITS[300:700])
    monkeypatch.setattr("dpsynth.assess.metrics.BLOCK", 37)
    assert precision_recall(DIGITS[:300], DIGITS[300:700]) == whole


def test_too_few_for_neighbours() -> None:
    with pytest.raises(UsageError):
        manifold(DIGITS[:3])
    assert coverage(DIGITS[:2], manifold(DIGITS[:4])) == 1.0


def test_frechet_of_each_class_is_that_of_its_images_alone() -> None:
    points, labels = load_digits(return_X_y=True)
    points = points[:, [10, 20, 30, 43]]
    order = np.random.default_rng(0).permutation(len(points))
    first, second = order[:900], order[900:]
    found = per_class_frechet(points[first], labels[first], points[second], labels[second], 11)
    for label in range(10):
        sides = [points[half[labels[half] == label]] for half in (first, second)]
        assert found[label] == pytest.approx(slow_frechet(*sides), rel=1e-4)
    assert found[10] is None  # declared, never generated
    # Labels exchanged: the whole sets are as they were, the classes are not.
    wrong = per_class_frechet(points[first], 9 - labels[first], points[second], labels[second], 10)
    assert np.mean(wrong[:10]) > 5 * np.mean(found[:10])


def test_frechet_of_a_class_needs_more_images_than_features() -> None:
    rng = np.random.default_rng(0)
    points, labels = rng.normal(size=(10, 4)), np.array([0] * 5 + [1] * 4 + [2])
    found = per_class_frechet(points, labels, points, labels, 3)
    assert found[0] == pytest.approx(0, abs=1e-9)
    assert found[1:] == [None, None]
    with pytest.raises(UsageError, match="one label"):
        per_class_frechet(points, labels[:3], points, labels, 3)


def test_maps_carry_one_gaussian_to_the_other() -> None:
    rng = np.random.default_rng(3)
    first = rng.normal(size=(300, 6)) @ rng.normal(size=(6, 6))
    second = rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6))
    forth, back = gaussian_maps(first, second)
    c, d = covariance(first), covariance(second)
    np.testing.assert_allclose(forth @ c @ forth, d, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(back @ d @ back, c, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(forth @ back, np.eye(6), atol=1e-7)
    # Dead features: where neither side varies the map is zero, and all of it is finite.
    dead = np.pad(first, ((0, 0), (0, 2)))
    assert np.isfinite(gaussian_maps(dead, np.pad(second, ((0, 0), (0, 2))))[0]).all()
