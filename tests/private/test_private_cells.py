"""Cell rounds: no neighbour moves a round further than it says, nor anyone else's share of it."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unitkit import exact_sums

from dpsynth.accounting.statistics import CellMoments, CellSums, ClassMoments, sensitivity
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.private import cells as cells_module
from dpsynth.private.blocks import blocks_of
from dpsynth.private.cells import (
    NOWHERE,
    Frame,
    assign,
    frame_of,
    release_cells,
    residuals,
)
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, ExactSums, quantise
from dpsynth.private.noise import NoiseSource

DIM, CLASSES, CELLS, CLIP = 4, 3, 5, 2.5
LLOYD = CellSums(0.6, 0.8, CLASSES, CELLS, DIM)
LAST = CellMoments(math.sqrt(0.03), math.sqrt(0.27), math.sqrt(0.7), CLASSES, CELLS, DIM)
ROUNDS = [LLOYD, LAST]


def cell_sums(codes, labels, frame, *, second):
    """Sums of one chunk of records."""
    return cells_module.cell_sums([UnitCodes(codes, labels)], frame, LAST, second=second)


def slot(statistic, std=3.0):
    return Slot(2, "moments", "cells", statistic, std)


def some_frame(seed, *, radius=None, ties=False):
    """Cells at random places, some unused; `ties`: some of them twice, some on the ball."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, CELLS, DIM)) * 10 ** rng.uniform(-3, 0.3)
    used = np.arange(CELLS) < rng.integers(1, CELLS + 1, CLASSES)[:, None]
    if ties:
        centres[:, 1] = centres[:, 0]
        centres[:, 2] *= CLIP / np.linalg.norm(centres[:, 2], axis=-1, keepdims=True)
        centres[:, 3] = -centres[:, 2]
    centres[~used] = 0.0
    rho = CLIP * 10 ** rng.uniform(-3, math.log10(2)) if radius is None else radius
    return frame_of(centres, used, radius=rho, clip=CLIP)


def some_records(n, seed=0):
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(n, DIM)) * 10 ** rng.uniform(-2, 1, (n, 1))
    codes = np.array([quantise(row, CLIP) for row in raw], dtype=np.int64).reshape(n, DIM)
    return codes, rng.integers(0, CLASSES, n)


@st.composite
def frames(draw):
    return some_frame(draw(st.integers(0, 10**6)), ties=draw(st.booleans()))


@st.composite
def raw_codes(draw, frame, label):
    """A code: any numbers at all, or one of the places where a bound could break."""
    kind = draw(st.sampled_from(["any", "border", "centre", "ball", "zero", "far", "opposite"]))
    if kind == "any":
        return np.array(draw(st.lists(st.floats(), min_size=DIM, max_size=DIM)))
    own = frame.real_centres[label, frame.used[label]]
    first, second = (own[draw(st.integers(0, len(own) - 1))] for _ in range(2))
    direction = np.array([draw(st.floats(-1, 1)) for _ in range(DIM)])
    length = max(float(np.linalg.norm(direction)), 1e-9)
    return {
        "border": (first + second) / 2,
        "centre": first,
        "ball": direction / length * CLIP * (1 + draw(st.sampled_from([-1e-15, 0, 1e-15]))),
        "zero": np.zeros(DIM),
        "far": direction / length * 10.0 ** draw(st.integers(1, 300)),
        "opposite": -first / max(float(np.linalg.norm(first)), 1e-9) * CLIP,
    }[kind]


def parts(sums, statistic):
    """(counts, sums, seconds) of the statistic as Python ints; no seconds in a Lloyd round."""
    seconds = sums.seconds if isinstance(statistic, CellMoments) else np.zeros((1, 0), object)
    return [np.asarray(part, dtype=object) for part in (sums.counts, sums.sums, seconds)]


def whitened_square(moved, statistic):
    """Squared whitened norm of a move, exactly: sums of squares are Python ints."""
    weights = (statistic.count, statistic.sum, getattr(statistic, "second", 0.0))
    squares = [sum(int(x) ** 2 for x in part.reshape(-1)) for part in moved]
    return sum(
        Fraction(w) ** 2 * Fraction(square, CODE_MAX ** (2 * power))
        for power, (w, square) in enumerate(zip(weights, squares, strict=True))
    )


