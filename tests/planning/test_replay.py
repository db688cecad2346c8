"""Replay: what holds, and each way in which it must not."""

import json
import shutil
import zipfile
from dataclasses import replace

import pytest
from spendkit import (
    hand_out,
    make_lock,
    make_run,
    make_slots,
    open_spending,
    reseal,
    spend,
    spend_all,
)

from dpsynth.accounting.compose import epsilon
from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.artifacts.lock import plan_hash, write_lock
from dpsynth.artifacts.manifest import write_manifest
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import DpsynthError, MissingError, ReplayError, UsageError
from dpsynth.planning.replay import CANNOT_PROVE, replay


@pytest.fixture
def lock():
    return make_lock()


@pytest.fixture
def run(tmp_path, lock):
    return spend_all(make_run(tmp_path / "runs" / "a", lock), lock)


def forge(run, change):
    lines = [dict(line) for line in read_transcript(run.transcript).lines]
    run.transcript.write_bytes(reseal(change(lines) or lines))


def test_a_run(run, lock):
    report = replay(run.root)
    (one,) = report.runs
    spent = [slot.event() for slot in lock.slots if not slot.spare]
    assert report.epsilon == one.epsilon == epsilon(spent, 1e-5 - lock.delta_slack).pessimistic
    assert (one.charges, one.settled, one.forfeited, one.closed) == (3, 3, 0, True)
    assert [row.mechanism for row in one.rows] == [
        "moments: class-moments",
        "train: clipped-gradient-sum",
    ]
    assert [row.executions for row in one.rows] == [1, 20]
    assert [row.noise_multiplier for row in one.rows] == [5.0, 2.0]
    assert max(row.epsilon for row in one.rows) < one.epsilon
    assert one.lock_checked
    assert report.ok
    assert "head not checked" in report.verdict
    assert CANNOT_PROVE in report.to_json()["notes"]
    json.dumps(report.to_json(), allow_nan=False)


def test_head(run):
    head = read_transcript(run.transcript).head
    assert replay(run.root, head=head).verdict == "the transcript holds"
    with pytest.raises(ReplayError, match="--head"):
        replay(run.root, head="0" * 64)
    with pytest.raises(UsageError):
        replay(run.root, run.root, head=head)


def test_a_hand_out(run):
    released = hand_out(run, epsilon=0.99)
    assert replay(released).runs[0].head_checked == "manifest.json"
    assert replay(released).verdict == "the transcript holds"
    assert replay(run.root).runs[0].head_checked == "manifest.json"
    (released / "card.md").write_text("# changed\n")
    with pytest.raises(ReplayError, match=r"card\.md"):
        replay(released)
    (one,) = replay(run.root).runs  # the spending holds; the hand-out is not to be used
    assert one.head_checked is None
    assert "card.md" in one.notes[0]


def test_a_manifest_that_states_too_little(run):
    with pytest.raises(ReplayError, match="the manifest states"):
        replay(hand_out(run, epsilon=0.1))


def test_a_run_may_grow_after_a_hand_out(tmp_path, lock):
    run = make_run(tmp_path / "runs" / "a", lock)
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
    hand_out(run, epsilon=0.8)
    spend_all_but_first(run, lock)
    (one,) = replay(run.root).runs
    assert one.head_checked is None
    assert any("older than the transcript" in note for note in one.notes)
    with pytest.raises(ReplayError, match="not closed"):
        replay(run.released)
    both = replay(run.released, run.root, partial=True)
    assert len(both.runs) == 1
    assert "counted once" in both.notes[0]


def spend_all_but_first(run, lock):
    with open_spending(run, lock) as spender:
        for slot in lock.slots[2:]:
            spend(spender, run, slot)
        spender.close()


def test_a_bare_transcript(run, tmp_path):
    shutil.copy(run.transcript, tmp_path / "t.jsonl")
    (one,) = replay(tmp_path / "t.jsonl").runs
    assert not one.lock_checked
    assert any("lock not checked" in note for note in one.notes)
    assert replay(run.transcript).runs[0].lock_checked


def test_a_folder_without_its_lock(run):
    run.lock.unlink()
    with pytest.raises(ReplayError, match=r"plan\.lock\.json"):
        replay(run.root)


