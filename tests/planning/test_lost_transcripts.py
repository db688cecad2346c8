"""What `status` says of a run whose transcript was lost: nothing, rather than "nothing spent"."""

import pytest
from clikit import typed
from spendkit import hand_out, make_lock, make_run, spend_all

from dpsynth.errors import BudgetError, UsageError
from dpsynth.planning.steps import status
from dpsynth.planning.verify import make_run as plan_run

LOST = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "garbled": lambda path: path.write_bytes(b"no line of a transcript"),
    "cut": lambda path: path.write_bytes(path.read_bytes().splitlines(keepends=True)[0]),
}


@pytest.mark.parametrize("loss", LOST)
@pytest.mark.parametrize("handed", [True, False])
def test_a_lost_transcript_is_not_taken_for_nothing_spent(tmp_path, loss, handed):
    lock = make_lock()
    run = spend_all(make_run(tmp_path / "run", lock), lock)
    (run.released / "model.safetensors").write_bytes(b"model")
    if handed:
        hand_out(run)
    assert status(run).state.charged
    LOST[loss](run.transcript)
    with pytest.raises(BudgetError, match="what an earlier transcript") as caught:
        status(run)
    assert "restore transcript.jsonl" in caught.value.hint


def test_status_and_report_refuse_it_and_hand_outs_on_the_command_line(tmp_path):
    lock = make_lock()
    run = spend_all(make_run(tmp_path / "run", lock), lock)
    hand_out(run)
    done = typed(
        tmp_path, "status run", "status run/released", "report run/released",
        "report run/plan.lock.json", "close run/released", "audit run/released",
        "evaluate run/released",
    )  # fmt: skip
    assert done[0].code == 0, done[0].err
    for refused in done[1:]:
        assert refused.code == 2 and not refused.out
        assert "name the run folder: run" in refused.err
        assert "dpsynth plan" not in refused.err
    assert not (run.released / "curator").exists()
    run.transcript.unlink()
    for lost in typed(tmp_path, "status run", "report run"):
        assert lost.code == 3 and not lost.out
        assert "and that is gone" in lost.err
    assert not (run.curator / "report.html").exists()


def test_a_hand_out_is_not_planned_into(tmp_path, pytestconfig):
    lock = make_lock()
    run = spend_all(make_run(tmp_path / "run", lock), lock)
    hand_out(run)
    with pytest.raises(UsageError, match="room of the run"):
        plan_run(pytestconfig.rootpath / "plans/digits.yaml", run.released)
