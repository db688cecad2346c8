"""Plans with time buckets of their own: verified candidates, two locks, nothing spent between."""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_texts import SMALL, TRAINED, changed
from spendkit import reseal

from dpsynth.accounting.compose import epsilon
from dpsynth.accounting.crosscheck import cross_check
from dpsynth.accounting.statistics import BucketedGradientSums
from dpsynth.artifacts.files import read_json, write_json
from dpsynth.artifacts.lock import Lock, read_lock, write_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import calibration_hash, spending
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import BudgetError, DpsynthError, MissingError, PlanError, ReplayError
from dpsynth.planning import table
from dpsynth.planning.allocation import Profile, bucket_edges, clips_of
from dpsynth.planning.candidates import follows_profile, is_allocated, score
from dpsynth.planning.replay import replay
from dpsynth.planning.schema import Plan
from dpsynth.planning.steps import status
from dpsynth.planning.verify import (
    VerifiedPlan,
    allocate,
    load_verified,
    make_run,
    require_allocated,
    verify,
)
from dpsynth.planning.yaml_plan import parse_plan

TRAIN = "train: {rate: 1.0, steps: 5, chunk: 2, buckets: 2, clip: 0.5, allocation: {shapes: [1]}}"
ALLOCATED = changed("moments: {covariance: class}", TRAIN).replace(
    "method: release", "method: flow"
)


def profile(*importance: float, low: float = 0.0, weights: int = 500) -> Profile:
    count = len(importance)
    ones = (1.0,) * count
    return Profile(0.3, bucket_edges(low, count), ones, ones, importance, weights)


STEEP = profile(1.0, 4.0)
SAMPLED = changed("rate: 1.0", "rate: 0.1", ALLOCATED)
"""Steps on Poisson samples: slower to compose than steps on all records."""


@pytest.fixture(scope="module")
def lock() -> Lock:
    return verify(parse_plan(SAMPLED), profile=profile(1.0, 2.0, weights=10**5))


def by_hand(clips: list[float], noise: float, grid: float) -> float:
    """Epsilon of the plan's steps through dp-accounting alone."""
    oracle = PLDAccountant(value_discretization_interval=grid)
    for step in range(5):
        one = GaussianDpEvent(noise / clips[step % 2])
        oracle.compose(PoissonSampledDpEvent(0.1, one))
    return float(oracle.get_epsilon(1e-5))


def test_every_candidate_keeps_the_budget_by_an_independent_count(lock: Lock) -> None:
    assert lock.allocation is not None and not lock.provisional
    candidates = lock.allocation["candidates"]
    assert [one["beta"] for one in candidates] == [0.0, 1.0]
    for one in candidates:
        assert 1.98 < one["epsilon"] <= 2.0
        spent = by_hand(one["clips"], one["noise_std"], 1e-3)
        assert spent == pytest.approx(one["epsilon"], rel=5e-3)
        assert one["noise_multipliers"] == [one["noise_std"] / clip for clip in one["clips"]]
    best = max(candidates, key=lambda one: one["utility"])
    assert lock.allocation["beta"] == best["beta"]
    assert best["utility"] >= candidates[0]["utility"]
    assert lock.epsilon == best["epsilon"] <= 2.0
    events = [slot.event() for slot in lock.slots]
    bounds = epsilon(events, 1e-5)
    assert bounds.pessimistic == lock.epsilon <= cross_check(events, 1e-5, bounds)["rdp"]


def test_slots_have_the_chosen_clips_and_one_noise(lock: Lock) -> None:
    assert lock.allocation is not None
    assert [slot.steps for slot in lock.slots] == [2, 2, 1]
    assert {slot.statistic for slot in lock.slots} == {
        BucketedGradientSums(tuple(lock.allocation["clips"]))
    }
    assert len({slot.noise_std for slot in lock.slots}) == 1
    chosen = [one for one in lock.allocation["candidates"] if one["beta"] == 1.0]
    assert {slot.noise_std for slot in lock.slots} == {chosen[0]["noise_std"]}
    assert lock.allocation["edges"] == list(STEEP.edges)
    assert follows_profile(lock, profile(1.0, 2.0, weights=10**5))