def check_neighbour(sums_of, statistic, frame, records, raw, *, label, place=0):
    """Assert that one more record moves the exact sums as docs/maths/cells.md (C3) says."""
    codes, labels = records
    before = parts(sums_of(codes, labels, frame), statistic)
    whole = quantise(np.asarray(raw, dtype=float), CLIP)
    if whole is None:  # contributes nothing, as `encode_units` drops it
        return
    more = np.insert(codes, place, whole, axis=0), np.insert(labels, place, label)
    after = parts(sums_of(*more, frame), statistic)
    moved = [b - a for a, b in zip(before, after, strict=True)]
    alone = parts(sums_of(whole[None], np.array([label]), frame), statistic)
    for mine, expected in zip(moved, alone, strict=True):
        assert (mine == expected).all(), "a record's contribution hangs on the others"
    bound = Fraction(sensitivity(statistic)) ** 2 * (1 + Fraction(1, 10**15))
    assert whitened_square(moved, statistic) <= bound, "one record moves the sums too far"
    touched = {int(place) for part in moved if part.size for place in np.nonzero(part)[0]}
    assert len(touched) == 1, "one record moves several cells"
    cell = touched.pop()
    assert cell // CELLS == label
    assert frame.used[label, cell % CELLS]


def ours(statistic):
    second = isinstance(statistic, CellMoments)
    return lambda codes, labels, frame: cell_sums(codes, labels, frame, second=second)


@pytest.mark.parametrize("statistic", ROUNDS, ids=["lloyd", "last"])
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_record_beats_the_sensitivity_of_a_round(statistic, data):
    frame = data.draw(frames())
    label = data.draw(st.integers(0, CLASSES - 1))
    raw = data.draw(raw_codes(frame, label))
    count = data.draw(st.integers(0, 12))
    records = some_records(count, data.draw(st.integers(0, 99)))
    place = data.draw(st.integers(0, count))
    check_neighbour(ours(statistic), statistic, frame, records, raw, label=label, place=place)


@pytest.mark.parametrize("statistic", ROUNDS, ids=["lloyd", "last"])
def test_climbing_finds_no_worse_neighbour(statistic):
    """Random-restart ascent on a record's whitened move, over directions, lengths, roundings."""
    rng = np.random.default_rng(0)
    empty = some_records(0)
    worst = 0.0
    for trial in range(15):
        frame = some_frame(trial, ties=bool(trial % 2))
        raw = rng.normal(size=DIM) * 10 ** rng.uniform(-3, 3)
        best = 0.0
        for _ in range(40):
            nearby = raw * (1 + rng.normal(size=DIM) * 10 ** rng.uniform(-16, 0))
            check_neighbour(ours(statistic), statistic, frame, empty, nearby, label=0)
            one = quantise(nearby, CLIP)[None], np.zeros(1, np.int64)
            value = float(
                whitened_square(parts(ours(statistic)(*one, frame), statistic), statistic)
            )
            if value >= best:
                raw, best = nearby, value
        worst = max(worst, best)
    bound = sensitivity(statistic) ** 2
    assert 0.99 * bound < worst <= bound * (1 + 1e-15)


def test_the_sensitivity_is_attained():
    """So that a looser claim would be noticed as well as a bolder one."""
    frame = frame_of(
        np.zeros((CLASSES, CELLS, DIM)), np.ones((CLASSES, CELLS), bool), radius=1.0, clip=CLIP
    )
    codes = quantise(np.array([CLIP, 0, 0, 0]), CLIP)[None]
    for statistic in ROUNDS:
        found = parts(ours(statistic)(codes, np.array([1]), frame), statistic)
        square = float(whitened_square(found, statistic))
        assert square == pytest.approx(sensitivity(statistic) ** 2, abs=1e-15)


