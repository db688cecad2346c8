"""Central images: no neighbour moves a step's sums further than it says; coins and noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.queries import CentralSums, VoteHistogram
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.central import central_block, release_central, subset_sums
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, SHARE_MAX, quantise_rows
from dpsynth.private.noise import NoiseSource

DIM, CLASSES, RADIUS = 4, 3, 2.5


def slot(std=3.0, rate=1.0, steps=2, dim=DIM):
    return Slot(1, "central", "central", CentralSums(CLASSES, dim), std, rate, steps)


def chunk(raw, labels, sizes=None):
    codes, _ = quantise_rows(np.asarray(raw, float).reshape(-1, DIM), RADIUS)
    known = None if sizes is None else np.asarray(sizes, np.int64)
    return UnitCodes(codes, np.asarray(labels, np.int64), known)


def some(n, seed, scale=None):
    rng = np.random.default_rng(seed)
    spread = 10 ** rng.uniform(-3, 2, (n, 1)) if scale is None else scale
    return rng.normal(size=(n, DIM)) * spread, rng.integers(-1, CLASSES + 1, n)


def everyone(*chunks):
    """Exact sums (Y, d) of the one subset that holds everyone, in steps of 2^-bits."""
    sums, bits = subset_sums(chunks, slot(steps=1), NoiseSource())
    return sums[0], bits


def square(moved):
    return sum(int(x) ** 2 for x in np.asarray(moved, object).reshape(-1))


@given(
    st.integers(0, 10**6), st.integers(1, 9), st.sampled_from(["any", "twins", "far", "opposite"])
)
@settings(max_examples=150, deadline=None)
def test_no_unit_beats_the_sensitivity(seed, size, kind):
    """For every subset that the coins may choose: a unit is in it or not, whatever others are."""
    raw, labels = some(size, seed, 1e6 if kind == "far" else None)
    if kind in {"twins", "opposite"}:
        raw, labels = np.repeat(raw[:1], size, axis=0) * 1e3, np.repeat(labels[:1], size)
    if kind == "opposite":
        raw[1::2] *= -1
    others, own = some(10, seed + 1)
    for several in [True] if size > 1 else [False, True]:
        sizes = [np.array([3, 1, 6]), np.array([size])] if several else [None, None]
        joined = np.concatenate([sizes[1], sizes[0]]) if several else None
        before, _ = everyone(chunk(others, own, sizes[0]))
        alone, bits = everyone(chunk(raw, labels, sizes[1]))
        more = chunk(np.concatenate([raw, others]), np.concatenate([labels, own]), joined)
        moved = everyone(more)[0] - before
        assert (moved == alone).all(), "a unit's contribution hangs on the others"
        assert square(moved) <= (CODE_MAX << bits) ** 2, "one unit moves the sums too far"


def test_climbing_finds_no_worse_unit_and_the_bound_is_reached():
    rng = np.random.default_rng(0)
    best = 0.0
    for _ in range(20):
        raw, labels = rng.normal(size=(4, DIM)), rng.integers(0, CLASSES, 4)
        top = 0.0
        for _ in range(25):
            tried = raw * rng.uniform(0.5, 2) + rng.normal(size=raw.shape) * 0.5
            sums, bits = everyone(chunk(tried, labels, [4]))
            length = math.sqrt(square(sums)) / (CODE_MAX << bits)
            if length > top:
                raw, top = tried, length
        best = max(best, top)
    assert 0.99 < best <= 1
    # The same unit's images as records of their own would pass it.
    sums, bits = everyone(chunk(np.full((4, DIM), 9.0), [0, 0, 0, 0]))
    assert math.sqrt(square(sums)) / (CODE_MAX << bits) > 3.9


def test_coins_are_of_units_and_fresh_in_each_step():
    raw, _ = some(400, 0, 1.0)
    sums, _ = subset_sums([chunk(raw, np.zeros(400))], slot(rate=0.3, steps=40), NoiseSource())
    assert len({tuple(step[0].tolist()) for step in sums}) == 40
    # One unit of four equal images is whole in a subset, or not in it at all.
    twins = chunk(np.full((4, DIM), 9.0), [0] * 4, [4])
    sums, bits = subset_sums([twins], slot(rate=0.5, steps=200), NoiseSource())
    lengths = {round(math.sqrt(square(step)) / (CODE_MAX << bits), 2) for step in sums}
    assert lengths == {0.0, 1.0}
    taken = sum(square(step) > 0 for step in sums)
    assert abs(taken - 100) < 6 * math.sqrt(50)


def test_the_expectation_is_that_of_a_poisson_subset():
    """Sums of constant codes count who was taken in: mean n q, variance n q (1 - q)."""
    raw, n, rate = np.tile([RADIUS, 0, 0, 0], (900, 1)), 900, 0.2
    sums, _ = subset_sums([chunk(raw, np.ones(n))], slot(rate=rate, steps=300), NoiseSource())
    counts = sums[:, 1, 0].astype(float) / CODE_MAX
    assert not sums[:, [0, 2]].any()
    assert abs(counts.mean() - n * rate) < 6 * math.sqrt(n * rate * (1 - rate) / 300)
    assert counts.var() == pytest.approx(n * rate * (1 - rate), rel=0.5)


def test_noise_is_once_on_each_sum_and_the_divisor_is_declared():
    empty = chunk(np.zeros((0, DIM)), [])
    made = [
        release_central([empty], slot(steps=120), NoiseSource(), radius=RADIUS, divisor=7.0)
        for _ in range(2)
    ]
    assert not (made[0].sums == made[1].sums).any()
    drawn = made[0].sums.reshape(-1) / (3.0 * RADIUS)
    assert np.unique(drawn).size == drawn.size
    assert abs((drawn**2).sum() - drawn.size) < 6 * math.sqrt(2 * drawn.size)
    raw, labels = some(50, 3, 0.5)
    for n in (50, 20):  # the same divisor, however many came
        data = chunk(raw[:n], labels[:n])
        central = release_central(
            [empty, data], slot(std=1e-6), NoiseSource(), radius=RADIUS, divisor=7.0
        )
        exact, _ = everyone(data)
        real = exact.astype(float) * RADIUS / CODE_MAX
        assert np.abs(central.codes[:CLASSES] - real / 7.0).max() < 1e-5
        assert central.std == pytest.approx(1e-6 * RADIUS, rel=1e-6)
        assert central.code_std == pytest.approx(central.std / 7.0)
        assert central.labels.tolist() == [0, 1, 2] * 2


def test_noise_on_units_is_that_of_the_slot():
    empty = chunk(np.zeros((0, DIM)), [], [])
    central = release_central([empty], slot(steps=300), NoiseSource(), radius=RADIUS, divisor=1.0)
    assert central.std == pytest.approx(central_block(slot(), RADIUS).real_std, rel=1e-8)
    drawn = central.sums.reshape(-1) / (3.0 * RADIUS)
    assert abs((drawn**2).sum() - drawn.size) < 6 * math.sqrt(2 * drawn.size)


def test_undeclared_labels_add_nothing_and_shares_do_not_count_them():
    codes = np.tile([RADIUS, 0, 0, 0], (3, 1))
    sums, bits = everyone(chunk(codes, [1, CLASSES, -1], [3]))
    assert bits > 0
    assert CODE_MAX * (SHARE_MAX - 1) <= sums[1, 0] <= CODE_MAX * SHARE_MAX
    assert not everyone(chunk(codes, [CLASSES, 99, -7]))[0].any()


def test_what_does_not_fit_is_refused():
    data = [chunk(np.zeros((1, DIM)), [0])]
    with pytest.raises(PlanError):
        subset_sums(data, Slot(1, "c", "c", VoteHistogram(5), 1.0, 0.1, 2), NoiseSource())
    with pytest.raises(PlanError):
        central_block(Slot(1, "c", "c", CentralSums(CLASSES, DIM), 1.0), RADIUS)
    with pytest.raises(UsageError, match="expected 5"):
        subset_sums(data, slot(dim=DIM + 1), NoiseSource())
    with pytest.raises(UsageError, match="chunk"):
        subset_sums([], slot(), NoiseSource())
    for divisor in (0.0, math.nan):
        with pytest.raises(UsageError, match="divided"):
            release_central(data, slot(), NoiseSource(), radius=RADIUS, divisor=divisor)
