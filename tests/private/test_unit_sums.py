"""Whole units added and removed: no unit moves a round further than it says, in any round."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unitkit import (
    CLASSES,
    DIM,
    RADIUS,
    Pixels,
    blocks_of,
    coded,
    exact_sums,
    image,
    named_units,
    whitened_square,
)

from dpsynth.accounting.statistics import (
    CellMoments,
    CellSums,
    ClassMoments,
    PaperClassSums,
    sensitivity,
)
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.private import shares as shares_module
from dpsynth.private.blocks import blocks_of as scales_of
from dpsynth.private.cells import assign, cell_sums, frame_of, residuals
from dpsynth.private.encoding import UnitCodes, encoded
from dpsynth.private.lattice import (
    CODE_MAX,
    SHARE_BITS,
    SHARE_MAX,
    ExactSums,
    quantise,
)
from dpsynth.private.moments import add_noise, class_sums
from dpsynth.private.noise import NoiseSource
from dpsynth.private.shares import norm_squares, unit_shares, weights_of

MOST, CELLS = 4, 3
A, B, C = math.sqrt(0.05), math.sqrt(0.55), math.sqrt(0.4)
CLASS = ClassMoments(A, B, C, "class", CLASSES, DIM)
SHARED = replace(CLASS, covariance="shared")
LLOYD = CellSums(0.6, 0.8, CLASSES, CELLS, DIM)
LAST = CellMoments(math.sqrt(0.03), math.sqrt(0.27), math.sqrt(0.7), CLASSES, CELLS, DIM)
ROUNDS = {"class": CLASS, "shared": SHARED, "lloyd": LLOYD, "last": LAST}


def slot(statistic, std=3.0):
    return Slot(1, "moments", "moments", statistic, std)


def some_frame(seed=0, radius=1.0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, CELLS, DIM))
    used = np.arange(CELLS) < rng.integers(1, CELLS + 1, CLASSES)[:, None]
    return frame_of(centres * used[..., None], used, radius=radius, clip=RADIUS)


FRAME = some_frame()


def grouped_rows(data, statistic):
    """Vectors and groups whose moments the round sums."""
    if isinstance(statistic, ClassMoments):
        return data.codes, data.labels, CLASSES
    cells = assign(data.codes, data.labels, FRAME)
    return residuals(data.codes, cells, FRAME), cells, CLASSES * CELLS


def ours(records, statistic):
    """The exact sums of a round, as the mechanism makes them of the records in a source."""
    data = coded(records, MOST)
    if isinstance(statistic, ClassMoments):
        return class_sums([data], (slot(statistic),), CLASSES)
    return cell_sums([data], FRAME, statistic, second=True)


def each_image_alone(records, statistic):
    """Wrong: every image keeps to the sensitivity, and a unit adds all of its images."""
    rows, groups, many = grouped_rows(coded(records, MOST), statistic)
    return exact_sums(rows, groups, many, shares=np.full(len(rows), SHARE_MAX))


def average_by_group(records, statistic):
    """Wrong: averages inside each class or cell, and no bound on the unit as a whole."""
    data = coded(records, MOST)
    rows, groups, many = grouped_rows(data, statistic)
    owners = np.repeat(np.arange(data.units), data.sizes)
    _, place, count = np.unique(owners * many + groups, return_inverse=True, return_counts=True)
    return exact_sums(rows, groups, many, shares=SHARE_MAX // count[place])


def first_in_file_order(records, statistic):
    """Wrong: of a large unit the images that come first in the file."""
    taken: dict[str, int] = {}
    kept = []
    for record in records:
        taken[record.unit] = taken.get(record.unit, 0) + 1
        if taken[record.unit] <= MOST:
            kept.append(record)
    return ours(kept, statistic)


def clipped_with_the_crowd(records, statistic):
    """Wrong: one factor for all units, from the largest of them."""
    data = coded(records, MOST)
    rows, groups, many = grouped_rows(data, statistic)
    if not len(rows):
        return exact_sums(rows, groups, many, shares=np.zeros(0, np.int64))
    k = unit_shares(rows, groups, data.sizes, weights_of(statistic)).min()
    return exact_sums(rows, groups, many, shares=np.full(len(rows), k))


def check_unit(sums_of, statistic, records, unit, rng):
    """Assert that a whole unit moves the exact sums as docs/maths/units.md (U5) says."""
    before = blocks_of(sums_of(records, statistic), statistic)
    whole = [*records, *unit]
    found = sums_of([whole[i] for i in rng.permutation(len(whole))], statistic)
    after = blocks_of(found, statistic)
    again = blocks_of(
        sums_of([whole[i] for i in rng.permutation(len(whole))], statistic), statistic
    )
    for first, second in zip(after, again, strict=True):
        assert (first == second).all(), "the sums hang on the order"
    moved = [b - a for a, b in zip(before, after, strict=True)]
    alone = blocks_of(sums_of(unit, statistic), statistic)
    for mine, expected in zip(moved, alone, strict=True):
        assert (mine == expected).all(), "a unit's contribution hangs on the others"
    bound = Fraction(sensitivity(statistic)) ** 2 * (1 + Fraction(1, 10**15))
    square = whitened_square(moved, statistic, found.bits)
    assert square <= bound, "one unit moves the sums too far"
    return float(square)


KINDS = ("any", "identical", "opposite", "classes", "many", "extreme", "one")


def some_unit(rng, kind, name="added"):
    """A unit that could be a worse neighbour than one of a single image."""
    size = 1 if kind == "one" else int(rng.integers(2, 3 * MOST))
    base = rng.integers(0, 256, DIM)
    pixels = rng.integers(0, 256, (size, DIM))
    labels = rng.integers(0, CLASSES, size)
    if kind == "identical":
        pixels, labels = np.tile(base, (size, 1)), np.full(size, labels[0])
    if kind == "opposite":
        pixels = np.where(np.arange(size)[:, None] % 2, base, np.minimum(256 - base, 255))
    if kind == "classes":
        pixels, labels = np.tile(base, (size, 1)), np.arange(size) % CLASSES
    if kind == "many":
        pixels = rng.integers(0, 256, (40, DIM))
        labels = rng.integers(0, CLASSES, 40)
    if kind == "extreme":
        pixels = np.where(rng.random((size, DIM)) < 0.5, 0, 255)
    return [image(p, y, name) for p, y in zip(pixels, labels, strict=True)]


def some_records(rng, units=6):
    found = [r for u in range(units) for r in some_unit(rng, rng.choice(KINDS), f"u{u}")]
    return [found[i] for i in rng.permutation(len(found))]


@pytest.mark.parametrize("name", ROUNDS)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), twin=st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_unit_beats_the_sensitivity_of_a_round(name, seed, kind, twin):
    rng = np.random.default_rng(seed)
    unit, records = some_unit(rng, kind), some_records(rng, int(rng.integers(0, 5)))
    if twin:  # another unit with the very same images
        records += [replace(record, unit="twin") for record in unit]
    check_unit(ours, ROUNDS[name], records, unit, rng)


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (each_image_alone, "too far"),
        (average_by_group, "too far"),
        (first_in_file_order, "hang on the order"),
        (clipped_with_the_crowd, "hangs on the others"),
    ],
)
def test_the_checker_catches_a_wrong_mechanism(name, wrong, why):
    caught = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        records, unit = some_records(rng), some_unit(rng, KINDS[seed % len(KINDS)])
        try:
            check_unit(wrong, ROUNDS[name], records, unit, rng)
        except AssertionError as error:
            caught.append(str(error))
    assert any(why in text for text in caught)


@pytest.mark.parametrize("name", ROUNDS)
def test_climbing_finds_no_worse_unit(name):
    """Random-restart ascent on a unit's whitened move, over its pixels, labels and size."""
    statistic, rng, worst = ROUNDS[name], np.random.default_rng(1), 0.0
    for trial in range(6):
        unit = some_unit(rng, KINDS[trial % len(KINDS)])[:MOST]
        best = 0.0
        for _ in range(25):
            nearby = [
                image(
                    np.clip(r.image.reshape(-1) + rng.integers(-40, 41, DIM), 0, 255),
                    rng.integers(0, CLASSES) if rng.random() < 0.2 else r.label,
                    r.unit,
                )
                for r in unit
            ]
            value = check_unit(ours, statistic, [], nearby, rng)
            if value >= best:
                unit, best = nearby, value
        worst = max(worst, best)
    bound = sensitivity(statistic) ** 2
    assert 0.99 * bound < worst <= bound * (1 + 1e-15)