def unclipped(codes, labels, frame):
    """Wrong: the residual is scaled by rho and never clipped."""
    cells = assign(codes, labels, frame)
    rest = codes - frame.centres.reshape(-1, DIM)[cells]
    return exact_sums(
        np.rint(rest * (frame.clip / frame.radius)).astype(np.int64), cells, CLASSES * CELLS
    )


def centred_on_the_data(codes, labels, frame):
    """Wrong: residuals about the records' own mean, which everyone moves."""
    if not len(codes):
        return cell_sums(codes, labels, frame, second=True)
    cells = assign(codes, labels, frame)
    shifted = codes - np.rint(codes.mean(axis=0)).astype(np.int64)
    return exact_sums(residuals(shifted, cells, frame), cells, CLASSES * CELLS)


def shared_between_cells(codes, labels, frame):
    """Wrong: a record counts in its cell and in the next one too."""
    first = cell_sums(codes, labels, frame, second=True)
    rolled = [np.roll(part, 1, axis=0) for part in (first.counts, first.sums, first.seconds)]
    return ExactSums(first.counts + rolled[0], first.sums + rolled[1], first.seconds + rolled[2])


def balanced(codes, labels, frame):
    """Wrong: cells are filled in turn, so that a record moves those behind it."""
    cells = labels * CELLS + np.arange(len(labels)) % frame.used[labels].sum(axis=1)
    return exact_sums(residuals(codes, cells, frame), cells, CLASSES * CELLS)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (unclipped, "too far"),
        (centred_on_the_data, "hangs on the others"),
        (shared_between_cells, "several cells|too far"),
        (balanced, "hangs on the others"),
    ],
)
def test_the_checker_catches_a_wrong_mechanism(wrong, why):
    caught = 0
    for seed in range(20):
        frame, records = some_frame(seed, radius=0.3), some_records(9, seed)
        raw = np.random.default_rng(seed).normal(size=DIM) * 3
        try:
            check_neighbour(wrong, LAST, frame, records, raw, label=seed % 3)
        except AssertionError as error:
            assert re.search(why, str(error))
            caught += 1
    assert caught > 5


