"""Vote rounds: no neighbour moves a histogram further than it says, nor anyone else's vote."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.queries import VoteHistogram
from dpsynth.accounting.statistics import ConfusionMatrix
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, SHARE_MAX, quantise_rows
from dpsynth.private.noise import NoiseSource
from dpsynth.private.shares import NOWHERE
from dpsynth.private.votes import Ballot, ballot_of, cast, release_votes, shard_votes, vote_block

DIM, CLASSES, RADIUS, HASH = 3, 3, 4.0, "a" * 64


def ballot(seed=0, members=12, classes=CLASSES, *, ties=False):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(members, DIM)) * 10 ** rng.uniform(-2, 1)
    labels = rng.integers(0, classes, members)
    if ties:  # twins, and mirrored members that many records lie midway of
        labels[:4] = 0
        features[1] = features[0]
        features[3] = -features[2]
    return ballot_of(features, labels, radius=RADIUS, population=HASH)


def slot(made, std=3.0):
    return Slot(1, "votes", "votes-01", VoteHistogram(len(made.labels)), std)


def chunk(raw, labels, sizes=None):
    codes, _ = quantise_rows(np.asarray(raw, float).reshape(-1, DIM), RADIUS)
    known = None if sizes is None else np.asarray(sizes, np.int64)
    return UnitCodes(codes, np.asarray(labels, np.int64), known)


def some(n, seed=1, classes=CLASSES):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, DIM)) * 10 ** rng.uniform(-2, 1, (n, 1)), rng.integers(0, classes, n)


def slow_cast(codes, labels, made):
    """Python integers, one record and one member after the other."""
    found = []
    for code, label in zip(codes.tolist(), labels.tolist(), strict=True):
        best = (math.inf, NOWHERE)
        for place, (member, y) in enumerate(
            zip(made.features.tolist(), made.labels.tolist(), strict=True)
        ):
            if y == label:
                best = min(
                    best, (sum((a - b) ** 2 for a, b in zip(code, member, strict=True)), place)
                )
        found.append(best[1])
    return found


@given(st.integers(0, 10**6), st.booleans(), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_vote_is_the_nearest_member_by_whole_numbers(seed, ties, count):
    made = ballot(seed, ties=ties)
    raw, labels = some(count, seed)
    if ties:
        raw[::2] = 0.0  # midway between members 2 and 3, to the last digit
        labels[::2] = 0
    records = chunk(raw, labels)
    assert cast(records.codes, records.labels, made).tolist() == slow_cast(
        records.codes, records.labels, made
    )


@given(st.integers(0, 10**6))
@settings(max_examples=6, deadline=None)
def test_no_batch_moves_a_vote(seed):
    """Also where members are equally near: a library's tie may hang on how many it was asked of."""
    made = ballot(seed, members=40, ties=True)
    raw, labels = some(150, seed)
    raw[::3], labels[::3] = 0.0, 0
    records = chunk(raw, labels)
    whole = cast(records.codes, records.labels, made)
    for rows in (1, 7, 64):
        assert (cast(records.codes, records.labels, made, rows=rows) == whole).all()
    alone = [cast(records.codes[i : i + 1], records.labels[i : i + 1], made)[0] for i in range(30)]
    assert (whole[:30] == alone).all()


KINDS = ["any", "far", "zero", "member", "midway", "not-finite"]


def unit(seed, kind, size, made):
    """Images of one unit: (raw (m, d), labels (m,)), at places where a bound could break."""
    rng = np.random.default_rng(seed)
    raw, labels = some(size, seed)
    real = made.features * (made.radius / CODE_MAX)
    if kind == "far":
        raw = raw * 10.0 ** rng.integers(2, 200)
    elif kind == "zero":
        raw = np.zeros_like(raw)
    elif kind == "member":
        raw = np.repeat(real[rng.integers(0, len(real))][None], size, axis=0)
        labels = np.full(size, int(rng.integers(0, CLASSES)))
    elif kind == "midway":
        pair = rng.integers(0, len(real), 2)
        raw = np.repeat(real[pair].mean(axis=0)[None], size, axis=0)
    if rng.random() < 0.3:
        labels = rng.integers(-2, CLASSES + 2, size)
    return raw, labels


@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(1, 9), st.booleans())
@settings(max_examples=100, deadline=None)
def test_no_unit_beats_the_sensitivity(seed, kind, size, ties):
    """Records (units of one) and units of several, among others, at any place among them."""
    made = ballot(seed, ties=ties)
    raw, labels = unit(seed, kind, size, made)
    raw, labels = (raw[:1], labels[:1]) if seed % 2 else (raw, labels)
    others, own = some(10, seed + 1)
    for several in [True] if len(labels) > 1 else [False, True]:
        sizes = [np.array([3, 1, 6]), np.array([len(labels)])] if several else [None, None]
        before = shard_votes([chunk(others, own, sizes[0])], made)
        alone = shard_votes([chunk(raw, labels, sizes[1])], made)
        joined = None if not several else np.concatenate([sizes[1], sizes[0]])
        after = shard_votes(
            [chunk(np.concatenate([raw, others]), np.concatenate([labels, own]), joined)], made
        )
        moved = after - before
        assert (moved == alone).all(), "a unit's votes hang on the others"
        bound = SHARE_MAX if several else 1
        assert sum(int(x) ** 2 for x in moved) <= bound**2, "one unit moves the votes too far"


