"""`stages.evaluation` in plans, locks, transcripts and in what comes next."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from plan_texts import SMALL, TRAINED, changed
from spendkit import make_run, open_spending, reseal, spend, spend_all

from dpsynth.accounting.statistics import ConfusionMatrix, sensitivity
from dpsynth.artifacts.lock import read_lock, write_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import close_run
from dpsynth.artifacts.transcript import Transcript, read_transcript
from dpsynth.errors import BudgetError, PlanError, ReplayError
from dpsynth.planning.replay import replay
from dpsynth.planning.steps import status
from dpsynth.planning.table import as_json, render, rows
from dpsynth.planning.verify import verify
from dpsynth.planning.workload import delta_slack, follows
from dpsynth.planning.yaml_plan import load_plan, parse_plan, plan_hash
from dpsynth.released.card import build_card

EVALUATED = changed("  moments: {covariance: class}\n", "  moments: {}\n  evaluation: {}\n")
# Every record in every step: composing plain Gaussians takes no time.
WHOLE = changed("rate: 0.05", "rate: 1.0", TRAINED)
ALL = changed("  train:", "  evaluation: {weight: 0.3, spares: 1}\n  train:", WHOLE)
SCORES = {
    "accuracy": {"value": 0.9, "error": 0.02, "low": 0.86, "high": 0.94},
    "records": {"value": 201.4, "error": 4.0},
    "samples": {"count": 20, "sha256": "0" * 64},
    "level": 0.95,
    "of_samples": "samples",
    "per_class": [
        {
            "class": name,
            "recall": {"value": None, "error": None, "low": 0.0, "high": 1.0},
            "precision": {"value": 0.5, "error": 0.1, "low": 0.3, "high": 0.7},
        }
        for name in ("a", "b")
    ],
}


def test_a_plan_without_the_stage_keeps_its_hash_and_lock():
    """As versions before this stage computed it; its absence is nowhere in the facts."""
    plan = parse_plan(SMALL)
    expected = "038ac8689fb92e0eec7da31d31f9d5fdd3bb8e553e2e0314e530f88d4ee1e9ce"
    assert plan_hash(plan) == expected
    lock = verify(plan)
    assert "evaluation" not in lock.facts["stages"]
    assert set(lock.by_stage) == {"moments"}
    assert lock.last_stage == "moments"
    assert verify(parse_plan(WHOLE)).last_stage == "train"


@pytest.fixture(scope="module")
def lock():
    return verify(parse_plan(ALL))


def test_the_matrix_is_the_last_slot_and_has_its_share(lock):
    assert [slot.name for slot in lock.slots] == [
        "moments", "train-0001", "train-0002", "confusion", "confusion-spare-1",
    ]  # fmt: skip
    assert lock.last_stage == "evaluation"
    row, matrix = lock.by_stage["evaluation"], lock.slots[3].statistic
    assert row["share"] == pytest.approx(0.3 / 1.15)
    assert isinstance(matrix, ConfusionMatrix)
    assert sensitivity(matrix) == pytest.approx(1.0)
    assert (matrix.cell**2, matrix.total**2) == pytest.approx((0.8, 0.2))
    assert matrix.classes == 2
    assert lock.slots[3].noise_std >= row["noise_multiplier"] * sensitivity(matrix)
    assert 1.99 < lock.epsilon <= 2.0
    assert follows(lock, parse_plan(ALL))
    assert "evaluation" in {line[0] for line in rows(lock)}
    assert as_json(lock)["rounds"]["evaluation"] == []
    said = str(render(lock, "here").renderables[-1])
    assert "evaluation: 2 x 2 cells, each +- " in said


def test_the_stage_takes_from_the_others():
    with_it, without = verify(parse_plan(EVALUATED)), verify(parse_plan(SMALL))
    more, less = (one.by_stage["moments"]["noise_multiplier"] for one in (with_it, without))
    # Gaussians of shares 10/11 and 1/11 of one 1/sigma^2.
    assert more == pytest.approx(less * math.sqrt(1.1), rel=1e-3)
    assert delta_slack(parse_plan(EVALUATED)) > delta_slack(parse_plan(SMALL))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("evaluation: {}", "evaluation: {weight: 0}", "above 0"),
        ("evaluation: {}", "evaluation: {spares: 9}", "at most 3"),
        ("evaluation: {}", "evaluation: {probe: big}", "unknown key `stages.evaluation.probe`"),
        ("evaluation: {}", "evaluation: {blocks: {cell: -1}}", "above 0"),
        ("  moments: {}\n", "", "declare at least one stage"),
    ],
)
def test_a_wrong_stage_is_refused_with_its_line(old, new, said):
    with pytest.raises(PlanError, match=said):
        parse_plan(changed(old, new, EVALUATED))


def test_units_need_held_out_records_that_name_them():
    unit = changed("  delta: 1e-5\n", "  delta: 1e-5\n  unit: {column: p, most: 4}\n", EVALUATED)
    assert parse_plan(unit).budget.column is not None
    source = "{by: source, source: {kind: npz, path: other.npz}}"
    with pytest.raises(PlanError, match="name no unit") as found:
        parse_plan(changed("{by: hash, fraction: 0.2}", source, unit))
    assert "by: hash" in found.value.hint
    parse_plan(changed("{by: hash, fraction: 0.2}", source, EVALUATED))


def test_the_shipped_plan_has_the_stage(pytestconfig):
    plan = load_plan(pytestconfig.rootpath / "plans/digits-evaluated.yaml")
    assert plan.stages.evaluation is not None


def test_replay_composes_the_matrix_from_its_charge(tmp_path, lock):
    run = spend_all(make_run(tmp_path / "run", lock), lock)
    report = replay(run.root)
    assert report.epsilon <= lock.epsilon
    row = report.runs[0].rows[-1]
    assert row.mechanism == "evaluation: confusion-matrix"
    assert row.sensitivity == pytest.approx(1.0)
    assert row.noise_multiplier == pytest.approx(lock.by_stage["evaluation"]["noise_multiplier"])
    text = build_card(lock, read_transcript(run.transcript), {}, [], SCORES)
    assert "accuracy **0.900 (0.860 to 0.940)**" in text
    assert "| a | unknown (0.000 to 1.000) | 0.500 (0.300 to 0.700) |" in text
    drawn = build_card(lock, Transcript((), b"", 0), {}, [], SCORES | {"of_samples": None})
    assert "not those in here" in drawn


@pytest.mark.parametrize(
    "forge",
    [
        lambda charge: charge["statistic"].update(cell=0.1),
        lambda charge: charge["statistic"].update(classes=3),
        lambda charge: charge.update(noise_std=charge["noise_std"] / 2),
        lambda charge: charge.update(stage="moments"),
    ],
)
def test_a_forged_charge_does_not_hold(tmp_path, lock, forge):
    run = spend_all(make_run(tmp_path / "run", lock), lock)
    lines = [json.loads(line) for line in run.transcript.read_text().splitlines()]
    (charge,) = [line for line in lines if line.get("mechanism") == "confusion"]
    forge(charge)
    run.transcript.write_bytes(reseal(lines))
    with pytest.raises(ReplayError):
        replay(run.root)


def test_a_lock_that_favours_the_matrix_does_not_follow(tmp_path, lock):
    slots = tuple(
        dataclasses.replace(slot, statistic=ConfusionMatrix(0.9, 0.1, 2))
        if slot.stage == "evaluation"
        else slot
        for slot in lock.slots
    )
    forged = dataclasses.replace(lock, slots=slots, lock_hash="")
    run = spend_all(make_run(tmp_path / "run", forged), forged)
    with pytest.raises(ReplayError, match="do not follow"):
        replay(run.root)


def done(run: RunDir) -> dict[str, bool]:
    return {step.name: step.done for step in status(run).steps}


def planned(folder: Path, lock) -> RunDir:
    run = make_run(folder / "run", lock)
    write_lock(run.lock, lock)
    return run


def test_status_follows_the_stage_to_its_end(tmp_path, lock):
    run = planned(tmp_path, lock)
    assert list(done(run))[-4:] == ["train", "sample", "release-evaluation", "evaluate"]
    moments, first, second, matrix, spare = lock.slots
    with open_spending(run, lock) as spender:
        for slot in (moments, first, second):
            spend(spender, run, slot)
    assert not done(run)["train"]  # its model is not there yet
    (run.released / "model.safetensors").write_bytes(b"weights")
    assert done(run)["train"]
    assert not done(run)["release-evaluation"]
    with open_spending(run, lock) as spender:
        spender.charge(matrix)  # and a crash: the spare is left
    assert not done(run)["release-evaluation"]
    with open_spending(run, lock) as spender:
        spender.charge(spare)
    assert "release-evaluation" not in done(run)
    assert done(run)["close"] is False
    assert not status(run).release_lost  # the images are there: nothing to plan anew
    close_run(run, lock, without_model=True)
    assert "close" not in done(run)
    assert read_lock(run.lock) == lock


def test_a_settled_matrix_that_was_not_closed_is_closed_next(tmp_path):
    lock = verify(parse_plan(EVALUATED))
    run = planned(tmp_path, lock)
    spend_all(run, lock, close=False)
    assert done(run)["release-evaluation"]
    assert done(run)["close"] is False
    with open_spending(run, lock) as spender:
        with pytest.raises(BudgetError, match="released already"):
            spender.release_slot("confusion")
        spender.close()
    assert "close" not in done(run)


def test_a_forfeited_matrix_names_its_own_spares(tmp_path):
    lock = verify(parse_plan(EVALUATED))
    run = planned(tmp_path, lock)
    with open_spending(run, lock) as spender:
        spender.charge(lock.slots[-1])
    with open_spending(run, lock) as spender, pytest.raises(BudgetError) as found:
        spender.release_slot("confusion")
    assert "stages.evaluation.spares: 1" in found.value.hint
