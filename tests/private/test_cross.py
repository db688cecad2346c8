"""The caption release: no record moves it too far, whatever its caption; noise is noise."""

import math
from fractions import Fraction

import numpy as np
import pytest
from crosskit import (
    CAPACITY,
    DIM,
    FEATURES,
    JOINT,
    LONGEST,
    PLAIN,
    RADIUS,
    SPACE,
    SPACES,
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

from dpsynth.accounting.statistics import (
    ClassMoments,
    ClippedGradientSum,
    CrossMoments,
    PaperCrossMoments,
    sensitivity,
)
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.cross import (
    CONSTANT,
    Space,
    add_cross_noise,
    cross_blocks,
    cross_sums,
    is_cross,
    quantise_features,
)
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX
from dpsynth.private.noise import NoiseSource

BOUND = Fraction(sensitivity(JOINT)) ** 2 * (1 + Fraction(1, 10**15))


def some_codes(rng, n):
    return rng.normal(size=(n, DIM)) * 10.0 ** rng.uniform(-2, 2, (n, 1))


def contribution(code, feature, space):
    """What one record adds, alone."""
    return parts_of(sums([code], [feature], space))


def moved(before, after):
    return [b - a for a, b in zip(parts_of(before), parts_of(after), strict=True)]


def check_record(sums_of, codes, features, space):
    """Assert that the last record moves the exact sums by its own bounded contribution alone."""
    change = moved(sums_of(codes[:-1], features[:-1], space), sums_of(codes, features, space))
    square = whitened_square(change)
    assert square <= BOUND, "one record moves the sums too far"
    alone = parts_of(sums_of(codes[-1:], features[-1:], space))
    for mine, expected in zip(change, alone, strict=True):
        assert (mine == expected).all(), "a record's contribution hangs on the others"
    return float(square)


@pytest.mark.parametrize("name", SPACES)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_no_record_beats_the_sensitivity(name, seed, n):
    rng = np.random.default_rng(seed)
    check_record(sums, some_codes(rng, n), some_features(rng, n), SPACES[name])


@pytest.mark.parametrize("name", SPACES)
def test_the_longest_record_reaches_the_sensitivity(name):
    """Proposition B.10 with one joint bound is tight: X2."""
    rng, worst = np.random.default_rng(1), 0.0
    for _ in range(60):
        code, feature = some_codes(rng, 1) * 1e3, some_features(rng, 1, wild=False) * 1e3
        worst = max(worst, check_record(sums, code, feature, SPACES[name]))
    axes = check_record(sums, np.eye(DIM)[:1] * RADIUS, np.eye(FEATURES)[1:2] * 1e9, SPACES[name])
    assert max(worst, axes) > 0.9998
    assert max(worst, axes) <= 1


def unclipped(codes, features, space):
    """Wrong: features in their own length."""
    wide = Space(space.dim, space.features, space.radius, 1e3 * LONGEST, space.constant)
    made = sums(codes, features, wide)
    made.seconds[0][DIM:, DIM:] *= 10**6
    return made


def with_the_crowd(codes, features, space):
    """Wrong: features divided by the longest of all."""
    finite = np.nan_to_num(features, nan=0.0, posinf=1.0, neginf=-1.0)
    longest = max(np.abs(finite).max(initial=0.0), 1e-300)
    return sums(codes, finite / longest, space)


def constant_beside(codes, features, space):
    """Wrong: a constant of its own beside features of the full radius."""
    plain = sums(codes, features, Space(DIM, FEATURES, RADIUS, LONGEST, constant=False))
    plain.seconds[0][DIM, DIM] += len(codes) * CODE_MAX**2
    return plain


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (unclipped, "too far"),
        (with_the_crowd, "hangs on the others"),
        (constant_beside, "too far"),
    ],
)
def test_the_checker_catches_a_wrong_mechanism(wrong, why):
    caught = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        features = some_features(rng, 5, wild=False)
        try:
            check_record(wrong, some_codes(rng, 5), features, SPACE)
        except AssertionError as error:
            caught.append(str(error))
    assert any(why in text for text in caught)


