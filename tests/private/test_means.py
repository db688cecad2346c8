"""The release of means alone: declared noise on exact sums, whoever comes or goes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unitkit import CLASSES, DIM, RADIUS, coded, encode_units, exact_sums, image, whitened_square

from dpsynth.accounting.queries import ClassMeans
from dpsynth.accounting.statistics import ClassMoments, sensitivity
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.moments import load_moments, save_moments
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.blocks import blocks_of
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, quantise
from dpsynth.private.moments import add_noise, class_sums, groups_of
from dpsynth.private.noise import NoiseSource
from dpsynth.readers.records import Record

A, B, MOST = math.sqrt(0.1), math.sqrt(0.9), 4
BY_CLASS = ClassMeans(A, B, CLASSES, DIM)
ALL = ClassMeans(A, B, 1, DIM)
KINDS = pytest.mark.parametrize("statistic", [BY_CLASS, ALL], ids=["class", "all"])


def slot(statistic, std=3.0):
    return Slot(1, "moments", "moments", statistic, std)


def sums(data, statistic):
    return class_sums([data], (slot(statistic),), CLASSES)


NONE = np.zeros(0, object)
"""Second moments, of which there are none."""


def release(data, statistic, std=3.0, noise=None):
    slots = (slot(statistic, std),)
    exact = class_sums([data], slots, CLASSES)
    return add_noise(exact, blocks_of(slots, RADIUS), "public", RADIUS, noise or NoiseSource())


def records(n, seed=0):
    rng = np.random.default_rng(seed)
    codes = [quantise(z, RADIUS) for z in rng.normal(size=(n, DIM))]
    return UnitCodes(np.array(codes, np.int32).reshape(n, DIM), rng.integers(0, CLASSES, n))


@KINDS
def test_noise_is_the_declared_one_in_real_units_and_nothing_else_is_released(statistic):
    made = release(records(20), statistic)
    assert made.count_std == pytest.approx(3.0 / A)
    assert made.sum_std == pytest.approx(3.0 / B * RADIUS)
    assert made.second_std == 0
    assert made.seconds.shape == (0, DIM, DIM)
    assert made.counts.shape == (statistic.classes,)


@KINDS
def test_noise_has_the_declared_variance_and_is_fresh_in_every_entry(statistic):
    data = records(40)
    codes = data.codes * (RADIUS / CODE_MAX)
    groups = groups_of(data.labels, statistic.classes, CLASSES)
    own = [codes[groups == g] for g in range(statistic.classes)]
    counts, totals = [len(z) for z in own], [z.sum(0) for z in own]
    drawn = {"count": [], "sum": []}
    for _ in range(150):
        made = release(data, statistic)
        drawn["count"].append((made.counts - counts) / made.count_std)
        drawn["sum"].append((made.sums - totals) / made.sum_std)
    for name, residuals in drawn.items():
        flat = np.concatenate([np.ravel(x) for x in residuals])
        n = len(flat)
        assert len(np.unique(flat)) == n, name  # no draw is used twice
        assert abs((flat**2).sum() - n) < 6 * math.sqrt(2 * n), name
        assert abs(flat.mean()) < 6 / math.sqrt(n), name


def test_all_records_are_one_group_whose_sums_are_those_of_the_classes():
    data = records(30)
    whole, parts = sums(data, ALL), sums(data, BY_CLASS)
    assert whole.counts.tolist() == [30]
    assert parts.counts.sum() == 30
    np.testing.assert_array_equal(whole.sums[0], parts.sums.sum(axis=0))


@KINDS
def test_a_class_outside_contributes_nothing_also_where_all_are_one_group(statistic):
    data = records(6)
    inside = sums(data, statistic)
    strange = np.concatenate([data.labels, [-1, CLASSES, 99]])
    more = UnitCodes(np.concatenate([data.codes, data.codes[:3]]), strange)
    found = sums(more, statistic)
    np.testing.assert_array_equal(found.counts, inside.counts)
    np.testing.assert_array_equal(found.sums, inside.sums)


class Listed:
    """Units of one record each, in memory."""

    most = None

    def __init__(self, records):
        self.units = [[record] for record in records]

    def records(self):
        return iter(self.units)


class Floats:
    """A representation whose codes are what the test says; NaN and huge ones among them."""

    dim, radius, elementwise = DIM, RADIUS, True

    def __init__(self, codes):
        self._codes = np.asarray(codes, float)

    def encode_exact_many(self, images):
        return self._codes[images[:, 0, 0, 0]]


@KINDS
def test_records_that_are_not_finite_add_nothing_and_huge_ones_are_clipped(statistic):
    nan, inf = math.nan, math.inf
    rows = [[nan] * DIM, [inf, 0, 0, 0], [0, -inf, 0, 0], [1e300] * DIM, [0.5, 0, 0, 0]]
    given = [Record(np.full((1, DIM, 1), k, np.uint8), k % CLASSES) for k in range(len(rows))]
    data = encode_units(Listed(given), Floats(rows), CLASSES)
    found = sums(data, statistic)
    assert int(found.counts.sum()) == 2
    norm = math.sqrt(sum(int(x) ** 2 for x in found.sums.reshape(-1)))
    assert norm <= 2 * CODE_MAX
    release(data, statistic).check()


@KINDS
def test_without_records_or_with_absent_classes_the_release_is_noise_and_finite(statistic):
    made = release(records(0), statistic)
    made.check()
    assert made.counts.all()
    only = UnitCodes(records(5).codes, np.zeros(5, np.int64))
    assert release(only, statistic).counts.all()  # a class without records has noise too


numbers = st.lists(st.integers(0, 255), min_size=DIM, max_size=DIM)
some_images = st.lists(st.tuples(numbers, st.integers(-1, CLASSES)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(some_images, min_size=1, max_size=4), st.booleans())
def test_no_unit_moves_the_release_further_than_its_sensitivity(units, together):
    """One unit of several images more or less, in exact arithmetic, whatever the others are."""
    statistic = ALL if together else BY_CLASS
    listed = [image(p, y, f"u{k}") for k, unit in enumerate(units) for p, y in unit]
    whole = coded(listed, MOST)
    rest = [record for record in listed if record.unit != "u0"]
    others = coded(rest, MOST) if rest else UnitCodes(
        np.zeros((0, DIM), np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64)
    )  # fmt: skip
    big, small = sums(whole, statistic), sums(others, statistic)
    moved = [big.counts - small.counts, big.sums - small.sums, NONE]
    square = whitened_square(moved, statistic, big.bits)
    assert float(square) <= sensitivity(statistic) ** 2 * (1 + 1e-12)


def test_a_unit_across_classes_is_bounded_for_one_group_too():
    """The worst: images on one point in different classes, which `all` adds up."""
    pixels = [255, 255, 255, 255]
    unit = [image(pixels, y % CLASSES, "u") for y in range(MOST)]
    for statistic in (ALL, BY_CLASS):
        found = sums(coded(unit, MOST), statistic)
        square = whitened_square([found.counts, found.sums, NONE], statistic, found.bits)
        assert float(square) <= sensitivity(statistic) ** 2 * (1 + 1e-12)
        assert float(square) >= 0.98 * sensitivity(statistic) ** 2
    plain = exact_sums(coded(unit, MOST).codes, np.zeros(MOST, np.int64), 1)
    whole = whitened_square([plain.counts, plain.sums, NONE], ALL, 0)
    assert float(whole) > 10  # the control: without its share the unit beats the claim


def test_groups_that_are_neither_classes_nor_one_are_refused():
    with pytest.raises(PlanError, match="means of 2 groups"):
        sums(records(4), replace(BY_CLASS, classes=2))


def test_a_lock_whose_statistic_is_another_kind_of_release_is_refused():
    moments = ClassMoments(0.6, 0.64, 0.48, "class", CLASSES, DIM)
    slots = (slot(moments),)
    exact = class_sums([records(4)], slots, CLASSES)
    with pytest.raises(PlanError, match="second moments"):
        add_noise(exact, blocks_of(slots, RADIUS), "public", RADIUS, NoiseSource())
    slots = (slot(BY_CLASS),)
    exact = class_sums([records(4)], slots, CLASSES)
    for covariance in ("class", "shared"):
        with pytest.raises(PlanError, match="second moments"):
            add_noise(exact, blocks_of(slots, RADIUS), covariance, RADIUS, NoiseSource())


@KINDS
def test_the_file_comes_back_and_a_damaged_one_is_refused(statistic, tmp_path):
    made = release(records(9), statistic)
    save_moments(tmp_path / "moments.safetensors", made)
    back = load_moments(tmp_path / "moments.safetensors")
    np.testing.assert_array_equal(back.sums, made.sums)
    assert (back.covariance, back.seconds.shape) == ("public", (0, DIM, DIM))
    for wrong in (
        replace(made, second_std=1.0),
        replace(made, covariance="shared"),
        replace(made, covariance="class"),
        replace(made, seconds=np.zeros((1, DIM, DIM))),
    ):
        with pytest.raises(UsageError):
            wrong.check()


def test_an_unsafe_seed_repeats_the_release_and_the_system_never_does():
    data = records(9)
    first, again = (release(data, ALL, noise=NoiseSource.unsafe(4)) for _ in range(2))
    np.testing.assert_array_equal(first.sums, again.sums)
    assert not np.array_equal(release(data, ALL).sums, release(data, ALL).sums)