def test_single_byte_changes_are_caught(run):
    data, head = run.transcript.read_bytes(), read_transcript(run.transcript).head
    with run.transcript.open("r+b", buffering=0) as file:  # in place: emptying waits for the disk
        for at in {*range(0, len(data), 7), *range(len(data) - 300, len(data))}:
            file.seek(at)  # of all bytes: test_transcript
            file.write(bytes([data[at] ^ 1]))
            with pytest.raises(ReplayError) as caught:
                replay(run.root)
            assert caught.value.exit_code == 4
            file.seek(at)
            file.write(data[at : at + 1])
    assert replay(run.root).ok  # whole again
    for cut in [len(data) - 1, len(data) - 2, *(i + 1 for i, b in enumerate(data[:-1]) if b == 10)]:
        run.transcript.write_bytes(data[:cut])
        with pytest.raises(ReplayError):
            replay(run.root)
        if cut < len(data) - 1:
            with pytest.raises(ReplayError):  # --head catches what --partial would let pass
                replay(run.root, partial=True, head=head)


def test_partial_and_torn(run):
    data = run.transcript.read_bytes()
    whole = b"".join(data.splitlines(keepends=True)[:-1])
    run.transcript.write_bytes(whole)
    with pytest.raises(ReplayError, match="not closed") as caught:
        replay(run.root)
    assert "--partial" in caught.value.hint
    assert not replay(run.root, partial=True).runs[0].closed
    run.transcript.write_bytes(whole + b'{"charged":3,"forf')
    with pytest.raises(ReplayError, match="torn"):
        replay(run.root)
    assert "torn" in replay(run.root, partial=True).runs[0].notes[0]
    run.transcript.write_bytes(data[:-1])
    with pytest.raises(ReplayError, match="lacks its end"):
        replay(run.root)
    assert replay(run.root, partial=True).runs[0].closed
    run.transcript.write_bytes(b"")
    with pytest.raises(ReplayError, match="no whole line"):
        replay(run.root, partial=True)


def change_charge(**fields):
    return lambda lines: lines[1].update(fields)


@pytest.mark.parametrize(
    "change",
    [
        change_charge(noise_std=50.0),
        change_charge(noise_std=0.5),
        change_charge(slot=2),
        change_charge(slot=77),
        lambda ls: [line.update(slot=True) for line in ls if line.get("slot") == 1] and None,
        change_charge(stage="train"),
        change_charge(mechanism="other"),
        change_charge(rate=0.1, steps=1),
        lambda ls: ls[1]["statistic"].update(dim=9),
        lambda ls: ls[1]["statistic"].update(count=0.06),
        lambda ls: ls[0].update(lock_hash="0" * 64),
        lambda ls: ls[0].update(plan_hash="0" * 64),
        lambda ls: ls[0]["budget"].update(epsilon=100.0),
        lambda ls: ls[0].update(delta_slack=1e-9),
        lambda ls: ls[0].update(noise_source="UNSAFE-seed"),
        lambda ls: ls[1].update(noise_source="UNSAFE-seed"),
        lambda ls: ls[1].update(calibration_hash="d" * 64),
    ],
)
def test_a_forger_who_rehashes_meets_the_lock(run, change):
    forge(run, change)
    with pytest.raises(ReplayError):
        replay(run.root)


@pytest.mark.parametrize(
    "change",
    [
        change_charge(noise_std=0.0),
        change_charge(noise_std=-5.0),
        change_charge(noise_std="5"),
        change_charge(noise_std=None),
        change_charge(noise_std=0.5),  # over the budget
        change_charge(statistic=None),
        change_charge(statistic={"kind": "free-lunch"}),
        change_charge(statistic={"kind": ["x"]}),
        change_charge(rate=0.1),
        change_charge(steps=3),
        change_charge(rate=2.0, steps=3),
        change_charge(noise_std=1e300),
        change_charge(rate=1e-300, steps=1),
        change_charge(calibration_hash=[]),
        lambda ls: ls[2].update(sha256=[]),
        lambda ls: ls[0]["budget"].update(unit="user"),
        lambda ls: ls[0]["budget"].update(epsilon=10**400),
        lambda ls: ls[0].update(budget=None),
        lambda ls: ls[0]["budget"].update(delta=0.0),
        lambda ls: ls[0]["budget"].update(epsilon=-1.0),
        lambda ls: ls[0]["budget"].update(epsilon=None),
        lambda ls: ls[0]["budget"].update(adjacency="replace-one"),
        lambda ls: ls[0].update(delta_slack=1.0),
        lambda ls: ls[0].update(delta_slack=-1e-6),
    ],
)
def test_a_bare_transcript_is_held_to_its_own_budget(run, tmp_path, change):
    forge(run, change)
    shutil.move(run.transcript, tmp_path / "t.jsonl")
    with pytest.raises(ReplayError):
        replay(tmp_path / "t.jsonl")