@given(seed=st.integers(0, 10**6), n=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_whole_features_keep_to_the_ball_and_to_one_constant(seed, n):
    rng = np.random.default_rng(seed)
    features = some_features(rng, n)
    for space in SPACES.values():
        whole, finite = quantise_features(features, space)
        assert (np.square(whole.astype(object)).sum(axis=1) <= CODE_MAX**2).all()
        first = int(space.constant)
        assert (finite == np.isfinite(features[:, first:]).all(axis=1)).all()
        assert (whole[~finite, first:] == 0).all()
        if space.constant:
            assert (whole[:, 0] == CONSTANT).all()
        alone = [quantise_features(row[None], space)[0][0] for row in features]
        np.testing.assert_array_equal(whole, np.array(alone).reshape(whole.shape))


def test_features_inside_their_ball_are_kept_to_the_grid_and_longer_ones_keep_their_direction():
    short = 2 * LONGEST / math.sqrt(5)
    inside, outside = np.array([9.0, 0.6 * short, -0.8 * short]), np.array([0.0, 3e5, -4e5])
    whole, _ = quantise_features(np.array([inside, outside]), SPACE)
    step = LONGEST / CODE_MAX
    np.testing.assert_allclose(whole[0, 1:] * step, inside[1:], atol=1.01 * step)
    np.testing.assert_allclose(whole[1, 1:] * step, [0.6 * short, -0.8 * short], atol=3 * step)
    assert SPACE.real_constant == pytest.approx(short / 2, rel=1e-4)


def test_a_record_without_features_contributes_nothing_not_even_to_the_count():
    codes, features = np.ones((3, DIM)), np.zeros((3, FEATURES))
    features[1, 2] = np.nan
    with_it = parts_of(sums(codes, features))
    without = parts_of(sums(codes[[0, 2]], features[[0, 2]]))
    for mine, expected in zip(with_it, without, strict=True):
        assert (mine == expected).all()


def test_the_sums_are_python_integers_in_any_order_batches_and_shards():
    rng = np.random.default_rng(2)
    codes, features = some_codes(rng, 41), some_features(rng, 41)
    whole = sums(codes, features)
    rows = np.concatenate(
        [chunk(codes).codes.astype(object), quantise_features(features, SPACE)[0].astype(object)], 1
    )[np.isfinite(features[:, 1:]).all(axis=1)]
    assert (whole.seconds[0] == rows.T @ rows).all()
    order = rng.permutation(41)
    shuffled = sums(codes[order], features[order])
    batches = cross_sums(
        [chunk(codes[at : at + 7]) for at in range(0, 41, 7)],
        _in_turn([features[at : at + 7] for at in range(0, 41, 7)]),
        SPACE,
        tight(),
    )
    shards = sums(codes[::2], features[::2]) + sums(codes[1::2], features[1::2])
    for other in (shuffled, batches, shards):
        assert (other.seconds == whole.seconds).all()
        assert (other.sums == whole.sums).all()


def _in_turn(tables):
    left = iter(tables)
    return lambda _: next(left)


@pytest.mark.parametrize("slots", [tight(), paper()], ids=["tight", "paper"])
def test_noise_has_the_declared_variance_in_every_block_and_is_fresh(slots):
    rng = np.random.default_rng(3)
    codes, features = rng.normal(size=(30, DIM)) / 2, rng.normal(size=(30, FEATURES)) / 4
    space = SPACE if slots == tight() else PLAIN
    exact = sums(codes, features, space, slots)
    units = (LONGEST**2, RADIUS * LONGEST, RADIUS**2)
    truth = [
        part.astype(float) * unit / CODE_MAX**2
        for part, unit in zip(parts_of(exact), units, strict=True)
    ]
    drawn = {name: [] for name in ("ff", "ff off", "zf", "zz", "zz off", "count", "total")}
    for _ in range(150):
        made = add_cross_noise(exact, slots, space, NoiseSource())
        made.check()
        for name, exact_part in zip(("ff", "zf", "zz"), truth, strict=True):
            noise = (getattr(made, name) - exact_part) / getattr(made, f"{name}_std")
            if name == "zf":
                drawn[name].append(noise.ravel())
                continue
            drawn[name].append(np.diag(noise))
            drawn[f"{name} off"].append(noise[np.triu_indices(len(noise), 1)] * math.sqrt(2))
        if len(made.count):
            drawn["count"].append((made.count - 30) / made.count_std)
            total = exact.sums[:, :DIM].astype(float) * RADIUS / CODE_MAX
            drawn["total"].append(((made.total - total) / made.total_std).ravel())
    for name, parts in drawn.items():
        flat = np.concatenate(parts) if parts else np.zeros(0)
        assert bool(len(flat)) or slots == tight(), name
        assert len(np.unique(flat)) == len(flat), name  # no draw is used twice
        assert abs((flat**2).sum() - len(flat)) <= 6 * math.sqrt(2 * len(flat)), name
        assert abs(flat.sum()) <= 6 * math.sqrt(len(flat)), name


def test_noise_is_the_declared_noise_in_real_units():
    made = add_cross_noise(sums([], []), tight(3.0), SPACE, NoiseSource())
    assert made.ff_std == pytest.approx(3.0 / JOINT.caption * LONGEST**2)
    assert made.zf_std == pytest.approx(3.0 / JOINT.cross * LONGEST * RADIUS)
    assert made.zz_std == pytest.approx(3.0 / JOINT.second * RADIUS**2)
    assert made.constant == SPACE.real_constant
    made = add_cross_noise(sums([], [], PLAIN), paper(3.0), PLAIN, NoiseSource())
    assert made.ff_std == pytest.approx(6.0 * CAPACITY * LONGEST**2)
    assert made.zf_std == pytest.approx(6.0 * CAPACITY * LONGEST * RADIUS)
    assert made.zz_std == pytest.approx(3.0 * CAPACITY * RADIUS**2)
    assert made.count_std == pytest.approx(6.0)
    assert made.total_std == pytest.approx(12.0 * RADIUS)
    assert made.constant == 0


def test_without_records_the_release_is_noise_and_an_unsafe_seed_repeats_it():
    empty = sums([], [])
    assert not empty.seconds.any()
    first, again = (add_cross_noise(empty, tight(), SPACE, NoiseSource.unsafe(4)) for _ in "ab")
    assert first.ff.all()
    np.testing.assert_array_equal(first.zz, again.zz)


@given(seed=st.integers(0, 10**6), same=st.sampled_from(["nothing", "image", "caption"]))
@settings(max_examples=60, deadline=None)
def test_the_papers_constant_covers_replacement(seed, same):
    """Proposition B.10, also where the image or the caption alone is replaced."""
    rng = np.random.default_rng(seed)
    codes, features = some_codes(rng, 2) * 10, some_features(rng, 2)
    if same == "image":
        codes[1] = codes[0]
    if same == "caption":
        features[1] = features[0]
    change = moved(*(sums([z], [f], PLAIN) for z, f in zip(codes, features, strict=True)))
    share = whitened_square(change, (1, 1, 0))
    claimed = PaperCrossMoments(CAPACITY, FEATURES, DIM)
    assert share / CAPACITY**2 <= Fraction(sensitivity(claimed)) ** 2
    opposite = moved(*(sums([[s, 0, 0, 0]], [[0, 9, 9]], PLAIN) for s in (-99, 99)))
    assert whitened_square(opposite, (1, 1, 0)) > 3.99  # 2 of the 2 sqrt(2), for the image alone


def test_slots_that_are_no_caption_release_are_refused():
    other = ClassMoments(0.6, 0.64, 0.48, "shared", 2, DIM)
    for slots in (
        paper()[:2],
        paper()[::-1],
        tight(statistic=other),
        [Slot(1, "train", "train-0001", ClippedGradientSum(1.0), 1.0, 0.1, 5)],
    ):
        with pytest.raises(PlanError):
            cross_blocks(slots, RADIUS, LONGEST)
    assert is_cross(tight())
    assert is_cross(paper())
    assert not is_cross(tight(statistic=other))


def test_features_of_another_length_than_declared_are_refused():
    with pytest.raises(UsageError, match="expected"):
        quantise_features(np.zeros((2, FEATURES + 1)), SPACE)
    with pytest.raises(UsageError, match="as many captions"):
        cross_sums([chunk(np.zeros((2, DIM)))], lambda _: np.zeros((1, FEATURES)), SPACE, tight())
    longer = CrossMoments(0.6, 0.64, 0.48, features=FEATURES + 1, dim=DIM)
    with pytest.raises(PlanError, match="does not declare"):
        add_cross_noise(sums([], []), tight(statistic=longer), SPACE, NoiseSource())


def test_the_constant_is_the_largest_whole_number_that_leaves_four_fifths_of_the_square():
    assert CONSTANT**2 <= CODE_MAX**2 / 5 < (CONSTANT + 1) ** 2


def test_a_chunk_without_records_is_fine_and_no_chunk_is_not():
    empty = UnitCodes(np.zeros((0, DIM), np.int32), np.zeros(0, np.int64))
    made = cross_sums([empty], lambda _: np.zeros((0, FEATURES)), SPACE, tight())
    assert made.seconds.shape == (1, DIM + FEATURES, DIM + FEATURES)
    with pytest.raises(UsageError):
        cross_sums([], lambda _: np.zeros((0, FEATURES)), SPACE, tight())
