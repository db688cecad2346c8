"""The release: declared noise on exact sums, fresh each time, both sensitivities."""

import math

import numpy as np
import pytest
from unitkit import encode_units, exact_sums, joined

from dpsynth.accounting.statistics import (
    ClassMoments,
    ClippedGradientSum,
    PaperClassSums,
    PaperSecondMoment,
)
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError
from dpsynth.private.encoding import encoded
from dpsynth.private.lattice import CODE_MAX, quantise
from dpsynth.private.moments import add_noise, blocks_of
from dpsynth.private.noise import NoiseSource
from dpsynth.readers.records import Record

DIM, CLASSES, RADIUS, CAPACITY = 6, 3, 2.5, 400
A, B, C = math.sqrt(0.05), math.sqrt(0.55), math.sqrt(0.4)


def tight(std=3.0, covariance="class"):
    statistic = ClassMoments(A, B, C, covariance, CLASSES, DIM)
    return [Slot(1, "moments", "moments", statistic, std)]


def paper(std=3.0):
    return [
        Slot(1, "moments", "moments-sums", PaperClassSums(CLASSES, DIM), 2 * std),
        Slot(2, "moments", "moments-second", PaperSecondMoment(CAPACITY, DIM), 2 * std / CAPACITY),
    ]


def records(n, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.array([quantise(z, RADIUS) for z in rng.normal(size=(n, DIM))], dtype=np.int64)
    return codes.reshape(n, DIM), rng.integers(0, CLASSES, n)


def release(slots, data, noise=None):
    codes, labels = data
    first = slots[0].statistic
    covariance = first.covariance if isinstance(first, ClassMoments) else "shared"
    sums = exact_sums(codes, labels, CLASSES)
    return add_noise(sums, blocks_of(slots, RADIUS), covariance, RADIUS, noise or NoiseSource())


def test_tight_noise_is_the_declared_noise_in_real_units():
    made = release(tight(3.0), records(0))
    assert made.count_std == pytest.approx(3.0 / A)
    assert made.sum_std == pytest.approx(3.0 / B * RADIUS)
    assert made.second_std == pytest.approx(3.0 / C * RADIUS**2)


def test_paper_noise_is_the_declared_noise_in_real_units():
    """Released are n with 2 sigma, S / 2R with 2 sigma, M / (N R^2) with 2 sigma / N."""
    made = release(paper(3.0), records(0))
    assert made.count_std == pytest.approx(6.0)
    assert made.sum_std == pytest.approx(2 * RADIUS * 6.0)
    assert made.second_std == pytest.approx(6.0 * RADIUS**2)
    assert made.seconds.shape == (1, DIM, DIM)


@pytest.mark.parametrize("slots", [tight(), tight(covariance="shared"), paper()])
def test_noise_has_the_declared_variance_in_every_block_and_is_fresh(slots):
    data = records(50)
    codes, labels = data[0] * (RADIUS / CODE_MAX), data[1]
    own = [codes[labels == y] for y in range(CLASSES)]
    corner, upper = np.arange(DIM), np.triu_indices(DIM, 1)
    residuals = {"count": [], "sum": [], "diagonal": [], "off": []}
    for _ in range(60):
        made = release(slots, data)
        seconds = np.stack([z.T @ z for z in own])
        if made.covariance == "shared":
            seconds = seconds.sum(0, keepdims=True)
        residuals["count"].append((made.counts - [len(z) for z in own]) / made.count_std)
        residuals["sum"].append((made.sums - [z.sum(0) for z in own]) / made.sum_std)
        second = (made.seconds - seconds) / made.second_std
        np.testing.assert_array_equal(made.seconds, made.seconds.transpose(0, 2, 1))
        residuals["diagonal"].append(second[:, corner, corner])
        residuals["off"].append(second[:, upper[0], upper[1]] * math.sqrt(2))
    for name, drawn in residuals.items():
        flat = np.concatenate([np.ravel(x) for x in drawn])
        n = len(flat)
        assert len(np.unique(flat)) == n, name  # no draw is used twice
        assert abs((flat**2).sum() - n) < 6 * math.sqrt(2 * n), name
        assert abs(flat.mean()) < 6 / math.sqrt(n), name


def test_without_records_the_release_is_noise_and_finite():
    made = release(tight(), records(0))
    made.check()
    assert made.counts.any()


def test_an_unsafe_seed_repeats_the_release():
    first, again = (release(tight(), records(9), NoiseSource.unsafe(4)) for _ in range(2))
    np.testing.assert_array_equal(first.seconds, again.seconds)


@pytest.mark.parametrize(
    "slots",
    [
        [],
        paper()[:1],
        paper()[::-1],
        [Slot(1, "train", "train-0001", ClippedGradientSum(1.0), 1.0, 0.1, 5)],
    ],
)
def test_slots_that_are_no_release_are_refused(slots):
    with pytest.raises(PlanError):
        blocks_of(slots, RADIUS)


class Pixels:
    """A representation whose code is the image's own first row."""

    dim, radius, elementwise = 4, 10.0, True

    def encode_exact_many(self, images):
        codes = images[:, 0, :, 0].astype(float)
        codes[codes[:, 0] == 255] = np.nan
        return codes


class Listed:
    """Units from a list; `most`: of several images, or None where a record is a unit."""

    def __init__(self, units, most=None):
        self.units, self.most = units, most

    def records(self):
        return iter(self.units)


def picture(first, label):
    image = np.zeros((2, 4, 1), np.uint8)
    image[0, 0, 0] = first
    return Record(image, label)


def test_records_that_have_no_place_contribute_nothing():
    units = [[picture(1, 0)], [picture(255, 1)], [picture(2, 7)], [picture(0, 2)], [picture(3, -1)]]
    found = encode_units(Listed(units), Pixels(), classes=3)
    assert found.labels.tolist() == [0, 2]  # neither the NaN code nor the undeclared labels
    assert found.codes.tolist() == [[int(0.1 * CODE_MAX), 0, 0, 0], [0, 0, 0, 0]]
    assert found.sizes is None


def test_a_record_that_is_a_unit_contributes_once_whatever_it_holds():
    units = [[picture(1, 0), picture(9, 1), picture(9, 2)]]
    assert encode_units(Listed(units), Pixels(), classes=3).labels.tolist() == [0]


def test_units_of_several_images_lie_side_by_side():
    units = [
        [picture(1, 0), picture(255, 0), picture(2, 2)],
        [picture(255, 1)],  # no code at all: no unit
        [picture(3, 1)],
        [picture(4, 7)],
        [picture(5, 0), picture(6, 1), picture(7, 2)],
    ]
    whole = encode_units(Listed(units, most=3), Pixels(), classes=3)
    assert whole.sizes.tolist() == [2, 1, 3]
    assert whole.labels.tolist() == [0, 2, 1, 0, 1, 2]
    assert whole.units == 3
    for rows in (1, 2, 3):
        parts = list(encoded(Listed(units, most=3), Pixels(), classes=3, rows=rows))
        assert len(parts) > 2  # the first is empty
        assert all(part.sizes.sum() == len(part.codes) for part in parts)
        again = joined(parts)
        for name in ("codes", "labels", "sizes"):
            np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))


@pytest.mark.parametrize("most", [None, 2])
def test_an_empty_data_set_encodes_to_nothing(most):
    found = encode_units(Listed([], most), Pixels(), classes=3)
    assert found.codes.shape == (0, 4)
    assert found.labels.shape == (0,)
    assert (found.sizes is None) == (most is None)
    assert found.units == 0
