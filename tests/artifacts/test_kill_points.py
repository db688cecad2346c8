"""Kill the process at every named point: never a spend without a charge, never half a file."""

import json
import os
import signal

import pytest
from spend_driver import drive
from spendkit import make_lock, make_run, make_slots

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.lock import read_lock, write_lock
from dpsynth.artifacts.spending import close_run, read_state
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import ReplayError
from dpsynth.planning.replay import replay

POINTS = [
    "charge:before",
    "charge:before@2",
    "charge:written",
    "charge:written@3",
    "mechanism:done",
    "mechanism:done@2",
    "checkpoint:before@2",
    "checkpoint:written",
    "checkpoint:written@2",
    "artifact:written@3",
    "artifact:renamed@3",
    "artifact:written@4",
    "artifact:renamed@4",
    "settle:before",
    "settle:before@3",
    "settle:written",
    "settle:written@2",
    "close:before",
    "close:written",
]


def touched(run):
    log = run.curator / "seen.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def check_invariants(run, lock):
    """What must be true at any moment, whatever happened."""
    state = read_state(run, lock)
    assert set(touched(run)) <= state.charged, "data was touched without a charge"
    assert len(touched(run)) == len(set(touched(run))), "a slot's data was touched twice"
    for path in [*run.released.glob("*.json"), *run.curator.glob("*.json")]:
        json.loads(path.read_bytes())  # never half a file
    if state.charged:
        report = replay(run.root, partial=True)
        assert report.runs[0].charges == len(state.charged)
        assert report.epsilon <= lock.budget["epsilon"]
    return state


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed(tmp_path, point):
    lock = make_lock(make_slots(chunks=2, spares=1))
    run = make_run(tmp_path / "runs" / "a", lock)
    assert drive(run.root, point) == -signal.SIGKILL
    before = check_invariants(run, lock)
    if not before.closed:
        with pytest.raises(ReplayError):
            replay(run.root)
        assert drive(run.root) == 0
    after = check_invariants(run, lock)
    assert after.closed
    assert before.settled <= after.settled
    assert before.forfeited <= after.forfeited, "a forfeited slot came back"
    assert len(after.forfeited) <= 1, "a crash costs at most one slot"
    assert {3, 4} <= after.charged
    assert after.settled & {1, 2}
    assert replay(run.root).runs[0].closed
    assert not list(run.root.rglob(".*.tmp")) or point == "close:written"
    settled = {line["sha256"] for line in read_transcript(run.transcript).lines if "sha256" in line}
    assert sha256_file(run.released / "moments.json") in settled


def test_a_release_without_spares_is_lost(tmp_path):
    lock = make_lock(make_slots(chunks=1, spares=0))
    run = make_run(tmp_path / "runs" / "a", lock)
    assert drive(run.root, "mechanism:done") == -signal.SIGKILL
    assert drive(run.root) == 3
    check_invariants(run, lock)
    assert close_run(run, lock).closed
    assert replay(run.root).runs[0].forfeited == 1


def test_a_second_whole_run_spends_nothing(tmp_path):
    lock = make_lock(make_slots(chunks=1))
    run = make_run(tmp_path / "runs" / "a", lock)
    assert drive(run.root) == 0
    done = run.transcript.read_bytes()
    assert drive(run.root) == 0  # nothing left: the driver skips what is settled
    assert run.transcript.read_bytes() == done


@pytest.mark.parametrize("point", ["lock:before", "artifact:written", "lock:renamed"])
def test_a_lock_is_whole_or_absent(tmp_path, point):
    old, new = make_lock(), make_lock(make_slots(chunks=5))
    path = tmp_path / "plan.lock.json"
    write_lock(path, old)
    child = os.fork()
    if child == 0:
        os.environ["DPSYNTH_KILL_AT"] = point
        write_lock(path, new)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert read_lock(path) == (new if point == "lock:renamed" else old)
