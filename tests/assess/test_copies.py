"""The copy check: quiet on real images nobody copied, loud on planted copies."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import beta, binom
from sklearn.datasets import load_digits

from dpsynth.assess import copies as module
from dpsynth.assess.copies import CLEAN, CLOSER, COPIES, UNJUDGED, closest_pairs, copy_check, pairs
from dpsynth.assess.nearest import aligned_space, pixel_space
from dpsynth.errors import UsageError

MNIST = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mnist"
SPACES = (pixel_space((28, 28, 1)), aligned_space((28, 28, 1)))
DIGITS = (load_digits().images[..., None] * 15.9).astype(np.uint8)[
    np.random.default_rng(0).permutation(1797)
]


@pytest.fixture(scope="module")
def mnist() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Real training records, and two random halves of held-out ones."""
    sides = []
    for side, count in (("train", 4000), ("t10k", 10_000)):
        path = MNIST / f"{side}-images-idx3-ubyte.gz"
        if not path.exists():
            pytest.skip("MNIST's files are not beside the checkout")
        pixels = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=16)
        sides.append(pixels.reshape(-1, 28, 28, 1)[:count])
    held = sides[1][np.random.default_rng(1).permutation(len(sides[1]))[:2000]]
    return sides[0], held[:1000], held[1000:]


