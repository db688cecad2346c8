"""Diversity within a class against a double loop; its interval against repetition."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpsynth.assess.diversity import diversity_interval, within_class
from dpsynth.errors import UsageError


def test_mean_over_pairs_of_different_images() -> None:
    points, labels = load_digits(return_X_y=True)
    points, labels = points[:120], labels[:120]
    found = within_class(points, labels, 11)
    for label in range(10):
        mine = points[labels == label]
        pairs = [np.linalg.norm(a - b) for i, a in enumerate(mine) for b in mine[:i]]
        assert found[label] == pytest.approx(np.mean(pairs))
    assert found[10] is None


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points, labels = load_digits(return_X_y=True)
    whole = within_class(points, labels, 10)
    monkeypatch.setattr("dpsynth.assess.diversity.BLOCK", 17)
    assert within_class(points, labels, 10) == pytest.approx(whole)


def test_copies_of_one_image_have_none() -> None:
    found = within_class(np.ones((20, 3)), np.zeros(20, dtype=np.int64), 1)
    assert found == [0.0]
    assert diversity_interval(np.ones((1, 3)), np.zeros(1, dtype=np.int64), 2) is None
    with pytest.raises(UsageError, match="labels"):
        within_class(np.ones((20, 3)), np.zeros(19, dtype=np.int64), 1)
    with pytest.raises(UsageError, match="finite"):
        within_class(np.full((2, 2), np.nan), np.zeros(2, dtype=np.int64), 1)


def test_interval_holds_the_expected_distance() -> None:
    rng = np.random.default_rng(3)
    labels, values, bounds = np.arange(60) % 2, [], []
    for _ in range(200):
        points = rng.normal(size=(60, 4)) * (1 + labels[:, None])
        found = diversity_interval(points, labels, 3)
        assert found is not None
        values.append(found.estimate)
        bounds.append((found.low, found.high))
    held = np.mean([low <= np.mean(values) <= high for low, high in bounds])
    assert held > 0.89
    width = np.mean([high - low for low, high in bounds])
    assert width < 1.4 * 2 * 1.96 * np.std(values)
