"""Quantised codes and exact sums: no neighbour moves the statistic further than it says."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from unitkit import exact_sums

from dpsynth.accounting.statistics import (
    ClassMoments,
    PaperClassSums,
    PaperSecondMoment,
    sensitivity,
)
from dpsynth.errors import PlanError
from dpsynth.planning.workload import GRID_SCALE
from dpsynth.private.lattice import CODE_MAX, SCALE_BITS, Block, quantise
from dpsynth.private.noise import MAX_SCALE, NoiseSource

DIM, CLASSES = 4, 3
finite = st.floats(allow_nan=False, allow_infinity=False)
anything = st.floats(allow_nan=True, allow_infinity=True)
radii = st.floats(1e-3, 1e3)


def tight(covariance="class"):
    a, b, c = math.sqrt(0.05), math.sqrt(0.55), math.sqrt(0.4)
    return ClassMoments(a, b, c, covariance, CLASSES, DIM)


def contribution(code, label, radius, covariance):
    """Exact integer blocks that one record adds: counts, sums, seconds."""
    whole = quantise(np.asarray(code, dtype=float), radius)
    rows = np.zeros((0, DIM), np.int64) if whole is None else whole[None]
    labels = np.full(len(rows), label)
    found = exact_sums(rows, labels, CLASSES)
    seconds = found.seconds if covariance == "class" else found.seconds.sum(0, keepdims=True)
    return found.counts, found.sums, seconds


def whitened_square(parts, weights):
    """Squared whitened L2 norm as an exact integer sum by block, then weighted."""
    counts, sums, seconds = (sum(int(x) ** 2 for x in p.reshape(-1)) for p in parts)
    a, b, c = weights
    return a * a * counts + b * b * sums / CODE_MAX**2 + c * c * seconds / CODE_MAX**4


@given(hnp.arrays(float, DIM, elements=anything), radii, st.integers(0, CLASSES - 1))
@settings(max_examples=300, deadline=None)
def test_no_record_beats_the_tight_sensitivity(code, radius, label):
    for covariance in ("class", "shared"):
        statistic = tight(covariance)
        weights = (statistic.count, statistic.sum, statistic.second)
        parts = contribution(code, label, radius, covariance)
        assert whitened_square(parts, weights) <= sensitivity(statistic) ** 2 * (1 + 1e-15)


@given(hnp.arrays(float, DIM, elements=anything), radii, st.integers(1, 10**6))
@settings(max_examples=200, deadline=None)
def test_no_record_beats_the_paper_constants(code, radius, capacity):
    counts, sums, seconds = contribution(code, 1, radius, "shared")
    one = whitened_square((counts, sums, np.zeros(1, int)), (1.0, 0.5, 0.0))
    assert one <= sensitivity(PaperClassSums(CLASSES, DIM)) ** 2
    two = whitened_square((np.zeros(1, int), np.zeros(1, int), seconds), (0.0, 0.0, 1 / capacity))
    assert two <= sensitivity(PaperSecondMoment(capacity, DIM)) ** 2


def test_the_tight_sensitivity_is_attained():
    """So that a looser claim would be noticed as well as a bolder one."""
    parts = contribution([3.0, 0, 0, 0], 2, 3.0, "class")
    statistic = tight()
    assert whitened_square(parts, (statistic.count, statistic.sum, statistic.second)) == (
        pytest.approx(1.0, abs=1e-12)
    )


def test_climbing_finds_no_worse_neighbour():
    """Random-restart ascent on the whitened norm, over directions, lengths and roundings."""
    rng = np.random.default_rng(0)
    statistic = tight()
    weights = (statistic.count, statistic.sum, statistic.second)
    worst = 0.0
    for _ in range(20):
        code = rng.normal(size=DIM) * 10 ** rng.uniform(-3, 6)
        best = whitened_square(contribution(code, 0, 1.7, "class"), weights)
        for _ in range(40):
            nearby = code * (1 + rng.normal(size=DIM) * 10 ** rng.uniform(-16, 0))
            value = whitened_square(contribution(nearby, 0, 1.7, "class"), weights)
            if value >= best:
                code, best = nearby, value
        worst = max(worst, best)
    assert worst <= 1 + 1e-15
    assert worst > 0.99


@given(hnp.arrays(float, st.integers(1, 40), elements=finite), radii)
@settings(max_examples=300, deadline=None)
def test_quantised_codes_stay_in_the_ball_and_near_the_code(code, radius):
    whole = quantise(code, radius)
    assert whole is not None
    assert int(whole @ whole) <= CODE_MAX**2
    if np.linalg.norm(code) <= radius:
        step = radius / CODE_MAX
        assert np.abs(whole * step - code).max() <= step * (1 + 1e-6)
        assert (np.abs(whole * step) <= np.abs(code) * (1 + 1e-6) + 1e-300).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_code_that_is_not_finite_contributes_nothing(bad):
    assert quantise(np.array([0.1, bad, 0.0]), 1.0) is None


def test_an_all_black_code_is_an_ordinary_record():
    whole = quantise(np.zeros(5), 1.0)
    assert whole is not None
    assert not whole.any()


def test_codes_exactly_on_the_ball():
    for dim in (1, 2, 3, 7, 48):
        whole = quantise(np.full(dim, 1 / math.sqrt(dim)), 1.0)
        assert int(whole @ whole) <= CODE_MAX**2


def _random_codes(n, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.stack([quantise(row, 1.0) for row in rng.normal(size=(n, DIM))])
    return codes, rng.integers(0, CLASSES, n)


def test_sums_are_bitwise_the_same_in_any_order_and_batching():
    codes, labels = _random_codes(300)
    whole = exact_sums(codes, labels, CLASSES)
    order = np.random.default_rng(1).permutation(300)
    for other in (
        exact_sums(codes[order], labels[order], CLASSES),
        exact_sums(codes, labels, CLASSES, rows=1),
        exact_sums(codes[order], labels[order], CLASSES, rows=7),
    ):
        assert (whole.counts == other.counts).all()
        assert (whole.sums == other.sums).all()
        assert (whole.seconds == other.seconds).all()


def test_sums_agree_with_python_integers():
    codes, labels = _random_codes(40)
    found = exact_sums(codes, labels, CLASSES)
    for y in range(CLASSES):
        mine = [[int(x) for x in row] for row in codes[labels == y]]
        assert found.counts[y] == len(mine)
        for i in range(DIM):
            assert found.sums[y, i] == sum(row[i] for row in mine)
            for j in range(DIM):
                assert found.seconds[y, i, j] == sum(row[i] * row[j] for row in mine)


def test_a_record_touches_its_own_class_alone():
    codes, labels = _random_codes(50)
    before = exact_sums(codes, labels, CLASSES)
    extra = quantise(np.array([9.0, -9, 9, 9]), 1.0)
    after = exact_sums(np.vstack([codes, extra]), np.append(labels, 2), CLASSES)
    assert after.counts[2] - before.counts[2] == 1
    assert (after.seconds[2] - before.seconds[2] == np.outer(extra, extra)).all()
    for block in ("counts", "sums", "seconds"):
        assert (getattr(after, block)[:2] == getattr(before, block)[:2]).all()


def test_sums_stay_exact_past_the_range_of_floats():
    """Blocks of rows are added as Python ints: no capacity is too large."""
    row = np.array([[CODE_MAX, 0, 0, 0]])
    found = exact_sums(row, np.array([0]), CLASSES)
    many = found.seconds[0, 0, 0] * 2**40 + 1  # Python ints, not int64
    assert many == 2**72 + 1


@pytest.mark.parametrize("std", [1e-6, 0.3, 1.0, 12.5, 2.0**20 - 2.0**-33, 2.0**30, 7e13])
def test_noise_scales_are_fine_enough_and_rounded_up(std):
    block = Block(unit=0.37, std=std)
    block.check()
    assert GRID_SCALE == 2**SCALE_BITS
    assert GRID_SCALE <= block.scale <= MAX_SCALE
    assert block.scale >= std * 2**block.refine
    assert block.real_std == pytest.approx(std * 0.37, rel=1e-8)


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan"), float("inf"), 2.0**58])
def test_noise_out_of_range_is_refused(std):
    with pytest.raises(PlanError):
        Block(1.0, std).check()


def test_the_noise_of_a_block_has_the_declared_variance():
    block = Block(unit=0.5, std=3.0)
    exact = np.full(5000, 1000, dtype=object)
    released = block.release(exact, NoiseSource())
    residual = (released - 500.0) / block.real_std
    assert abs(residual.mean()) < 6 / math.sqrt(5000)
    assert abs((residual**2).sum() - 5000) < 6 * math.sqrt(2 * 5000)


def test_low_bits_of_a_release_carry_no_sum():
    """Released numbers lie on the noise's own grid, whatever the exact sums are."""
    block = Block(unit=1.0, std=3.0)
    for value in (0, 12345):
        released = block.release(np.array([value] * 20, dtype=object), NoiseSource())
        assert (released * 2**block.refine == np.rint(released * 2**block.refine)).all()
