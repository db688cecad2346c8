"""Calibrated plans keep their budget; a lock is trusted for nothing but its noise."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_texts import SMALL, TRAINED, changed

from dpsynth.accounting import gaussian
from dpsynth.accounting.compose import epsilon
from dpsynth.accounting.statistics import sensitivity
from dpsynth.artifacts.ledger import Ledger, dataset_text
from dpsynth.artifacts.lock import Lock, read_lock, write_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import spending
from dpsynth.errors import BudgetError, MissingError, PlanError, UsageError
from dpsynth.planning import sources, table
from dpsynth.planning.steps import status
from dpsynth.planning.verify import VerifiedPlan, load_verified, make_run, verify, warnings
from dpsynth.planning.workload import active_weights, block_weights, coordinates, noise_std, slots
from dpsynth.planning.yaml_plan import load_plan, parse_plan

PLANS = sorted((Path(__file__).parents[2] / "plans").glob("*.yaml"))


def write_plan(folder: Path, text: str = SMALL) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


def planned(folder: Path, text: str = SMALL) -> Path:
    """A planned run of `text`."""
    return make_run(write_plan(folder, text), folder / "runs" / "r").run.root


def charge(run: Path, number: int = 1) -> None:
    folder = RunDir.open(run)
    lock = read_lock(folder.lock)
    with spending(
        folder, lock, calibration_hash="0" * 64, noise_source=lock.noise_source
    ) as spender:
        spender.charge(lock.slots[number - 1])


def recomposed(lock: Lock) -> float:
    delta = lock.budget["delta"] - lock.delta_slack
    return epsilon([slot.event() for slot in lock.slots], delta).pessimistic


@pytest.mark.parametrize("path", PLANS, ids=[path.stem for path in PLANS])
def test_every_shipped_plan_verifies(path: Path) -> None:
    lock = verify(load_plan(path))
    assert lock.facts["name"] == path.stem
    assert recomposed(lock) == lock.epsilon <= lock.budget["epsilon"]


def test_one_stage_meets_the_closed_form() -> None:
    lock = verify(parse_plan(SMALL))
    row = lock.by_stage["moments"]
    exact = gaussian.sigma(2.0, 1e-5)
    assert exact <= row["noise_multiplier"] <= exact * (1 + 2e-3)
    assert lock.slots[0].noise_std >= row["noise_multiplier"] * sensitivity(lock.slots[0].statistic)
    assert 1.99 < lock.epsilon <= 2.0


def test_the_noise_split_scales_all_stages_together() -> None:
    plan = parse_plan(TRAINED)
    lock = verify(plan)
    assert 1.99 < lock.epsilon <= 2.0
    moments, train = lock.by_stage["moments"], lock.by_stage["train"]
    assert moments["share"] == pytest.approx(0.2 / 0.85)
    heavier = verify(parse_plan(changed("weight: 0.2", "weight: 2.0", TRAINED)))
    assert heavier.by_stage["moments"]["noise_multiplier"] < moments["noise_multiplier"]
    assert heavier.by_stage["train"]["noise_multiplier"] > train["noise_multiplier"]


def test_the_epsilon_split_is_the_papers() -> None:
    """StraightDP, section 5: weights 0.2 and 0.65 spend 0.235 and 0.765 of epsilon."""
    lock = verify(parse_plan("split: epsilon\n" + TRAINED))
    assert lock.by_stage["moments"]["epsilon_alone"] == pytest.approx(2 * 0.2 / 0.85, rel=2e-3)
    assert lock.by_stage["train"]["epsilon_alone"] == pytest.approx(2 * 0.65 / 0.85, rel=1e-2)
    assert lock.epsilon < 0.9 * 2.0
    assert "of 2" in "\n".join(table._footnotes(lock, "x"))


def test_slots_are_numbered_and_chunked() -> None:
    text = changed("moments: {weight: 0.2}", "moments: {weight: 0.2, spares: 2}", TRAINED)
    found = slots(parse_plan(text), {"moments": 2.0, "train": 3.0})
    assert [slot.id for slot in found] == [1, 2, 3, 4, 5]
    assert [slot.name for slot in found] == [
        "moments", "moments-spare-1", "moments-spare-2", "train-0001", "train-0002",
    ]  # fmt: skip
    assert [slot.steps for slot in found] == [None, None, None, 20, 10]
    assert [slot.spare for slot in found] == [False, True, True, False, False]
    assert {slot.release for slot in found[:3]} == {"moments"}
    assert found[3].noise_std == 3.0 * 0.5


def test_the_papers_release_is_two_mechanisms_with_equal_multipliers() -> None:
    text = changed("covariance: class", "covariance: shared, sensitivity: paper, spares: 1")
    lock = verify(parse_plan(text))
    names = ["moments-sums", "moments-second", "moments-sums-spare-1", "moments-second-spare-1"]
    assert [slot.name for slot in lock.slots] == names
    assert {round(s.noise_std / sensitivity(s.statistic), 9) for s in lock.slots} == {
        round(lock.by_stage["moments"]["noise_multiplier"], 9)
    }
    assert [sensitivity(slot.statistic) for slot in lock.slots[:2]] == [2.0, 2 / 1000]


def test_spares_are_paid_for() -> None:
    base = verify(parse_plan(SMALL)).by_stage["moments"]["noise_multiplier"]
    spared = verify(parse_plan(changed("covariance: class", "covariance: class, spares: 3")))
    assert spared.by_stage["moments"]["noise_multiplier"] == pytest.approx(2 * base, rel=1e-3)


def test_huge_and_tiny_weights_normalise() -> None:
    text = TRAINED.replace("weight: 0.2", "weight: 1e308").replace("weight: 0.65", "weight: 1e308")
    assert active_weights(parse_plan(text)) == {"moments": 0.5, "train": 0.5}


def test_too_many_slots_are_refused() -> None:
    with pytest.raises(PlanError, match="slots"):
        verify(parse_plan(changed("steps: 30, chunk: 20", "steps: 900000, chunk: 1", TRAINED)))


def test_a_delta_that_discrete_noise_uses_up_is_refused() -> None:
    with pytest.raises((PlanError, UsageError)):
        verify(parse_plan(changed("delta: 1e-5", "delta: 1e-17")))


def test_a_large_delta_warns() -> None:
    assert not warnings(parse_plan(SMALL))
    assert "1/(10 N)" in warnings(parse_plan(changed("delta: 1e-5", "delta: 1e-3")))[0]


@settings(max_examples=5, deadline=None)
@given(
    budget=st.floats(0.05, 8.0),
    delta=st.sampled_from([1e-4, 1e-5, 1e-7]),
    weight=st.floats(0.05, 20.0),
    rate=st.sampled_from([0.01, 0.1, 1.0]),
    steps=st.integers(1, 60),
    split=st.sampled_from(["noise", "epsilon"]),
    spares=st.integers(0, 2),
)
def test_no_calibrated_plan_is_over_budget(
    *, budget: float, delta: float, weight: float, rate: float, steps: int, split: str, spares: int
) -> None:
    text = (
        TRAINED.replace("epsilon: 2.0", f"epsilon: {budget!r}")
        .replace("delta: 1e-5", f"delta: {delta!r}")
        .replace("{weight: 0.2}", f"{{weight: {weight!r}, spares: {spares}}}")
        .replace("rate: 0.05, steps: 30", f"rate: {rate!r}, steps: {steps}")
    )
    lock = verify(parse_plan(f"split: {split}\n{text}"))
    assert lock.optimistic <= lock.epsilon <= budget
    assert recomposed(lock) <= budget
    if split == "noise":
        assert lock.epsilon > 0.97 * budget


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(1e-6, 1e6))
def test_absolute_noise_never_rounds_below_the_multiplier(multiplier: float, clip: float) -> None:
    from dpsynth.accounting.statistics import ClippedGradientSum

    assert noise_std(ClippedGradientSum(clip), multiplier) / clip >= multiplier


def test_blocks_share_one_unit_of_sensitivity() -> None:
    plan = parse_plan(SMALL)
    assert plan.stages.moments is not None
    a, b, c = block_weights(plan.stages.moments.blocks)
    assert math.hypot(a, b, c) == pytest.approx(1.0, abs=1e-15)
    assert (a / b) ** 2 == pytest.approx(0.05 / 0.55)
    lock = verify(plan)
    assert coordinates(lock.slots[0].statistic) == 2 * (1 + 4 + 10)


# Locks and runs


def test_the_lock_round_trips_and_holds_no_path(tmp_path: Path) -> None:
    run = planned(tmp_path, TRAINED)
    lock = read_lock(run / "plan.lock.json")
    assert lock == verify(load_plan(tmp_path / "plan.yaml"))
    raw = (run / "plan.lock.json").read_text()
    assert "secret-records" not in raw
    assert str(tmp_path) not in raw
    assert (run / "curator").stat().st_mode & 0o777 == 0o700


def test_load_verified_gives_absolute_paths(tmp_path: Path) -> None:
    verified = load_verified(planned(tmp_path))
    assert verified.plan.private.source.model_dump()["path"] == tmp_path / "secret-records.npz"
    assert verified.noise_source == "os-entropy"


def test_only_load_verified_makes_a_verified_plan(tmp_path: Path) -> None:
    verified = load_verified(planned(tmp_path))
    with pytest.raises(BudgetError):
        VerifiedPlan(verified.plan, verified.lock, verified.run, object())
    with pytest.raises((BudgetError, TypeError, ValueError)):
        dataclasses.replace(verified, plan=verified.plan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        verified.plan = verified.plan  # type: ignore[misc]


@pytest.mark.parametrize("how", ["less noise", "more budget", "fewer slots", "no slack", "relaxed"])
def test_a_forged_lock_is_refused(tmp_path: Path, how: str) -> None:
    """Forged with a matching hash of its own; the plan still is what it was."""
    run = planned(tmp_path, TRAINED)
    path = run / "plan.lock.json"
    lock = read_lock(path)
    slots_now, rows = list(lock.slots), {k: dict(v) for k, v in lock.by_stage.items()}
    if how in {"less noise", "relaxed"}:
        slots_now[0] = dataclasses.replace(slots_now[0], noise_std=slots_now[0].noise_std / 2)
    if how == "relaxed":
        rows["moments"]["noise_multiplier"] /= 2
    forged = dataclasses.replace(
        lock,
        lock_hash="",
        by_stage=rows,
        slots=tuple(slots_now[:-1] if how == "fewer slots" else slots_now),
        budget=lock.budget | ({"epsilon": 9.0} if how == "more budget" else {}),
        delta_slack=0.0 if how == "no slack" else lock.delta_slack,
    )
    write_lock(path, forged)
    with pytest.raises(BudgetError) as caught:
        load_verified(run)
    assert caught.value.exit_code == 3


def test_a_plan_changed_before_any_charge_is_planned_again(tmp_path: Path) -> None:
    run = planned(tmp_path)
    write_plan(tmp_path, changed("epsilon: 2.0", "epsilon: 1.5"))
    with pytest.raises(PlanError) as caught:
        load_verified(run)
    assert caught.value.hint.startswith("dpsynth plan")
    again = make_run(tmp_path / "plan.yaml", run)
    assert again.lock.budget["epsilon"] == 1.5
    assert load_verified(run).lock == again.lock


def test_a_plan_changed_after_a_charge_is_refused(tmp_path: Path) -> None:
    run = planned(tmp_path)
    charge(run)
    before = (run / "plan.lock.json").read_bytes()
    write_plan(tmp_path, "# the same plan, with a comment\n" + SMALL)
    make_run(tmp_path / "plan.yaml", run)
    load_verified(run)
    write_plan(tmp_path, changed("epsilon: 2.0", "epsilon: 1.5"))
    for attempt in (lambda: make_run(tmp_path / "plan.yaml", run), lambda: load_verified(run)):
        with pytest.raises(BudgetError) as caught:
            attempt()
        assert caught.value.exit_code == 3
    assert (run / "plan.lock.json").read_bytes() == before


def test_an_unsafe_seed_is_fixed_by_the_lock(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    verified = make_run(plan, tmp_path / "r", unsafe_seed=7)
    assert verified.noise_source == "UNSAFE-seed"
    charge(tmp_path / "r")
    with pytest.raises(BudgetError):
        make_run(plan, tmp_path / "r")


def test_a_transcript_without_its_lock_is_refused(tmp_path: Path) -> None:
    run = planned(tmp_path)
    charge(run)
    (run / "plan.lock.json").unlink()
    with pytest.raises(BudgetError):
        make_run(tmp_path / "plan.yaml", run)
    with pytest.raises(MissingError):
        load_verified(run)


def test_a_lost_plan_file_is_a_clear_error(tmp_path: Path) -> None:
    run = planned(tmp_path)
    (tmp_path / "plan.yaml").rename(tmp_path / "moved.yaml")
    with pytest.raises(MissingError, match="plan file"):
        load_verified(run)
    charge(run)
    make_run(tmp_path / "moved.yaml", run)
    load_verified(run)


def test_the_datasets_cap_is_checked_early(tmp_path: Path) -> None:
    text = changed("  capacity: 1000", "  cap: {epsilon: 3.0, delta: 1e-3}\n  capacity: 1000")
    first = planned(tmp_path, text)
    charge(first)
    with pytest.raises(BudgetError, match="cap") as caught:
        make_run(tmp_path / "plan.yaml", tmp_path / "runs" / "second")
    assert "secret" not in caught.value.message
    assert not (tmp_path / "runs" / "second" / "plan.lock.json").exists()
    make_run(tmp_path / "plan.yaml", first)


# Where the private records lie


def test_private_moves_the_records(tmp_path: Path) -> None:
    run = planned(tmp_path)
    moved = load_verified(run, tmp_path / "other.npz")
    assert moved.plan.private.source.model_dump()["path"] == tmp_path / "other.npz"
    # Kept before the first charge, so that the ledger names the dataset that is read.
    assert load_verified(run).plan == moved.plan
    charge(run)
    third = load_verified(run, tmp_path / "third.npz")
    assert third.plan.private.source.model_dump()["path"] == tmp_path / "third.npz"
    assert load_verified(run).plan == moved.plan
    # Whichever records the run goes on with, their ledger counts it.
    for path in ("other.npz", "third.npz"):
        real = str((tmp_path / path).resolve())
        (entry,) = Ledger.beside(run, dataset_text({"kind": "npz", "path": real})).entries()
        assert (entry.run, entry.epsilon) == (run.name, moved.plan.budget.epsilon)


def test_private_records_are_never_the_public_ones(tmp_path: Path) -> None:
    text = changed("{kind: letters, count: 200}", "{kind: npz, path: ./secret-records.npz}")
    with pytest.raises(PlanError, match="not protected"):
        planned(tmp_path, text)
    run = planned(tmp_path / "b", text.replace("./secret", "open"))
    with pytest.raises(PlanError, match="not protected"):
        load_verified(run, tmp_path / "b" / "open-records.npz")


def test_private_of_an_idx_source(tmp_path: Path) -> None:
    idx = "kind: idx, images: x/i.gz, labels: x/l.gz"
    text = changed("kind: npz, path: secret-records.npz", idx).replace(
        "{by: hash, fraction: 0.2}",
        "{by: source, source: {kind: idx, images: x/ti.gz, labels: x/tl.gz}}",
    )
    plan = parse_plan(text)
    folder = tmp_path / "new"
    folder.mkdir()
    moved = sources.with_private(plan, folder).private
    assert moved.source.model_dump()["labels"] == folder / "l.gz"
    assert moved.held_out == plan.private.held_out
    for name in ("ti.gz", "tl.gz"):
        (folder / name).write_bytes(b"")
    held_out = sources.with_private(plan, folder).private.held_out.model_dump()
    assert held_out["source"]["images"] == folder / "ti.gz"
    pair = sources.with_private(plan, Path(f"{tmp_path}/a,{tmp_path}/b")).private.source
    assert pair.model_dump()["images"] == tmp_path / "a"
    assert pair.model_dump()["labels"] == tmp_path / "b"


def test_private_does_not_fit_a_built_in_source() -> None:
    text = changed("{kind: npz, path: secret-records.npz}", "{kind: digits}")
    with pytest.raises(UsageError, match="--private"):
        sources.with_private(parse_plan(text), Path("x"))


# Status


def test_status_says_what_is_spent_and_next(tmp_path: Path) -> None:
    run = planned(tmp_path, TRAINED)
    found = status(RunDir.open(run))
    assert found.epsilon_spent == 0.0
    assert found.next_command == f"dpsynth check {run}"
    assert [step.name for step in found.steps] == [
        "plan", "check", "pretrain", "release-moments", "distil", "train", "sample", "evaluate",
    ]  # fmt: skip
    charge(run, 2)
    spent = status(RunDir.open(run))
    assert 0 < spent.epsilon_spent < spent.lock.epsilon
    assert spent.to_json()["forfeited"] == 1


def test_status_says_when_a_crash_lost_the_release(tmp_path: Path) -> None:
    run = planned(tmp_path)
    charge(run)
    assert "--run" in str(status(RunDir.open(run)).next_command)
    spared = planned(tmp_path / "b", SMALL.replace("class}", "class, spares: 1}"))
    charge(spared)
    assert status(RunDir.open(spared)).next_command == f"dpsynth pretrain {spared}"


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_lost_source_record_is_written_anew_by_plan(tmp_path: Path, damage: str) -> None:
    run = planned(tmp_path)
    charge(run)
    record = run / "curator/source.json"
    if damage == "gone":
        record.unlink()
    else:
        record.write_text("{")
    with pytest.raises((MissingError, UsageError)):
        load_verified(run)
    make_run(tmp_path / "plan.yaml", run)
    assert load_verified(run).run.root == run