@given(seed=st.integers(0, 10**6), size=st.integers(2, 9), scale=st.floats(-3, 1))
@settings(max_examples=80, deadline=None)
def test_a_share_is_the_largest_that_fits(seed, size, scale):
    """Against exact fractions: never above what the norm allows, and below it by rounding alone."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(size, DIM)) * 10**scale
    codes = np.array([quantise(row, 1.0) for row in raw], dtype=np.int64)
    groups = rng.integers(-1, CLASSES, size)
    for statistic in (CLASS, SHARED, LLOYD):
        weights = weights_of(statistic)
        share = int(unit_shares(codes, groups, np.array([size]), weights)[0])
        whole = exact_sums(codes, groups, CLASSES)
        square = whitened_square(blocks_of(whole, statistic), statistic, 0)
        limit = sum(Fraction(w) ** 2 for w in (weights.count, weights.sum, weights.second))
        assert square * share**2 <= limit * SHARE_MAX**2 * (1 + Fraction(1, 10**15))
        if share < SHARE_MAX:
            assert square * (share + 1) ** 2 * (1 + Fraction(1, 10**9)) > limit * SHARE_MAX**2
        found = norm_squares(codes[None], groups[None], weights)[0]
        assert math.isclose(found, square, rel_tol=2.0**-45, abs_tol=2.0**-45)


def test_large_units_of_the_longest_codes_stay_exact():
    """1024 images on the ball's border, and against each other: the sums reach their bounds."""
    for signs in (np.ones(1024, np.int64), np.resize([1, -1], 1024)):
        codes = np.zeros((1024, DIM), np.int64)
        codes[:, 0] = signs * CODE_MAX
        groups = np.zeros(1024, np.int64)
        found = norm_squares(codes[None], groups[None], weights_of(CLASS))[0]
        total = int(signs.sum())
        expected = A**2 * 1024**2 + B**2 * total**2 + C**2 * 1024**2
        assert found == pytest.approx(expected, rel=1e-14)
        share = int(unit_shares(codes, groups, np.array([1024]), weights_of(CLASS))[0])
        assert share == math.floor(SHARE_MAX / math.sqrt(expected) * (1 - 2.0**-40))


