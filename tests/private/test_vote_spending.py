"""Vote rounds under a spending lock: charged before the records, once each, and read back."""

from dataclasses import replace

import numpy as np
import pytest
from spendkit import make_lock, make_run

from dpsynth.accounting.queries import VoteHistogram
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.spending import read_state, spending
from dpsynth.artifacts.votes import votes_name
from dpsynth.errors import BudgetError, PlanError, ReplayError, UsageError
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.evolving import SpentVotes

MEMBERS, DIM, HASH = 6, 3, "c" * 64
LABELS = np.arange(MEMBERS) % 2
FEATURES = np.random.default_rng(0).normal(size=(MEMBERS, DIM))


def vote_lock(spares=1, bins=MEMBERS):
    rows = [(f"votes-0{n}", False) for n in (1, 2)]
    rows += [(f"votes-0{n}-spare-{k + 1}", True) for k in range(spares) for n in (1, 2)]
    slots = tuple(
        Slot(i, "evolution", name, VoteHistogram(bins), 2.0, None, None, spare)
        for i, (name, spare) in enumerate(rows, start=1)
    )
    return replace(make_lock(), slots=slots, lock_hash="", by_stage={})


class Records:
    """A pass over twenty records; each reading is noted, with what was charged by then."""

    def __init__(self, run, lock, *, fails=False):
        self.run, self.lock, self.fails, self.seen = run, lock, fails, []

    def __call__(self):
        self.seen.append(sorted(read_state(self.run, self.lock).charged))
        if self.fails:
            raise KeyboardInterrupt
        codes = np.random.default_rng(1).integers(-999, 999, (20, DIM)).astype(np.int32)
        return [UnitCodes(codes, np.arange(20) % 2)]


def session(run, lock, records, spender):
    return SpentVotes(spender, lock, run.released, radius=9.0, read=records)


def opened(run, lock):
    return spending(run, lock, calibration_hash="d" * 64, noise_source="os-entropy")


def test_a_round_is_charged_before_the_records_are_read_and_once(tmp_path):
    lock = vote_lock()
    run = make_run(tmp_path / "run", lock)
    records = Records(run, lock)
    with opened(run, lock) as spender:
        ballots = session(run, lock, records, spender)
        assert ballots.settled(1) is None
        votes = ballots.release(1, HASH, FEATURES, LABELS)
        assert records.seen == [[1]]
        assert (ballots.settled(1).votes == votes.votes).all()
        with pytest.raises(BudgetError):
            ballots.release(1, HASH, FEATURES, LABELS)
        assert records.seen == [[1]]
    with opened(run, lock) as spender:
        assert (session(run, lock, records, spender).settled(1).votes == votes.votes).all()
        (run.released / votes_name(1)).write_bytes(b"other")
        with pytest.raises(ReplayError, match="not what the transcript settled"):
            session(run, lock, records, spender).settled(1)


def test_a_crash_costs_the_round_and_its_spare_pays(tmp_path):
    lock = vote_lock()
    run = make_run(tmp_path / "run", lock)
    with pytest.raises(KeyboardInterrupt), opened(run, lock) as spender:
        session(run, lock, Records(run, lock, fails=True), spender).release(
            1, HASH, FEATURES, LABELS
        )
    with opened(run, lock) as spender:
        ballots = session(run, lock, Records(run, lock), spender)
        assert ballots.settled(1) is None
        ballots.release(1, HASH, FEATURES, LABELS)
        ballots.release(2, HASH, FEATURES, LABELS)
    assert read_state(run, lock).charged == {1, 2, 3}


def test_what_cannot_be_voted_on_is_refused_before_its_charge(tmp_path):
    lock = vote_lock(bins=MEMBERS + 1)
    run = make_run(tmp_path / "run", lock)
    records = Records(run, lock)
    with opened(run, lock) as spender:
        ballots = session(run, lock, records, spender)
        with pytest.raises(PlanError, match="members"):
            ballots.release(1, HASH, FEATURES, LABELS)
        with pytest.raises(UsageError, match="not finite"):
            ballots.release(1, HASH, FEATURES * np.nan, LABELS)
    assert records.seen == []
    assert not read_state(run, lock).charged
