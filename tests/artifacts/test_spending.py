"""Charging and settling: each slot once, one process, one calibration."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from spendkit import make_lock, make_run, make_slots, open_spending, spend, spend_all

from dpsynth.artifacts import transcript as transcript_module
from dpsynth.artifacts.ledger import Ledger
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import earlier_files
from dpsynth.artifacts.spending import SpendState, calibration_hash, close_run, read_state
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import BudgetError, MissingError, ReplayError, UsageError


@pytest.fixture
def lock():
    return make_lock()


@pytest.fixture
def run(tmp_path, lock):
    return make_run(tmp_path / "runs" / "a", lock)


def test_a_whole_run(run, lock):
    assert read_state(run, lock) == SpendState()
    with open_spending(run, lock) as spender:
        assert not spender.done
        spend(spender, run, spender.release_slot("moments"))
        for slot in spender.free_slots("train"):
            spend(spender, run, slot)
        assert spender.done
        spender.close()
        spender.close()
        live = spender.state
    state = read_state(run, lock)
    assert live == state
    assert state.settled == {1, 3, 4}
    assert state.forfeited == frozenset()
    assert state.closed
    assert state.head == read_transcript(run.transcript).head
    (entry,) = Ledger.of(run).entries()
    assert (entry.run, entry.state, entry.epsilon) == ("a", "closed", 1.2)


def test_the_charge_is_on_disk_before_charge_returns(run, lock):
    with open_spending(run, lock) as spender:
        spender.charge(lock.slots[0])
        assert read_state(run, lock).forfeited == {1}


def test_nothing_is_written_before_the_first_charge(run, lock):
    with open_spending(run, lock) as spender:
        assert len(spender.free_slots("train")) == 2
    assert run.transcript.read_bytes() == b""
    assert not (run.root.parent / "ledgers").exists()


def test_a_slot_is_charged_once(run, lock):
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
        with pytest.raises(BudgetError, match="already charged"):
            spender.charge(lock.slots[0])
    with open_spending(run, lock) as spender, pytest.raises(BudgetError, match="already charged"):
        spender.charge(lock.slots[0])


def test_only_the_locks_own_slots(run, lock):
    first = lock.slots[0]
    cheaper = Slot(1, first.stage, first.name, first.statistic, 0.1)
    beyond = Slot(99, first.stage, first.name, first.statistic, 5.0)
    with open_spending(run, lock) as spender:
        for slot in (cheaper, beyond, Slot(0, *(["x"] * 2), first.statistic, 5.0)):
            with pytest.raises(BudgetError, match="not a slot"):
                spender.charge(slot)
    assert run.transcript.read_bytes() == b""


def test_a_second_release_is_refused(run, lock):
    with open_spending(run, lock) as spender:
        spend(spender, run, spender.release_slot("moments"))
    with open_spending(run, lock) as spender, pytest.raises(BudgetError, match="only once") as e:
        spender.release_slot("moments")
    assert e.value.exit_code == 3


def test_a_forfeited_release_takes_its_spare_then_none(run, lock):
    for wanted in ("moments", "moments-spare-1"):
        with open_spending(run, lock) as spender:
            slot = spender.release_slot("moments")
            assert slot.name == wanted
            spender.charge(slot)  # and the process dies
    with open_spending(run, lock) as spender:
        with pytest.raises(BudgetError, match="forfeited 2 of 2") as caught:
            spender.release_slot("moments")
        assert not spender.done  # training is still free
    assert "spares" in caught.value.hint
    assert read_state(run, lock).forfeited == {1, 2}


def test_an_unknown_release(run, lock):
    with open_spending(run, lock) as spender, pytest.raises(BudgetError, match="no slot named"):
        spender.release_slot("votes")


def test_spares_come_last(run, lock):
    with open_spending(run, lock) as spender:
        assert [s.name for s in spender.free_slots("moments")] == ["moments", "moments-spare-1"]


def test_only_this_sessions_charges_are_settled(run, lock):
    artifact = run.curator / "x"
    artifact.write_bytes(b"")
    with open_spending(run, lock) as spender:
        spender.charge(lock.slots[0])
        with pytest.raises(MissingError):
            spender.settle(lock.slots[0], run.curator / "nothing")
    with open_spending(run, lock) as spender:
        with pytest.raises(BudgetError, match="was not charged by this command"):
            spender.settle(lock.slots[0], artifact)
        spend(spender, run, lock.slots[2])
        with pytest.raises(BudgetError, match="is settled"):
            spender.settle(lock.slots[2], artifact)


def test_two_cannot_spend_at_once(run, lock):
    with open_spending(run, lock):
        with pytest.raises(BudgetError, match="another process") as caught:
            open_spending(run, lock).__enter__()
        assert caught.value.exit_code == 3
    with open_spending(run, lock):
        pass


def test_an_error_inside_lets_go(run, lock):
    with pytest.raises(BlockingIOError), open_spending(run, lock):
        raise BlockingIOError
    with open_spending(run, lock):
        pass


def test_the_calibration_is_the_first_charges(run, lock):
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
    with (
        open_spending(run, lock, calibration="d" * 64) as spender,
        pytest.raises(BudgetError, match="calibration"),
    ):
        spender.charge(lock.slots[2])


def test_a_closed_run_takes_no_charge(run, lock):
    spend_all(run, lock)
    with open_spending(run, lock) as spender, pytest.raises(BudgetError, match="closed"):
        spender.charge(lock.slots[1])


def test_another_lock_is_refused(run, lock):
    spend_all(run, lock, close=False)
    other = make_lock(make_slots(chunks=3))
    with pytest.raises(BudgetError, match="not the one"):
        open_spending(run, other).__enter__()
    with pytest.raises(BudgetError, match="not the one"):
        read_state(run, other)
    with open_spending(run, lock):  # the refusal let go of the file lock
        pass


def test_the_noise_source_is_the_locks(run, lock):
    unsafe = make_lock(seed=7)
    from dpsynth.artifacts.spending import spending

    for one, source in ((lock, "UNSAFE-seed"), (unsafe, "os-entropy")):
        with pytest.raises(BudgetError, match="noise source"):
            spending(run, one, calibration_hash="c", noise_source=source).__enter__()


def test_a_tampered_transcript_stops_spending(run, lock):
    spend_all(run, lock, close=False)
    run.transcript.write_bytes(run.transcript.read_bytes().replace(b'"slot":3', b'"slot":4'))
    with pytest.raises(ReplayError):
        open_spending(run, lock).__enter__()


def test_a_cut_or_lost_transcript_spends_nothing(run, lock):
    """What was handed out, or lies in released/, stays paid for by the transcript beside it."""
    spend_all(run, lock, close=False)
    whole = run.transcript.read_bytes()
    copy = run.released / run.transcript.name
    copy.write_bytes(whole)
    with open_spending(run, lock):  # it is the whole transcript
        pass
    run.transcript.write_bytes(b"".join(whole.splitlines(keepends=True)[:-2]))
    with pytest.raises(BudgetError, match="earlier transcript"):
        open_spending(run, lock).__enter__()
    run.transcript.unlink()
    with pytest.raises(BudgetError, match="earlier transcript"):
        open_spending(run, lock).__enter__()
    copy.unlink()
    (run.released / "moments.safetensors").write_bytes(b"of before")
    with pytest.raises(BudgetError, match="earlier transcript"):
        open_spending(run, lock).__enter__()
    assert not run.transcript.exists()


def test_released_files_are_those_that_the_transcript_paid_for(run, lock):
    path, model = (run.released / f"{name}.safetensors" for name in ("moments", "model"))
    with open_spending(run, lock) as spender:
        slot = spender.release_slot("moments")
        spender.charge(slot)
        path.write_bytes(b"unsettled")  # and the process dies
    with open_spending(run, lock) as spender:  # the spare overwrites it
        slot = spender.release_slot("moments")
        spender.charge(slot)
        path.write_bytes(b"settled")
        spender.settle(slot, path)
    path.write_bytes(b"swapped")
    with pytest.raises(BudgetError, match="not what the transcript settled"):
        open_spending(run, lock).__enter__()
    path.write_bytes(b"settled")
    model.write_bytes(b"of a transcript that is gone")
    with pytest.raises(BudgetError, match=r"model\.safetensors is what an earlier transcript"):
        open_spending(run, lock).__enter__()
    model.unlink()
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[2])
    model.write_bytes(b"averaged over chunks: no line names it")
    with open_spending(run, lock) as spender:
        spender.close()
    assert path.exists() and model.exists()


def test_a_round_waits_for_every_earlier_one(tmp_path):
    names = ["moments", "cells-lloyd-1", "cells"]
    first, *rest = make_slots(chunks=3, spares=0)
    slots = [Slot(i, "moments", name, first.statistic, 5.0) for i, name in enumerate(names, 1)]
    spares = [
        Slot(i, "moments", f"{name}-spare-1", first.statistic, 5.0, spare=True)
        for i, name in enumerate(names, 4)
    ]
    lock = make_lock((*slots, *spares, replace(rest[0], id=7), replace(rest[1], id=8)))
    run = make_run(tmp_path / "b", lock)
    with open_spending(run, lock) as spender:
        for slot in (slots[1], slots[2], spares[1]):
            with pytest.raises(BudgetError, match=r"comes after .*moments\.safetensors"):
                spender.charge(slot)
        spender.charge(slots[0])
        with pytest.raises(BudgetError, match="not settled"):  # charged is not enough
            spender.charge(slots[1])
        spend(spender, run, spares[0])
        spend(spender, run, slots[1])
        spender.charge(lock.slots[6])  # steps of DP-SGD wait for nothing of their own
        spender.charge(lock.slots[7])
    with open_spending(run, lock) as spender:  # known from the transcript too
        spend(spender, run, slots[2])
    assert earlier_files(lock)["cells.safetensors"] == {
        "moments.safetensors",
        "cells-lloyd-1.safetensors",
    }


def test_close_run(run, lock):
    with pytest.raises(MissingError, match="nothing was spent"):
        close_run(run, lock)
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
        spender.charge(lock.slots[2])
    state = close_run(run, lock)
    assert (state.closed, state.settled, state.forfeited) == (True, {1}, {3})
    assert close_run(run, lock) == state
    assert read_transcript(run.transcript).lines[-1]["forfeited"] == [3]


def test_a_full_disk_spends_nothing(run, lock, monkeypatch):
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
        before = run.transcript.read_bytes()

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(transcript_module.os, "write", full)
        with pytest.raises(UsageError, match="No space left"):
            spender.charge(lock.slots[2])
        monkeypatch.undo()
        assert run.transcript.read_bytes() == before
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[2])


def test_a_run_folder_that_is_gone(tmp_path, lock):
    with pytest.raises(UsageError, match="cannot write"):
        open_spending(RunDir(tmp_path / "none"), lock).__enter__()


def test_calibration_hash(run):
    with pytest.raises(MissingError) as caught:
        calibration_hash(run)
    assert "pretrain" in caught.value.hint
    run.calibration.write_text("{}")
    assert len(calibration_hash(run)) == 64


def test_a_forked_child_cannot_outlive_the_lock_unseen(run, lock):
    """The lock belongs to the open file: it is held until the last holder is gone."""
    with open_spending(run, lock):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reader, 1)
            os._exit(0)
    try:
        with pytest.raises(BudgetError, match="another process"):
            open_spending(run, lock).__enter__()
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    with open_spending(run, lock):
        pass


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes read as Linux does")
def test_a_charge_does_not_read_its_past_again(tmp_path):
    """A long session must not pay for its whole past at each charge."""

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    lock = make_lock(make_slots(chunks=300, spares=0, steps=1))
    run = make_run(tmp_path / "run", lock)
    with open_spending(run, lock) as spender:
        spender.charge(lock.slots[0])
        before = bytes_read()
        for slot in lock.slots[1:]:
            spender.charge(slot)
        read = bytes_read() - before
    assert read < run.transcript.stat().st_size / 10