@pytest.mark.parametrize("name", ROUNDS)
def test_units_of_one_image_add_what_records_add(name):
    """Bit for bit the integers of a plan whose unit is a record, in steps of 2^-16."""
    rng, statistic = np.random.default_rng(3), ROUNDS[name]
    pixels = rng.choice([0, 255, 128, 40], (60, DIM))
    records = [image(p, rng.integers(0, CLASSES), f"u{i}") for i, p in enumerate(pixels)]
    rows, groups, many = grouped_rows(coded(records, MOST), statistic)
    plain = blocks_of(exact_sums(rows, groups, many), statistic)
    for mine, expected in zip(blocks_of(ours(records, statistic), statistic), plain, strict=True):
        assert (mine == expected * SHARE_MAX).all()


@pytest.mark.parametrize("name", ROUNDS)
def test_neither_batching_nor_sharding_moves_a_bit(name, monkeypatch):
    rng, statistic = np.random.default_rng(5), ROUNDS[name]
    records = some_records(rng, 30)
    whole = ours(records, statistic)
    parts = list(encoded(named_units(records, MOST), Pixels(), CLASSES, rows=5))
    assert len(parts) > 5

    def summed(data):
        if isinstance(statistic, ClassMoments):
            return class_sums([data], (slot(statistic),), CLASSES)
        return cell_sums([data], FRAME, statistic, second=True)

    shards = [summed(part) for part in parts]
    backwards = shards[-1]
    for one in shards[-2::-1]:
        backwards += one
    monkeypatch.setattr(shares_module, "_BLOCK", 1)
    for other in (backwards, ours(records, statistic)):
        assert other.bits == whole.bits == SHARE_BITS
        for block in ("counts", "sums", "seconds"):
            assert (getattr(other, block) == getattr(whole, block)).all()


