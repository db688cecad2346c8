"""What a spending command does, small, for tests that kill it.

The artifact holds what the mechanism "saw": `curator/seen.log` gets a line, flushed, when a
mechanism touches the data, so that the test can compare touches with charges.
"""

import os
from pathlib import Path

from spendkit import open_spending

from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.files import write_json
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import DpsynthError


def touch_data(run, slot):
    with (run.curator / "seen.log").open("a") as log:
        log.write(f"{slot.id}\n")
        log.flush()
        os.fsync(log.fileno())


def run_slot(run, spender, slot, folder):
    spender.charge(slot)
    touch_data(run, slot)
    reach("mechanism:done")
    path = folder / f"{slot.release}.json"
    reach("checkpoint:before")
    write_json(path, {"slot": slot.id, "filler": "x" * 10_000})
    reach("checkpoint:written")
    spender.settle(slot, path)


def drive(root: Path, kill_at: str = "") -> int:
    """Spend what is left of a run in a child process. Its exit code; minus the signal if killed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.environ["DPSYNTH_KILL_AT"] = kill_at
        spend_what_is_left(RunDir.open(root))
        code = 0
    except DpsynthError as error:
        code = error.exit_code
    finally:
        os._exit(code)


def spend_what_is_left(run):
    lock = read_lock(run.lock)
    with open_spending(run, lock) as spender:
        moments = {slot.id for slot in lock.stage_slots("moments")}
        if not moments & spender.state.settled:
            run_slot(run, spender, spender.release_slot("moments"), run.released)
        for slot in spender.free_slots("train"):
            run_slot(run, spender, slot, run.curator)
        spender.close()