def test_halves_of_held_out_mnist_are_clean(
    mnist: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    train, first, second = mnist
    counted: list[int] = []
    found = copy_check(first, train, second, SPACES, counted.append)
    assert (found.verdict, found.exact) == (CLEAN, 0)
    assert sum(counted) == len(SPACES) * pairs(len(first), len(train), len(second))
    for space in found.spaces:
        low, high = space.interval
        assert low < space.close / 1000 < high < 0.05 and space.expected == pytest.approx(
            0.01, abs=1e-4
        )
    report = found.to_json()
    assert "no sample" in report["words"]
    json.dumps(report, allow_nan=False)


def test_planted_copies_among_a_thousand_are_found_each_by_itself(
    mnist: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    train, first, second = mnist
    samples = first.copy()
    samples[500] = train[123]
    samples[600] = (train[124] * 0.8).astype(np.uint8)
    samples[700] = np.roll(train[125], 1, axis=1)
    found = copy_check(samples, train, second, SPACES)
    pixels, aligned = found.spaces
    assert (found.verdict, found.exact) == (COPIES, 1)
    assert pixels.copies.tolist() == [500] and pixels.score[500] == 0
    # Another brightness and a shift by a pixel deceive plain pixels alone.
    assert sorted(aligned.copies.tolist()) == [500, 600, 700]
    assert aligned.train[[500, 600, 700]].tolist() == [123, 124, 125]
    # What counts as too near depends on how many samples there are, and on nothing else of them:
    # one copy is seen as well as three.
    for i in (500, 600, 700):
        one = first.copy()
        one[i] = samples[i]
        alone = copy_check(one[i - 300 : i + 1], train, second, SPACES[1:])
        assert alone.verdict == COPIES and alone.spaces[0].copies.tolist() == [300]


def test_many_near_neighbours_are_closer_without_one_being_a_copy(
    mnist: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    train, _, second = mnist
    rng = np.random.default_rng(2)
    noisy = train[:600] + rng.normal(0, 45, train[:600].shape)
    samples = np.clip(noisy, 0, 255).astype(np.uint8)
    found = copy_check(samples, train, second, SPACES[:1])
    assert found.verdict in {CLOSER, COPIES} and found.exact == 0
    (space,) = found.spaces
    assert space.p_value < 1e-6 and space.interval[0] > 0.05
    assert found.to_json()["spaces"][0]["training_share"] < 0.06


def test_prototypes_are_near_to_everything_and_no_copies(
    mnist: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    # Means of twenty neighbours: nearer to training records than real images are, and innocent.
    train, first, second = mnist
    flat = [side.reshape(len(side), -1).astype(np.float32) for side in (first[:300], train)]
    near = np.argpartition(cdist(*flat), 20, axis=1)[:, :20]
    means = train[near].mean(axis=1).astype(np.uint8)
    found = copy_check(means, train, second, SPACES[:1])
    assert found.verdict == CLEAN
    plain = copy_check(first, train, second, SPACES[:1])
    assert np.median(found.spaces[0].distance) < np.median(plain.spaces[0].distance)


def test_false_alarms_are_as_rare_as_stated() -> None:
    # Random splits of the same real digits: nobody copied anything. 0.01 each is aimed at.
    space, alarms = pixel_space((8, 8, 1)), 0
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(DIGITS))
        samples, train, held = (DIGITS[part] for part in np.split(order, [400, 1200]))
        alarms += copy_check(samples, train, held, (space,)).verdict != CLEAN
    assert alarms <= binom.isf(0.001, 20, module.LEVEL)


def test_the_interval_is_clopper_and_pearsons() -> None:
    found = copy_check(DIGITS[:400], DIGITS[400:1300], DIGITS[1300:], (pixel_space((8, 8, 1)),))
    (space,) = found.spaces
    k, n = space.close, 400
    low = beta.ppf(0.025, k, n - k + 1) if k else 0.0
    assert space.interval == pytest.approx((low, beta.ppf(0.975, k + 1, n - k)))


def test_training_records_that_are_held_out_too_do_not_blind_it() -> None:
    train, held = DIGITS[400:1300], np.concatenate([DIGITS[1300:], DIGITS[400:500]])
    samples = DIGITS[:300].copy()
    samples[7] = DIGITS[900]
    found = copy_check(samples, train, held, (pixel_space((8, 8, 1)),))
    assert found.spaces[0].twins == 100 and found.spaces[0].copies.tolist() == [7]
    # A sample that equals a record of both sides says nothing about the training side.
    samples[7] = DIGITS[450]
    assert copy_check(samples, train, held, (pixel_space((8, 8, 1)),)).exact == 0


def test_too_few_held_out_records_judge_nothing_but_exact_copies() -> None:
    space = (pixel_space((8, 8, 1)),)
    found = copy_check(DIGITS[:50], DIGITS[50:500], DIGITS[500:560], space)
    assert found.verdict == UNJUDGED and found.to_json()["spaces"][0]["p_value"] is None
    copied = copy_check(DIGITS[50:60], DIGITS[50:500], DIGITS[500:560], space)
    assert (copied.verdict, copied.exact) == (COPIES, 10)
    json.dumps(copied.to_json(), allow_nan=False)


def test_what_cannot_be_checked_is_refused() -> None:
    space = (pixel_space((8, 8, 1)),)
    for samples, train, spaces in (
        (DIGITS[:0], DIGITS, space), (DIGITS, DIGITS[:1], space), (DIGITS, DIGITS, ())
    ):  # fmt: skip
        with pytest.raises(UsageError, match="it needs some of each"):
            copy_check(samples, train, DIGITS, spaces)


def test_the_picture_of_the_closest_pairs_is_closed_to_others(tmp_path: Path) -> None:
    samples = DIGITS[:300].copy()
    samples[7] = DIGITS[900]
    sides = samples, DIGITS[400:1300], DIGITS[1300:]
    found = copy_check(*sides, (pixel_space((8, 8, 1)), aligned_space((8, 8, 1))))
    path = closest_pairs(found, *sides, tmp_path / "pairs.png", title="pairs", rows=3)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_mode & 0o777 == 0o600


def test_the_picture_says_what_its_rows_and_numbers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = DIGITS[:300], DIGITS[400:1300], DIGITS[1300:]
    named = replace(pixel_space((8, 8, 1)), name="lenet-84 (penultimate layer, of 9 records)")
    found = copy_check(*sides, (pixel_space((8, 8, 1)), named))
    drawn: list[Any] = []
    monkeypatch.setattr(module, "side_by_side", lambda *given: drawn.append(given))
    closest_pairs(found, *sides, tmp_path / "p.png", title="digits: pairs", public=True, rows=1)
    ((rows, headings, _, title, _),) = drawn
    assert [name for name, _ in rows] == [
        f"{name}: {space.score.min():.2f}"
        for name, space in zip(("pixels", "lenet-84"), found.spaces, strict=True)
    ]
    assert headings == ["sample", "training", "held out"]
    assert title.startswith("digits: pairs\n") and "Lower is nearer to training" in title