def nearest(code, label, frame):
    """The slow answer: squared distances in Python ints, first of the least."""
    best = None
    for k in range(CELLS):
        if frame.used[label, k]:
            pairs = zip(code.tolist(), frame.centres[label, k].tolist(), strict=True)
            distance = sum((q - c) ** 2 for q, c in pairs)
            if best is None or distance < best[0]:
                best = (distance, k)
    return label * CELLS + best[1]


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 40, CODE_MAX // 2]))
@settings(max_examples=60, deadline=None)
def test_cells_agree_with_python_integers(seed, size):
    """Small coordinates make many exact ties; large ones differ in the last bit of 2^33."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(-size, size + 1, (CLASSES, CELLS, DIM))
    used = np.arange(CELLS) < rng.integers(1, CELLS + 1, CLASSES)[:, None]
    frame = Frame(centres * used[..., None], used, 1.0, CLIP)
    codes = rng.integers(-size, size + 1, (30, DIM))
    labels = rng.integers(0, CLASSES, 30)
    expected = [nearest(code, y, frame) for code, y in zip(codes, labels.tolist(), strict=True)]
    assert assign(codes, labels, frame).tolist() == expected


def test_a_record_on_the_border_goes_to_the_lowest_cell_and_stays_there():
    centres = np.zeros((1, 3, DIM), np.int64)
    centres[0, :, 0] = [0, CODE_MAX - 1, 1 - CODE_MAX]
    frame = Frame(centres, np.array([[False, True, True]]), 1.0, CLIP)
    codes = np.array([[0, 9, 9, 9], [1, 9, 9, 9], [-1, 9, 9, 9], [0, CODE_MAX, 0, 0]])
    assert assign(codes, np.zeros(4, np.int64), frame).tolist() == [1, 1, 2, 1]


def test_neither_order_nor_batching_moves_a_bit():
    codes, labels = some_records(300)
    frame = some_frame(3, ties=True)
    cells = assign(codes, labels, frame)
    assert (assign(codes, labels, frame, rows=1) == cells).all()
    assert (assign(codes, labels, frame, rows=7) == cells).all()
    one_by_one = np.concatenate(
        [residuals(codes[i : i + 1], cells[i : i + 1], frame) for i in range(300)]
    )
    assert (residuals(codes, cells, frame) == one_by_one).all()
    order = np.random.default_rng(1).permutation(300)
    assert (assign(codes[order], labels[order], frame) == cells[order]).all()
    whole, other = (
        cell_sums(c, y, frame, second=True)
        for c, y in [(codes, labels), (codes[order], labels[order])]
    )
    for name in ("counts", "sums", "seconds"):
        assert (getattr(whole, name) == getattr(other, name)).all()


@given(frames(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_residuals_are_those_of_the_codes_in_steps_of_rho(frame, seed):
    codes, labels = some_records(20, seed)
    cells = assign(codes, labels, frame)
    found = residuals(codes, cells, frame)
    assert ((found**2).sum(axis=1) <= CODE_MAX**2).all()
    rest = (codes - frame.centres.reshape(-1, DIM)[cells]) * (CLIP / CODE_MAX)
    lengths = np.linalg.norm(rest, axis=1, keepdims=True)
    clipped = rest * np.minimum(1.0, frame.radius / np.maximum(lengths, 1e-300))
    step = frame.radius / CODE_MAX
    assert np.abs(found * step - clipped).max() <= step * (1 + 1e-6)


def test_undeclared_labels_and_unused_cells_receive_nothing():
    codes, _ = some_records(6)
    frame = some_frame(5)
    labels = np.array([-1, CLASSES, 99, -7, 0, 1])
    assert assign(codes, labels, frame)[:4].tolist() == [NOWHERE] * 4
    found = cell_sums(codes, labels, frame, second=True)
    assert found.counts.sum() == 2
    assert not found.counts.reshape(CLASSES, CELLS)[~frame.used].any()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("statistic", ROUNDS, ids=["lloyd", "last"])
def test_few_records_make_a_finite_release(statistic, count):
    made = release_cells(
        [UnitCodes(*some_records(count))], some_frame(1), slot(statistic), NoiseSource()
    )
    made.check()
    assert made.counts.any()
    assert (made.seconds is None) == (statistic is LLOYD)


def test_equal_records_lie_in_one_cell():
    codes, _ = some_records(1)
    found = cell_sums(np.repeat(codes, 500, axis=0), np.full(500, 2), some_frame(2), second=False)
    assert sorted(found.counts.tolist())[-2:] == [0, 500]
    assert found.seconds.size == 0


@pytest.mark.parametrize("statistic", ROUNDS, ids=["lloyd", "last"])
def test_noise_has_the_declared_variance_in_every_block_and_is_fresh(statistic):
    codes, labels = some_records(60)
    frame = some_frame(4, radius=0.7)
    exact = cell_sums(codes, labels, frame, second=True)
    unit = 0.7 / CODE_MAX
    shape = (CLASSES, CELLS)
    counts = exact.counts.astype(float).reshape(shape)
    sums = (exact.sums.astype(float) * unit).reshape(*shape, DIM)
    seconds = (exact.seconds.astype(float) * unit**2).reshape(*shape, DIM, DIM)
    corner, (row, column) = np.arange(DIM), np.triu_indices(DIM, 1)
    drawn = {"count": [], "sum": [], "diagonal": [], "off": []}
    for _ in range(50):
        made = release_cells([UnitCodes(codes, labels)], frame, slot(statistic), NoiseSource())
        drawn["count"].append((made.counts - counts) / (3.0 / statistic.count))
        drawn["sum"].append((made.sums - sums) / (3.0 / statistic.sum * 0.7))
        if made.seconds is None:
            continue
        np.testing.assert_array_equal(made.seconds, made.seconds.swapaxes(2, 3))
        rest = (made.seconds - seconds) / (3.0 / statistic.second * 0.7**2)
        drawn["diagonal"].append(rest[..., corner, corner])
        drawn["off"].append(rest[..., row, column] * math.sqrt(2))
    assert made.count_std == pytest.approx(3.0 / statistic.count)
    assert made.sum_std == pytest.approx(3.0 / statistic.sum * 0.7)
    assert made.second_std == pytest.approx(
        3.0 / statistic.second * 0.49 if statistic is LAST else 0.0
    )
    for name, values in drawn.items():
        if not values:
            continue
        flat = np.concatenate([x.reshape(-1) for x in values])
        n = len(flat)
        assert len(np.unique(flat)) == n, name  # no draw is used twice
        assert abs((flat**2).sum() - n) < 6 * math.sqrt(2 * n), name
        assert abs(flat.mean()) < 6 / math.sqrt(n), name


def test_centres_are_stored_as_used():
    frame = some_frame(6, ties=True)
    made = release_cells([UnitCodes(*some_records(5))], frame, slot(LLOYD), NoiseSource())
    back = np.rint(made.centres * (CODE_MAX / CLIP)).astype(np.int64)
    assert (back == frame.centres).all()
    again = frame_of(made.centres, made.used, radius=frame.radius, clip=CLIP)
    assert np.abs(again.centres - frame.centres).max() <= 1
    assert ((frame.centres**2).sum(axis=-1) <= CODE_MAX**2).all()
    assert not made.centres[~made.used].any()


@pytest.mark.parametrize(
    "statistic",
    [
        ClassMoments(0.6, 0.64, 0.48, "class", CLASSES, DIM),
        CellSums(0.6, 0.8, CLASSES, CELLS + 1, DIM),
        CellMoments(0.6, 0.64, 0.48, CLASSES, CELLS, DIM - 1),
    ],
)
def test_slots_of_another_release_are_refused(statistic):
    with pytest.raises(PlanError):
        release_cells([UnitCodes(*some_records(3))], some_frame(1), slot(statistic), NoiseSource())
    with pytest.raises(PlanError):
        blocks_of([slot(LLOYD), slot(LAST)], 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"radius": 0.0},
        {"radius": math.nan},
        {"clip": -1.0},
        {"centres": np.full((CLASSES, CELLS, DIM), np.nan)},
        {"used": np.zeros((CLASSES, CELLS), bool)},
    ],
)
def test_frames_that_make_no_sense_are_refused(wrong):
    given_ = {
        "centres": np.zeros((CLASSES, CELLS, DIM)),
        "used": np.ones((CLASSES, CELLS), bool),
        "radius": 1.0,
        "clip": CLIP,
    } | wrong
    with pytest.raises(UsageError):
        frame_of(given_["centres"], given_["used"], radius=given_["radius"], clip=given_["clip"])


def test_a_centre_outside_the_ball_makes_no_frame():
    """Exactness of the scores rests on |c| <= 2^16 (docs/maths/cells.md, C2)."""
    centres = np.zeros((1, 1, DIM), np.int64)
    used = np.ones((1, 1), bool)
    centres[0, 0, 0] = CODE_MAX
    Frame(centres, used, 1.0, CLIP)
    with pytest.raises(UsageError, match="outside"):
        Frame(centres + 1, used, 1.0, CLIP)
    far = frame_of(np.full((1, 1, DIM), 1e200), used, radius=1.0, clip=CLIP)
    assert int((far.centres**2).sum()) <= CODE_MAX**2


@pytest.mark.parametrize("number", [2**32, -(2**32), 2**40, 2**63 - 1, -(2**63), CODE_MAX + 1])
def test_a_centre_too_large_to_square_is_refused(number):
    """2^32 squared is 0 in 64 bits: a check of the sum alone would let it through."""
    centres = np.full((1, 1, DIM), 0)
    centres[0, 0, 1] = number
    with pytest.raises(UsageError, match="outside the codes' ball"):
        Frame(centres, np.ones((1, 1), dtype=bool), 1.0, CLIP)


@pytest.mark.parametrize("centre", [0.5, 1.0, np.int32(1), np.nan, True])
def test_centres_are_whole_numbers_of_64_bits(centre):
    with pytest.raises(UsageError, match="expected int64"):
        Frame(np.full((1, 1, DIM), centre), np.ones((1, 1), dtype=bool), 1.0, CLIP)
