"""Nearest records against SciPy and scikit-learn, which compute every difference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

from dpsynth.assess import nearest as module
from dpsynth.assess.nearest import Space, aligned_space, nearest, pixel_space
from dpsynth.errors import UsageError

DIGITS = (load_digits().images[..., None] * 15.9).astype(np.uint8)
SHAPE = (8, 8, 1)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES", 70)
    monkeypatch.setattr(module, "RECORDS", 110)


def test_real_digits_agree_with_scikit_learn(small_blocks: None) -> None:
    queries, records = DIGITS[:300], DIGITS[300:]
    counted: list[int] = []
    found = nearest(queries, records, pixel_space(SHAPE), progress=counted.append)
    flat = [part.reshape(len(part), -1) / 255 for part in (queries, records)]
    finder = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(flat[1])
    distance, _ = finder.kneighbors(flat[0])
    assert found.distance == pytest.approx(distance[:, 0], abs=1e-6)
    every = cdist(*flat)
    assert every[np.arange(300), found.index] == pytest.approx(every.min(axis=1), abs=1e-6)
    assert sum(counted) == 300 * len(records)


def test_a_record_is_not_its_own_neighbour(small_blocks: None) -> None:
    own = np.arange(len(DIGITS))
    own[5] = -1
    found = nearest(DIGITS, DIGITS, pixel_space(SHAPE), own=own)
    every = cdist(*[DIGITS.reshape(len(DIGITS), -1) / 255.0] * 2)
    np.fill_diagonal(every, np.inf)
    every[5, 5] = 0
    assert found.distance == pytest.approx(every.min(axis=1), abs=1e-6)
    assert (found.index[5], found.distance[5]) == (5, 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 40), st.sampled_from([1, 3]))
def test_random_images_of_any_count_and_colour(
    seed: int, count: int, records: int, channels: int
) -> None:
    rng = np.random.default_rng(seed)
    first, second = (
        rng.integers(0, 256, (n, 5, 4, channels)).astype(np.uint8) for n in (count, records)
    )
    second[0] = first[0]
    found = nearest(first, second, pixel_space((5, 4, channels)))
    every = cdist(first.reshape(count, -1) / 255, second.reshape(records, -1) / 255)
    assert found.distance == pytest.approx(every.min(axis=1), abs=1e-6)
    assert found.distance[0] == 0  # exact, whatever float32 makes of the products


def test_features_far_from_zero_lose_no_copy() -> None:
    vectors = {image.tobytes(): 1e4 + i * 1e-2 for i, image in enumerate(DIGITS[:200])}

    def embed(images: np.ndarray) -> np.ndarray:
        return np.array([[vectors[i.tobytes()], 1e4] for i in images], np.float32)

    found = nearest(DIGITS[:200], DIGITS[:200], Space("far", embed))
    assert found.distance.max() < 0.5  # float32 cannot tell them apart; they are near


def test_neither_brightness_nor_a_shift_changes_the_aligned_distance() -> None:
    wide = np.pad(DIGITS[:200], ((0, 0), (3, 3), (3, 3), (0, 0)))
    space = aligned_space((14, 14, 1))
    moved = np.roll(wide, (1, -2), axis=(1, 2))
    assert np.abs(space.embed(moved) - space.embed(wide)).max() < 1e-5
    dimmed = (wide * 0.5).astype(np.uint8)
    gaps = np.linalg.norm(space.embed(dimmed) - space.embed(wide), axis=1)
    between = nearest(wide, wide, space, own=np.arange(200)).distance
    assert np.median(gaps) < 0.1 * np.median(between)
    # White paper and dark ink are centred as dark paper and white ink are.
    assert np.abs(space.embed(255 - wide) + space.embed(wide)).max() < 1e-5
    assert np.isfinite(space.embed(np.full((2, 14, 14, 3), 7, np.uint8))).all()


def test_large_images_are_averaged_down_and_the_name_says_so() -> None:
    images = np.repeat(np.repeat(DIGITS[:20], 10, axis=1), 8, axis=2)
    space = pixel_space((80, 64, 1))
    assert space.embed(images).shape == (20, 27 * 22) and "3x3" in space.name
    assert pixel_space(SHAPE).name == "pixels"
    found = nearest(images, images[::-1], space)
    assert found.distance.max() == 0 and np.array_equal(found.index, np.arange(20)[::-1])


def test_nothing_to_compare_with_is_refused() -> None:
    for records, own in (
        (DIGITS[:0], None), (DIGITS[:1], np.zeros(3, np.int64)), (DIGITS[:, :7], None)
    ):  # fmt: skip
        with pytest.raises(UsageError, match="of the same shape"):
            nearest(DIGITS[:3], records, pixel_space(SHAPE), own=own)