def test_before_there_is_a_profile_the_lock_is_that_of_one_clip() -> None:
    waiting = verify(parse_plan(ALLOCATED))
    assert waiting.provisional and waiting.allocation is not None
    assert waiting.allocation["clips"] == [0.5, 0.5]
    plain = verify(parse_plan(ALLOCATED.replace(", allocation: {shapes: [1]}", "")))
    assert plain.allocation is None and "allocation" not in plain.to_json()
    assert waiting.by_stage == plain.by_stage and waiting.epsilon == plain.epsilon
    assert [s.noise_std for s in waiting.slots] == [s.noise_std for s in plain.slots]


def test_a_flat_profile_keeps_the_uniform_plan() -> None:
    flat = verify(parse_plan(ALLOCATED), profile=profile(2.0, 2.0))
    assert flat.allocation is not None
    assert flat.allocation["beta"] == 0.0 and "uniform" in flat.allocation["reason"]


@pytest.mark.parametrize("split", ["noise", "epsilon"])
def test_beside_the_moments_the_whole_plan_keeps_the_budget(split: str) -> None:
    text = changed("clip: 0.5}", "clip: 0.5, buckets: 2, allocation: {shapes: [1]}}", TRAINED)
    text = changed("rate: 0.05", "rate: 1.0", text)
    plan = parse_plan(text.replace("budget:", f"split: {split}\nbudget:"))
    steep = profile(1.0, 3.0, low=0.3)
    made = verify(plan, profile=steep)
    assert made.epsilon <= 2.0 and follows_profile(made, steep)
    uniform = verify(parse_plan(text.replace(", allocation: {shapes: [1]}", "")
                                .replace("budget:", f"split: {split}\nbudget:")))  # fmt: skip
    moments = [one.by_stage["moments"]["noise_multiplier"] for one in (made, uniform)]
    train = [one.stage_slots("train")[0].noise_std for one in (made, uniform)]
    if split == "epsilon":
        assert moments[0] == moments[1]
    else:  # the stages stay to each other as the declared weights say
        assert moments[0] / moments[1] == pytest.approx(train[0] / train[1], rel=1e-4)


@settings(max_examples=5, deadline=None)
@given(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)))
def test_whatever_the_profile_the_chosen_plan_keeps_the_budget(importance) -> None:
    made = profile(*importance)
    found = verify(parse_plan(ALLOCATED), profile=made)
    assert found.allocation is not None
    assert epsilon([slot.event() for slot in found.slots], 1e-5).pessimistic <= 2.0
    assert follows_profile(found, made)
    assert found.allocation["clips"] == list(clips_of(made, found.allocation["beta"], 0.5))


def test_a_shape_that_no_noise_pays_for_is_discarded() -> None:
    wild = profile(1e-30, 1.0)  # its clips are below what the clipping engine takes
    found = verify(parse_plan(ALLOCATED), profile=wild)
    assert found.allocation is not None and found.allocation["beta"] == 0.0
    assert found.allocation["candidates"][1]["utility"] is None
    assert follows_profile(found, wild)
    assert "discarded" in str(list(table.candidates(found)))


def test_the_table_shows_candidates_and_the_reason(lock: Lock) -> None:
    from rich.console import Console

    console = Console(width=150, file=io.StringIO())
    console.print(table.render(lock, "plan.lock.json"))
    text = console.file.getvalue()
    assert "chosen" in text and "beta 1 has the highest utility of 2 verified" in text
    assert table.as_json(lock)["allocation"] == lock.allocation


def planned(folder: Path) -> RunDir:
    (folder / "plan.yaml").write_text(ALLOCATED)
    return make_run(folder / "plan.yaml", folder / "r").run