def test_a_forged_lock_and_transcript_meet_the_head(run, lock):
    """Someone who rewrites everything in the folder is caught by the published head alone."""
    head = read_transcript(run.transcript).head
    forge(run, lambda ls: [*ls[:3], {**ls[-1], "charged": 1, "settled": 1}])
    assert replay(run.root).runs[0].charges == 1
    with pytest.raises(ReplayError, match="--head"):
        replay(run.root, head=head)


def test_a_lock_that_does_not_follow_from_its_own_plan(tmp_path, lock):
    """Every hash is right; the plan that it shows is not what its slots spend."""
    slots = [replace(slot, statistic=ClippedGradientSum(0.5)) for slot in lock.slots[2:]]
    forged = {
        "clip": replace(lock, slots=(*lock.slots[:2], *slots), lock_hash=""),
        "noise": replace(lock, by_stage={**lock.by_stage, "train": {"noise_multiplier": 3.0}},
                         lock_hash=""),
        "rate": replace(lock, slots=(*lock.slots[:3], replace(lock.slots[3], rate=0.01)),
                        lock_hash=""),
        "budget": replace(lock, budget={**lock.budget, "epsilon": 9.0}, lock_hash=""),
        "slack": replace(lock, delta_slack=0.0, lock_hash=""),
        "stage": replace(lock, by_stage={}, lock_hash=""),
    }  # fmt: skip
    for how, one in forged.items():
        run = spend_all(make_run(tmp_path / how, one), one)
        with pytest.raises(ReplayError, match="do not follow from the plan"):
            replay(run.root)
    foreign = {**lock.facts, "stages": {"votes": {}}}
    other = replace(lock, facts=foreign, plan_hash=plan_hash(foreign), lock_hash="")
    run = spend_all(make_run(tmp_path / "foreign", other), other)
    with pytest.raises(ReplayError, match="do not follow from the plan"):
        replay(run.root)


def test_discrete_noise_is_paid_for(run, tmp_path):
    """At a large epsilon the share of delta is no trifle: (1 + e^epsilon) n TV."""
    forge(run, lambda ls: ls[0].update(delta_slack=0.0))
    shutil.move(run.transcript, tmp_path / "t.jsonl")
    with pytest.raises(ReplayError, match="delta_slack"):
        replay(tmp_path / "t.jsonl")


def test_what_no_charge_paid_for(tmp_path, lock):
    run = make_run(tmp_path / "a", lock)
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
        spender.close()
    (run.released / "model.safetensors").write_bytes(b"of an earlier transcript")
    for target in (run.root, hand_out(run)):
        with pytest.raises(ReplayError, match="no charge that paid"):
            replay(target)


def test_a_hand_out_without_its_manifest(run):
    released = hand_out(run)
    (released / "manifest.json").unlink()
    with pytest.raises(ReplayError, match=r"manifest\.json is missing"):
        replay(released)
    assert replay(run.root).ok


def test_an_over_budget_lock(tmp_path):
    lock = make_lock(budget={"epsilon": 0.5})
    run = spend_all(make_run(tmp_path / "a", lock), lock)
    with pytest.raises(ReplayError, match=r"compose to epsilon 0\.\d+, over the budget 0.5"):
        replay(run.root)


def test_an_unsafe_seed_is_loud(tmp_path):
    lock = make_lock(seed=1)
    run = spend_all(make_run(tmp_path / "a", lock), lock)
    report = replay(run.root)
    assert report.unsafe
    assert not report.ok
    assert "UNSAFE" in report.verdict