def test_shared_sums_agree_with_python_integers_in_any_batches():
    rng = np.random.default_rng(0)
    codes = np.array([quantise(row, 1.0) for row in rng.normal(size=(50, DIM))])
    labels, k = rng.integers(-1, CLASSES, 50), rng.integers(0, SHARE_MAX + 1, 50)
    k[::5] = SHARE_MAX
    for rows in (1, 7, 4096):
        found = exact_sums(codes, labels, CLASSES, rows, shares=k)
        for y in range(CLASSES):
            mine = [(int(s), [int(x) for x in q]) for s, q in zip(k, codes, strict=True)]
            mine = [pair for pair, label in zip(mine, labels, strict=True) if label == y]
            assert found.counts[y] == sum(s for s, _ in mine)
            for i in range(DIM):
                assert found.sums[y, i] == sum(s * q[i] for s, q in mine)
                for j in range(DIM):
                    assert found.seconds[y, i, j] == sum(s * q[i] * q[j] for s, q in mine)


def test_shares_of_full_batches_of_the_longest_codes_stay_exact():
    rows = 2**12 + 3
    codes = np.zeros((rows, 2), np.int64)
    codes[:, 0] = CODE_MAX
    k = np.full(rows, SHARE_MAX - 1)
    found = exact_sums(codes, np.zeros(rows, np.int64), 1, shares=k)
    assert found.seconds[0, 0, 0] == rows * (SHARE_MAX - 1) * CODE_MAX**2
    assert found.sums[0, 0] == rows * (SHARE_MAX - 1) * CODE_MAX


def test_the_concatenation_loses_less_than_an_average():
    """docs/maths/units.md, U8: images in m classes count 1 / sqrt(m) each, not 1 / m."""
    spread = [image([255, 128, 128, 128], y, "u") for y in range(CLASSES)]
    alike = [image([255, 128, 128, 128], 0, "u") for y in range(CLASSES)]
    apart, together = (ours(unit, CLASS).counts.sum() / SHARE_MAX for unit in (spread, alike))
    assert apart == pytest.approx(math.sqrt(CLASSES), rel=1e-4)
    assert together == pytest.approx(1, rel=1e-4)


def test_noise_on_units_is_the_noise_of_the_slot():
    """Finer steps change what a whole number means, not the noise in real units."""
    scales = scales_of([slot(CLASS)], RADIUS)
    empty = ours([], CLASS)
    made = [
        add_noise(sums, scales, "class", RADIUS, NoiseSource())
        for sums in (empty, exact_sums(np.zeros((0, DIM), np.int64), np.zeros(0), CLASSES))
    ]
    for name in ("count_std", "sum_std", "second_std"):
        first, second = (getattr(one, name) for one in made)
        assert first == pytest.approx(second, rel=1e-8)
        assert first > 0
    many = [add_noise(empty, scales, "class", RADIUS, NoiseSource()).counts for _ in range(200)]
    drawn = np.concatenate(many) / made[0].count_std
    assert abs((drawn**2).sum() - len(drawn)) < 6 * math.sqrt(2 * len(drawn))


def test_sums_and_scales_in_other_steps_are_refused():
    scales = scales_of([slot(CLASS)], RADIUS)
    empty = ours([], CLASS)
    with pytest.raises(UsageError, match="steps of"):
        scales.release(empty, NoiseSource())
    plain = ExactSums(empty.counts, empty.sums, empty.seconds)
    with pytest.raises(UsageError, match="do not add up"):
        empty + plain


def test_a_statistic_of_records_is_refused_for_units():
    data = UnitCodes(np.zeros((2, DIM), np.int64), np.zeros(2, np.int64), np.array([2]))
    paper = Slot(1, "moments", "moments-sums", PaperClassSums(CLASSES, DIM), 2.0)
    with pytest.raises(PlanError, match="bounds one record alone"):
        class_sums([data], (paper,), CLASSES)
