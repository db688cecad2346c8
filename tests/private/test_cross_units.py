"""Units of several images in a caption release: a whole unit keeps to one image's sensitivity."""

import math
from fractions import Fraction

import numpy as np
import pytest
from crosskit import (
    DIM,
    FEATURES,
    JOINT,
    RADIUS,
    SPACE,
    chunk,
    paper,
    parts_of,
    some_features,
    sums,
    tight,
    whitened_square,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.statistics import sensitivity
from dpsynth.errors import PlanError
from dpsynth.private import shares as shares_module
from dpsynth.private.cross import add_cross_noise, quantise_features
from dpsynth.private.lattice import CODE_MAX, SHARE_BITS, SHARE_MAX
from dpsynth.private.noise import NoiseSource
from dpsynth.private.shares import norm_squares, unit_shares, weights_of

KINDS = ("any", "identical", "opposite", "turned", "missing")
BOUND = Fraction(sensitivity(JOINT)) ** 2 * (1 + Fraction(1, 10**15))


def some_unit(rng, kind, size):
    codes = rng.normal(size=(size, DIM)) * 10.0 ** rng.uniform(-1, 2)
    features = some_features(rng, size, wild=kind == "missing")
    if kind in ("identical", "opposite"):
        codes[:], features[:] = codes[0], features[0]
    if kind == "opposite":  # the cross block cancels, the others do not
        codes[::2] *= -1
    if kind == "turned":
        codes, features = np.resize(np.eye(DIM), (size, DIM)) * RADIUS, features * 1e3
    return codes, features


def exact(units):
    codes = np.concatenate([np.zeros((0, DIM)), *(u[0] for u in units)])
    features = np.concatenate([np.zeros((0, FEATURES)), *(u[1] for u in units)])
    return sums(codes, features, sizes=[len(u[0]) for u in units])


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), size=st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_no_unit_beats_the_sensitivity(seed, kind, size):
    rng = np.random.default_rng(seed)
    others = [some_unit(rng, rng.choice(KINDS), int(rng.integers(1, 5))) for _ in range(3)]
    unit = some_unit(rng, kind, size)
    before, after, alone = exact(others), exact([*others, unit]), exact([unit])
    change = [b - a for a, b in zip(parts_of(before), parts_of(after), strict=True)]
    for mine, expected in zip(change, parts_of(alone), strict=True):
        assert (mine == expected).all()
    assert whitened_square(change, bits=SHARE_BITS) <= BOUND


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), size=st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_a_share_is_the_largest_that_fits(seed, kind, size):
    """Against exact fractions: never above what the norm allows, and below it by rounding alone."""
    rng = np.random.default_rng(seed)
    codes, features = some_unit(rng, kind, size)
    whole, finite = quantise_features(features, SPACE)
    rows = np.concatenate([chunk(codes).codes, whole], axis=1)
    groups = np.where(finite, 0, -1)
    weights = weights_of(JOINT)
    share = int(unit_shares(rows, groups, np.array([size]), weights)[0])
    mine = rows[finite].astype(object)
    seconds = (mine.T @ mine).reshape(DIM + FEATURES, -1)
    blocks = seconds[DIM:, DIM:], seconds[:DIM, DIM:], seconds[:DIM, :DIM]
    square = whitened_square(blocks) if len(mine) else Fraction(0)
    assert square * share**2 <= BOUND * SHARE_MAX**2
    if share < SHARE_MAX:
        assert square * (share + 1) ** 2 * (1 + Fraction(1, 10**9)) > SHARE_MAX**2
    found = norm_squares(rows[None], groups[None], weights)[0]
    assert math.isclose(found, square, rel_tol=2.0**-45, abs_tol=2.0**-60)


def test_large_units_of_the_longest_rows_stay_exact():
    """1024 images on both balls' borders, alike and against each other."""
    for signs in (np.ones(1024, np.int64), np.resize([1, -1], 1024)):
        rows = np.zeros((1024, DIM + FEATURES), np.int64)
        rows[:, 0], rows[:, DIM] = signs * CODE_MAX, CODE_MAX
        found = norm_squares(rows[None], np.zeros((1, 1024), np.int64), weights_of(JOINT))[0]
        total = int(signs.sum())
        expected = 1024**2 * (JOINT.caption**2 + JOINT.second**2) + JOINT.cross**2 * total**2
        assert found == pytest.approx(expected, rel=1e-14)


def test_units_of_one_image_add_what_records_add_in_any_blocks(monkeypatch):
    rng = np.random.default_rng(3)
    codes, features = some_unit(rng, "missing", 50)
    plain, units = sums(codes, features), sums(codes, features, sizes=[1] * 50)
    assert (units.seconds == plain.seconds * SHARE_MAX).all()
    sizes = [5] * 10
    whole = sums(codes, features, sizes=sizes)
    monkeypatch.setattr(shares_module, "_BLOCK", 1)
    assert (sums(codes, features, sizes=sizes).seconds == whole.seconds).all()


def test_noise_on_units_is_the_noise_of_the_slot():
    one = add_cross_noise(sums([], [], sizes=[]), tight(), SPACE, NoiseSource())
    other = add_cross_noise(sums([], []), tight(), SPACE, NoiseSource())
    for name in ("ff_std", "zf_std", "zz_std"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-8)


def test_the_papers_constants_are_refused_for_units():
    with pytest.raises(PlanError, match="bounds one record alone"):
        sums(np.zeros((2, DIM)), np.zeros((2, FEATURES)), slots=paper(), sizes=[2])