def test_several_runs_add_up(tmp_path, run):
    other_lock = make_lock(make_slots(chunks=1), name="other")
    other = spend_all(make_run(tmp_path / "runs" / "b", other_lock), other_lock)
    report = replay(run.root, other.root)
    assert report.epsilon == pytest.approx(sum(one.epsilon for one in report.runs))
    assert report.delta == pytest.approx(2e-5)
    assert max(one.epsilon for one in report.runs) < report.joint < report.epsilon
    assert replay(run.root, other.root, budget=(2.0, 2e-5)).ok
    for budget in ((report.epsilon * 0.999, None), (2.0, 1.9e-5)):
        with pytest.raises(ReplayError, match="--budget"):
            replay(run.root, other.root, budget=budget)


def test_one_run_told_in_two_ways(tmp_path, run, lock):
    fork = make_run(tmp_path / "elsewhere" / "a", lock)
    lines = run.transcript.read_bytes().splitlines(keepends=True)
    fork.transcript.write_bytes(b"".join(lines[:3]))
    with open_spending(fork, lock) as spender:
        spend(spender, fork, lock.slots[1])
        spender.close()
    with pytest.raises(ReplayError, match="told in two ways"):
        replay(run.root, fork.root)


def test_files_that_lines_name(run):
    run.calibration.write_text("{}")
    with pytest.raises(ReplayError, match=r"calibration\.json"):
        replay(run.root)
    run.calibration.unlink()
    (run.released / "moments.safetensors").write_bytes(b"other")
    with pytest.raises(ReplayError, match=r"moments\.safetensors"):
        replay(run.root)
    (run.released / "moments.safetensors").write_bytes(b"moments")
    assert replay(run.root).ok


def test_calibration_that_fits(tmp_path, lock):
    run = make_run(tmp_path / "a", lock)
    write_json(run.calibration, {"radius": 1.0})
    with open_spending(run, lock, calibration=sha256_file(run.calibration)) as spender:
        spend(spender, run, lock.slots[0])
        spender.close()
    assert replay(run.root).ok


def test_an_edited_lock(run, lock):
    write_lock(run.lock, make_lock(make_slots(chunks=3)))
    with pytest.raises(ReplayError, match="the lock is not the one"):
        replay(run.root)


def test_what_is_not_there(tmp_path, run):
    with pytest.raises(MissingError, match="does not exist"):
        replay(tmp_path / "none")
    with pytest.raises(MissingError, match="nothing was spent"):
        replay(run.public)
    with pytest.raises(UsageError):
        replay()
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w") as folder:
        folder.writestr("transcript.jsonl", "{}")
    with pytest.raises(UsageError, match="is a zip") as refused:
        replay(packed)
    assert "unpack" in refused.value.hint


def test_a_manifest_with_another_head(run):
    released = hand_out(run)
    other = json.loads((released / "manifest.json").read_text())
    write_json(released / "manifest.json", {**other, "head": "0" * 64})
    with pytest.raises(ReplayError, match="head"):
        replay(released)
    with pytest.raises(ReplayError, match="head"):
        replay(run.root)
    write_manifest(released)
    replay(released)


def test_a_part_of_the_lock_never_spends_more_than_all_of_it(tmp_path, monkeypatch):
    """Grids differ; the pessimistic value of fewer charges may be a hair higher."""
    from dpsynth.planning import charges
    from dpsynth.planning import replay as module

    lock = make_lock(budget={"epsilon": 0.9})
    run = make_run(tmp_path / "a", lock)
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
        spender.close()
    real = module.epsilon

    def coarse(events, delta):
        events = list(events)
        bounds = real(events, delta)
        return bounds if len(events) > 1 else type(bounds)(5.0, bounds.optimistic, bounds.grid)

    monkeypatch.setattr(module, "epsilon", coarse)
    monkeypatch.setattr(charges, "epsilon", coarse)
    with pytest.raises(DpsynthError):
        replay(run.root)  # the whole lock, spare included, is over 0.9
    lock = make_lock(budget={"epsilon": 1.3})
    run = make_run(tmp_path / "b", lock)
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
        spender.close()
    assert replay(run.root).epsilon < 1.3