def measured(run: RunDir, made: Profile | None = STEEP) -> None:
    """What pretrain leaves, as far as planning reads it."""
    write_json(
        run.calibration, {"tau": 0.3, **({} if made is None else {"profile": made.to_json()})}
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was planned, measured and planned again; copy it before use."""
    folder = tmp_path_factory.mktemp("prepared")
    run = planned(folder)
    assert load_verified(run.root).lock.provisional
    with pytest.raises(MissingError, match="no public calibration"):
        require_allocated(load_verified(run.root))
    measured(run)
    with pytest.raises(PlanError, match="plan again after pretrain") as refused:
        require_allocated(load_verified(run.root))
    assert "plan.yaml --run" in refused.value.hint
    assert status(run).step("allocate") is not None and not is_allocated(run, read_lock(run.lock))
    again = make_run(folder / "plan.yaml", folder / "r")
    require_allocated(again)
    assert is_allocated(run, again.lock) and not again.lock.provisional
    return folder


@pytest.fixture
def run(prepared: Path, tmp_path: Path) -> RunDir:
    shutil.copytree(prepared, tmp_path / "copy")
    folder = RunDir.open(tmp_path / "copy" / "r")
    source = read_json(folder.curator / "source.json")
    write_json(folder.curator / "source.json", source | {"plan": str(tmp_path / "copy/plan.yaml")})
    return folder


def spend(run: RunDir) -> None:
    lock = read_lock(run.lock)
    digest = calibration_hash(run)
    with spending(run, lock, calibration_hash=digest, noise_source=lock.noise_source) as spender:
        for slot in lock.slots:
            spender.charge(slot)
            path = run.curator / f"{slot.name}.bin"
            path.write_bytes(b"state")
            spender.settle(slot, path)
        spender.close()


def test_nothing_can_be_charged_under_a_provisional_lock(tmp_path: Path) -> None:
    run = planned(tmp_path)
    step = status(run)
    assert [one.name for one in step.steps][:4] == ["plan", "check", "pretrain", "allocate"]
    measured(run)
    with pytest.raises(BudgetError, match="provisional"):
        spend(run)
    run.calibration.unlink()
    assert not read_transcript(run.transcript).lines
    for nothing in (None, profile(1.0, 2.0, 3.0)):
        with pytest.raises(PlanError, match="no profile of this plan's time buckets"):
            allocate(load_verified(run.root))
        measured(run, nothing)
    measured(run, profile(1.0, 2.0, 3.0))  # of three buckets, and the plan has two
    assert make_run(tmp_path / "plan.yaml", run.root).lock.provisional


def test_another_calibration_than_the_locks_is_refused_until_planned_again(run: RunDir) -> None:
    before = read_lock(run.lock)
    for other in (profile(1.0, 5.0), None):
        measured(run, other)
        with pytest.raises(PlanError, match=r"not those of public/calibration.json"):
            require_allocated(load_verified(run.root))
        assert status(run).next_command is not None
    measured(run, profile(1.0, 1.0))
    after = allocate(load_verified(run.root))
    require_allocated(after)
    assert after.lock.allocation != before.allocation
    assert load_verified(run.root).lock == after.lock


def test_once_anything_is_charged_the_lock_stays(run: RunDir) -> None:
    before = run.lock.read_bytes()
    spend(run)
    measured(run, profile(9.0, 1.0))
    assert make_run(run.root.parent / "plan.yaml", run.root).lock == read_lock(run.lock)
    assert allocate(load_verified(run.root)).lock == read_lock(run.lock)
    assert run.lock.read_bytes() == before
    with pytest.raises(PlanError) as refused:
        require_allocated(load_verified(run.root))
    assert "restore public/calibration.json" in refused.value.hint


def test_the_spent_run_replays(run: RunDir) -> None:
    spend(run)
    (one,) = replay(run.root).runs
    lock = read_lock(run.lock)
    assert one.epsilon == pytest.approx(lock.epsilon, rel=1e-3) and one.epsilon <= 2.0
    (row,) = one.rows
    assert (row.mechanism, row.steps) == ("train: bucketed-gradient-sums", 5)
    assert row.sensitivity == max(lock.slots[0].statistic.clips)
    assert row.noise_multiplier == lock.slots[0].noise_std / row.sensitivity


def _reversed(spec: dict[str, Any]) -> None:
    spec["clips"] = spec["clips"][::-1]


def _fewer(spec: dict[str, Any]) -> None:
    spec["clips"] = spec["clips"][:1]


def _more(spec: dict[str, Any]) -> None:
    spec["clips"] = [*spec["clips"], min(spec["clips"])]


def _smaller(spec: dict[str, Any]) -> None:
    spec["clips"] = [clip / 2 for clip in spec["clips"]]


def _renamed(spec: dict[str, Any]) -> None:
    spec.update(kind="clipped-gradient-sum", clip=min(spec.pop("clips")))


EDITS = [_reversed, _fewer, _more, _smaller, _renamed]


@pytest.mark.parametrize("edit", EDITS)
def test_a_transcript_of_other_clips_is_refused(run: RunDir, edit) -> None:
    spend(run)
    lines = [dict(line) for line in read_transcript(run.transcript).lines]
    charge = next(line for line in lines if line["kind"] == "charge")
    charge["statistic"] = dict(charge["statistic"])
    edit(charge["statistic"])
    run.transcript.write_bytes(reseal(lines))
    with pytest.raises(ReplayError, match="charges what the lock does not hold"):
        replay(run.root)


def forged(run: RunDir, edit) -> Lock:
    """The run's lock with other clips in its slots, sealed again as a forger would."""
    spec = json.loads(json.dumps(read_lock(run.lock).to_json()))
    slots = spec["slots"]
    for slot in slots:
        edit(slot["statistic"])
    made = read_lock(run.lock)
    statistic = BucketedGradientSums(tuple(slots[0]["statistic"]["clips"]))
    lock = dataclasses.replace(
        made,
        lock_hash="",
        slots=tuple(dataclasses.replace(slot, statistic=statistic) for slot in made.slots),
    )
    write_lock(run.lock, lock)
    return lock


@pytest.mark.parametrize("edit", EDITS[:-1])
def test_a_lock_of_other_clips_is_refused(run: RunDir, edit) -> None:
    forged(run, edit)
    with pytest.raises(BudgetError, match="does not follow from the plan"):
        load_verified(run.root)
    spend(run)
    with pytest.raises(ReplayError, match="do not follow from the plan"):
        replay(run.root)


def reallocated(run: RunDir, **changes: Any) -> Lock:
    lock = read_lock(run.lock)
    lock = dataclasses.replace(
        lock, lock_hash="", allocation={**(lock.allocation or {}), **changes}
    )
    write_lock(run.lock, lock)
    return lock


@pytest.mark.parametrize(
    "changes",
    [
        {"profile": None},
        {"beta": 0.5},
        {"beta": 0.0},
        {"clips": [0.5, 0.5]},
        {"clips": "many"},
        {"profile": "0" * 64},
        {"edges": [0.0, 0.1, 0.999]},
        {"candidates": []},
    ],
)
def test_an_allocation_that_is_not_the_planners_is_refused(run: RunDir, changes) -> None:
    reallocated(run, **changes)
    with pytest.raises(DpsynthError):
        require_allocated(load_verified(run.root))


def test_a_choice_that_does_not_follow_from_the_profile_does_not_replay(run: RunDir) -> None:
    """A lock of the uniform clips, sound in itself, where the profile asks for others."""
    uniform = verify(parse_plan(ALLOCATED), profile=profile(1.0, 1.0))
    assert uniform.allocation is not None
    shared = {"profile": STEEP.digest}
    lock = dataclasses.replace(uniform, lock_hash="", allocation=uniform.allocation | shared)
    write_lock(run.lock, lock)
    with pytest.raises(PlanError, match="not those of public"):
        require_allocated(load_verified(run.root))
    spend(run)
    with pytest.raises(ReplayError, match=r"do not follow from public/calibration.json"):
        replay(run.root)


@pytest.mark.parametrize("said", [[], "none", 0, {}, {"profile": "a" * 64}])
def test_an_allocation_of_another_form_is_refused_everywhere(run: RunDir, said: Any) -> None:
    spend(run)
    lock = dataclasses.replace(read_lock(run.lock), lock_hash="", allocation=said)
    write_lock(run.lock, lock)
    lines = [dict(line) for line in read_transcript(run.transcript).lines]
    lines[0]["lock_hash"] = lock.lock_hash
    run.transcript.write_bytes(reseal(lines))
    with pytest.raises(DpsynthError):
        load_verified(run.root)
    with pytest.raises(ReplayError):
        replay(run.root)
    assert status(run).to_json()["charged"] == 3


def test_a_plan_without_allocation_takes_none(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(SMALL)
    made = make_run(tmp_path / "plan.yaml", tmp_path / "r")
    assert isinstance(made, VerifiedPlan) and made.lock.allocation is None
    require_allocated(made)
    assert status(made.run).step("allocate") is None
    write_lock(made.run.lock, dataclasses.replace(made.lock, lock_hash="", allocation={"beta": 0}))
    with pytest.raises(BudgetError, match="does not follow"):
        load_verified(made.run.root)
    with pytest.raises(PlanError, match="no allocation"):
        score(made.plan, STEEP, (1.0, 1.0), 1.0)


def test_a_plan_with_an_uneven_chunk_is_told_what_to_write() -> None:
    with pytest.raises(PlanError, match="whole rounds") as refused:
        parse_plan(changed("chunk: 2", "chunk: 3", ALLOCATED))
    assert "chunk: 2" in refused.value.hint
    assert isinstance(parse_plan(ALLOCATED), Plan)