def test_the_bound_is_reached_and_a_wrong_mechanism_passes_it():
    """Whole votes for each image of a unit are what the search must catch."""
    made = ballot(members=6)
    one = shard_votes([chunk([[0, 0, 0]], [made.labels[0]])], made)
    assert (one**2).sum() == 1
    real = made.features * (RADIUS / CODE_MAX)
    spread = chunk(real, made.labels, [6])  # six images, each at a member of its own
    shared = shard_votes([spread], made) / SHARE_MAX
    assert 1 - 1e-4 < np.linalg.norm(shared) <= 1
    assert np.linalg.norm(shard_votes([chunk(real, made.labels)], made)) > 2


def test_noise_is_fresh_on_every_bin_and_of_the_slot():
    made = ballot(members=1500)
    empty = [chunk(np.zeros((0, DIM)), [])]
    first, second = (release_votes(empty, made, slot(made), NoiseSource()).votes for _ in range(2))
    assert not (first == second).any()
    assert (np.unique(first).size, np.unique(second).size) == (1500, 1500)
    for drawn in (first / 3.0, second / 3.0):
        assert abs((drawn**2).sum() - 1500) < 6 * math.sqrt(2 * 1500)
    made = ballot(members=50)
    raw, labels = some(200)
    for sizes in (None, np.full(50, 4)):
        votes = release_votes([chunk(raw, labels, sizes)], made, slot(made, 1e-3), NoiseSource())
        exact = shard_votes([chunk(raw, labels, sizes)], made)
        exact = exact if sizes is None else exact / SHARE_MAX
        assert np.abs(votes.votes - exact).max() < 0.01
        assert votes.std == pytest.approx(1e-3, rel=1e-6)
        assert votes.population == HASH


def test_labels_without_members_and_not_finite_features_vote_for_nothing():
    made = ballot(members=6)
    real = made.features * (RADIUS / CODE_MAX)
    absent = [chunk(real, [CLASSES, -1, CLASSES + 9, 77, -5, CLASSES])]
    assert not shard_votes(absent, made).any()
    several = chunk(real, [CLASSES, 0, -1, -1, CLASSES, -1], [2, 4])
    # The first unit has one vote, as whole as shares of several go; the second has none.
    assert np.flatnonzero(shard_votes([several], made)).size == 1
    assert SHARE_MAX - 1 <= shard_votes([several], made).sum() <= SHARE_MAX
    whole, finite = quantise_rows(np.array([[np.nan, 0, 0], [np.inf, 1, 1]]), RADIUS)
    assert not finite.any()  # `encoding.encoded` drops these rows
    assert not whole.any()


@pytest.mark.parametrize(
    "change",
    [
        {"features": np.zeros((0, DIM), np.int64)},
        {"features": np.zeros((2, DIM))},
        {"features": np.full((2, DIM), 2**40)},
        {"labels": np.array([0])},
        {"labels": np.array([0, -1])},
        {"radius": math.nan},
        {"radius": 0.0},
    ],
)
def test_a_ballot_that_makes_no_sense_is_refused(change):
    sound = {"features": np.zeros((2, DIM), np.int64), "labels": np.array([0, 1]),
             "radius": 1.0, "population": HASH}  # fmt: skip
    assert Ballot.from_bytes(Ballot(**sound).to_bytes()).population == HASH
    with pytest.raises(UsageError):
        Ballot(**(sound | change))


def test_a_foreign_slot_or_no_chunk_is_refused():
    made = ballot()
    with pytest.raises(PlanError, match="members"):
        vote_block(Slot(1, "v", "v", VoteHistogram(5), 1.0), made, several=False)
    with pytest.raises(PlanError, match="no vote round"):
        vote_block(Slot(1, "v", "v", ConfusionMatrix(0.8, 0.6, 10), 1.0), made, several=False)
    with pytest.raises(UsageError, match="chunk"):
        release_votes([], made, slot(made), NoiseSource())
    with pytest.raises(UsageError, match="not finite"):
        ballot_of(np.array([[np.nan] * DIM]), np.array([0]), radius=1.0, population=HASH)
    with pytest.raises(UsageError, match="features"):
        cast(np.zeros((1, DIM + 1), np.int32), np.array([0]), made)
