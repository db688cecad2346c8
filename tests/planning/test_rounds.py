"""Rounds of a cell release: a public rule, shares of one Gaussian, locks that follow from plans."""

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_texts import SMALL, TRAINED, celled, changed

from dpsynth.accounting import gaussian
from dpsynth.accounting.compose import epsilon
from dpsynth.accounting.statistics import CellMoments, CellSums, ClassMoments, sensitivity
from dpsynth.artifacts.files import canonical_json, sha256_bytes
from dpsynth.artifacts.lock import Lock, read_lock, write_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import close_run, spending
from dpsynth.errors import BudgetError, PlanError
from dpsynth.planning import table
from dpsynth.planning.release import Cells, Moments, RoundShares
from dpsynth.planning.rounds import MOST, Rounds, cells_worth, lloyd_rounds, rounds_of
from dpsynth.planning.schema import Plan
from dpsynth.planning.steps import status
from dpsynth.planning.verify import load_verified, make_run, verify
from dpsynth.planning.workload import coordinates, follows, noise_std, slots
from dpsynth.planning.yaml_plan import load_plan, parse_plan

PLANS = Path(__file__).parents[2] / "plans"


CELLED = celled()
CELLED_TRAINED = changed("weight: 0.2", "weight: 0.2, cells: {most: 3, lloyd: 2}", TRAINED)


def rounds_in(text: str) -> Rounds:
    found = rounds_of(parse_plan(text))
    assert found is not None
    return found


def multipliers(lock: Lock, stage: str = "moments") -> list[float]:
    return [s.noise_std / sensitivity(s.statistic) for s in lock.slots if s.stage == stage]


def strength(values: list[float]) -> float:
    return math.fsum(1 / value**2 for value in values)


# The rule


@settings(max_examples=300, deadline=None)
@given(
    capacity=st.integers(1, 10**400),
    classes=st.integers(1, 10**6),
    dim=st.integers(1, 10**400),
    budget=st.floats(5e-324, 1.7e308),
    delta=st.floats(5e-324, 1, exclude_max=True),
)
def test_the_rule_holds_for_any_plan(
    *, capacity: int, classes: int, dim: int, budget: float, delta: float
) -> None:
    most = cells_worth(capacity, classes, dim, budget, delta)
    assert 1 <= most <= MOST
    assert isinstance(most, int)
    assert cells_worth(2 * capacity, classes, dim, budget, delta) >= most
    assert cells_worth(capacity, 2 * classes, dim, budget, delta) <= most
    assert cells_worth(capacity, classes, 4 * dim, budget, delta) <= most
    assert cells_worth(capacity, classes, dim, min(2 * budget, 1.7e308), delta) >= most


def test_the_rule_is_what_it_says() -> None:
    """N / (Y c s sqrt(d)), worked by hand: 1000 / (2 * 13 * 2.4223 * 2) = 7.94."""
    s = math.sqrt(2 * math.log(1.25e5)) / 2.0
    assert rounds_in(celled("")).most == 8
    assert cells_worth(300, 2, 4, 2.0, 1e-5) == round(300 / (2 * 13 * s * 2)) == 2
    assert rounds_in(celled("").replace("capacity: 1000", "capacity: 300")).lloyd == 1
    tiny = rounds_in(celled("").replace("capacity: 1000", "capacity: 1"))
    assert (tiny.most, tiny.lloyd) == (1, 0)


def test_what_the_plan_says_holds() -> None:
    assert rounds_of(parse_plan(SMALL)) is None
    assert rounds_of(parse_plan(changed("moments: {covariance: class}\n",
        "train: {rate: 0.1, steps: 5}\n", SMALL.replace("release", "flow")))) is None  # fmt: skip
    assert rounds_in(celled("most: 40, lloyd: 5")).most == 40
    assert rounds_in(celled("most: 40, lloyd: 0")).lloyd == 0
    assert rounds_in(celled("most: 2")).lloyd == lloyd_rounds(2) == 1
    given_shares = rounds_in(celled("lloyd: 4, shares: {first: 1, lloyd: 2, last: 5}"))
    assert (given_shares.first, given_shares.each_lloyd, given_shares.last) == (
        1 / 8,
        1 / 16,
        5 / 8,
    )
    names = [name for name, _ in rounds_in(celled("lloyd: 2")).releases]
    assert names == ["moments", "cells-lloyd-1", "cells-lloyd-2", "cells"]


def test_defaults_and_the_share_of_no_rounds() -> None:
    two, none = rounds_in(celled("lloyd: 2")), rounds_in(celled("lloyd: 0"))
    assert [two.first, two.each_lloyd, two.last] == pytest.approx([0.3, 0.05, 0.6])
    assert [none.first, none.each_lloyd, none.last] == pytest.approx([1 / 3, 0, 2 / 3])


@settings(max_examples=100, deadline=None)
@given(
    lloyd=st.integers(0, 16),
    first=st.floats(1e-2, 1e2),
    moved=st.floats(1e-2, 1e2),
    last=st.floats(1e-2, 1e2),
    scale=st.sampled_from([1e-300, 1.0, 1e300]),
)
def test_shares_sum_to_one(
    *, lloyd: int, first: float, moved: float, last: float, scale: float
) -> None:
    shares = RoundShares(first=first * scale, lloyd=moved * scale, last=last * scale)
    moments = Moments(cells=Cells(most=3, lloyd=lloyd, shares=shares))
    base = parse_plan(SMALL)
    plan = base.model_copy(update={"stages": base.stages.model_copy(update={"moments": moments})})
    found = rounds_of(plan)
    assert found is not None
    assert found.first + lloyd * found.each_lloyd + found.last == pytest.approx(1, abs=1e-14)
    assert math.fsum(share for _, share in found.releases) == pytest.approx(1, abs=1e-14)
    assert min(share for _, share in found.releases) > 0
    assert found.first / found.last == pytest.approx(first / last)


@pytest.mark.parametrize("first", ["1e-9", "1e-320", "1e300"])
def test_a_round_without_budget_is_refused(first: str) -> None:
    plan = parse_plan(celled(f"shares: {{first: {first}, lloyd: 1, last: 1}}"))
    for attempt in (rounds_of, verify):
        with pytest.raises(PlanError, match="shares") as caught:
            attempt(plan)
        assert "shares: {" in caught.value.hint


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("covariance: shared", "covariance: class"),
        ("covariance: shared, sensitivity: paper", "sensitivity: tight"),
    ],
)
def test_cells_need_a_covariance_each(rest: str, why: str) -> None:
    with pytest.raises(PlanError, match=f"cells need {why}") as caught:
        parse_plan(CELLED.replace("covariance: class", rest))
    assert ":21:" in caught.value.message


# Plans without cells


def test_a_plan_without_cells_has_the_slots_it_always_had() -> None:
    """Frozen before cells came: to the bit."""
    lock = verify(load_plan(PLANS / "mnist-class.yaml"))
    assert lock.plan_hash == "baebc5cc01160b7e7b7054b7499365ae7cb2167890d56a2df97327a9227f8ce1"
    made = sha256_bytes(canonical_json([slot.to_json() for slot in lock.slots]))
    assert made == "f55c28d9c785f842b426b6277139c61722e85ba454ab89a20d4ae3fc39c49652"


# Slots and their noise


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_a_share_of_the_noise_is_rounded_up(multiplier: float, share: float, count: float) -> None:
    statistic = CellSums(count, 0.9, classes=2, cells=3, dim=4)
    std = noise_std(statistic, multiplier, share)
    made = Fraction(std / sensitivity(statistic))  # what the accountant composes
    assert made**2 * Fraction(share) >= Fraction(multiplier) ** 2
    assert float(made) <= multiplier / math.sqrt(share) * (1 + 1e-14)


def test_slots_in_order_with_spares() -> None:
    plan = parse_plan(celled(spares=1))
    found = slots(plan, {"moments": 2.0})
    names = ["moments", "cells-lloyd-1", "cells-lloyd-2", "cells"]
    assert [slot.name for slot in found] == names + [f"{name}-spare-1" for name in names]
    assert [slot.release for slot in found] == names * 2
    assert [slot.noise_std for slot in found[:4]] == [slot.noise_std for slot in found[4:]]
    kinds = [ClassMoments, CellSums, CellSums, CellMoments]
    assert [type(slot.statistic) for slot in found[:4]] == kinds
    assert [sensitivity(slot.statistic) for slot in found] == pytest.approx([1.0] * 8, abs=1e-15)
    lloyd, last = found[1].statistic, found[3].statistic
    assert isinstance(lloyd, CellSums)
    assert isinstance(last, CellMoments)
    assert (lloyd.classes, lloyd.cells, lloyd.dim) == (last.classes, last.cells, last.dim)
    assert (lloyd.cells, (lloyd.count / lloyd.sum) ** 2) == (3, pytest.approx(0.02 / 0.08))
    assert (last.count**2, last.sum**2, last.second**2) == pytest.approx((0.02, 0.08, 0.9))


def test_coordinates_of_cell_rounds() -> None:
    assert coordinates(CellSums(0.6, 0.8, classes=2, cells=3, dim=4)) == 2 * 3 * (1 + 4)
    last = CellMoments(0.6, 0.64, 0.48, classes=2, cells=3, dim=4)
    assert coordinates(last) == 2 * 3 * (1 + 4 + 10)
    slack = verify(parse_plan(CELLED)).delta_slack
    numbers = 2 * 15 + 2 * 30 + 90
    plain = verify(parse_plan(SMALL)).delta_slack
    assert slack == pytest.approx(plain * numbers / 30)


@pytest.mark.parametrize("cells", ["", "most: 3, lloyd: 2", "most: 256, lloyd: 16", "lloyd: 0"])
@pytest.mark.parametrize("spares", [0, 2])
def test_all_rounds_together_are_one_gaussian(cells: str, spares: int) -> None:
    """Against the closed form (Balle and Wang): the rounds cost what one release does."""
    lock = verify(parse_plan(celled(cells, spares=spares)))
    m = lock.by_stage["moments"]["noise_multiplier"]
    found = multipliers(lock)
    assert strength(found) == pytest.approx((1 + spares) / m**2, rel=1e-12)
    assert strength(found) <= (1 + spares) / m**2 * (1 + 1e-14)
    exact = gaussian.sigma(2.0, 1e-5) * math.sqrt(1 + spares)
    assert exact <= m <= exact * (1 + 2e-3)
    assert gaussian.epsilon(1e-5, 1 / math.sqrt(strength(found))) <= lock.epsilon <= 2.0
    assert lock.by_stage["moments"]["executions"] == len(lock.slots)
    recomposed = epsilon([s.event() for s in lock.slots], 1e-5 - lock.delta_slack)
    assert recomposed.pessimistic == lock.epsilon


@pytest.mark.parametrize("split", ["noise", "epsilon"])
def test_rounds_beside_training(split: str) -> None:
    lock = verify(parse_plan(f"split: {split}\n{CELLED_TRAINED}"))
    plain = verify(parse_plan(f"split: {split}\n{TRAINED}"))
    assert lock.epsilon <= 2.0
    for stage in ("moments", "train"):
        m = lock.by_stage[stage]["noise_multiplier"]
        assert m == pytest.approx(plain.by_stage[stage]["noise_multiplier"], rel=1e-3)
    assert strength(multipliers(lock)) == pytest.approx(
        lock.by_stage["moments"]["noise_multiplier"] ** -2, rel=1e-12
    )
    assert lock.by_stage["train"]["executions"] == 30


@settings(max_examples=5, deadline=None)
@given(
    budget=st.floats(0.05, 8.0),
    lloyd=st.integers(0, 4),
    first=st.floats(0.1, 10),
    spares=st.integers(0, 2),
)
def test_no_cell_plan_is_over_budget(
    *, budget: float, lloyd: int, first: float, spares: int
) -> None:
    cells = f"lloyd: {lloyd}, shares: {{first: {first!r}, lloyd: 1, last: 1}}"
    text = celled(cells, spares=spares).replace("epsilon: 2.0", f"epsilon: {budget!r}")
    lock = verify(parse_plan(text))
    delta = lock.budget["delta"] - lock.delta_slack
    assert epsilon([slot.event() for slot in lock.slots], delta).pessimistic <= budget
    assert lock.epsilon > 0.97 * budget


# Locks


def planned(folder: Path, text: str = CELLED) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "plan.yaml").write_text(text)
    return make_run(folder / "plan.yaml", folder / "runs" / "r").run.root


def test_the_lock_round_trips_and_follows(tmp_path: Path) -> None:
    lock = read_lock(planned(tmp_path) / "plan.lock.json")
    assert lock == verify(load_plan(tmp_path / "plan.yaml"))
    assert follows(lock, Plan.of_facts(lock.facts))
    assert load_verified(tmp_path / "runs" / "r").lock == lock
    assert list(lock.releases("moments")) == [s.name for s in lock.slots]


def forged_slots(lock: Lock, how: str) -> tuple[object, ...]:
    first, one, two, last = lock.slots
    swap = dataclasses.replace
    return {
        "shares": (swap(first, noise_std=last.noise_std), one, two,
                   swap(last, noise_std=first.noise_std)),
        "less noise": (first, one, two, swap(last, noise_std=last.noise_std * (1 - 1e-15))),
        "fewer rounds": (first, one, swap(last, id=3)),
        "more cells": (first, one, two, swap(last, statistic=swap(last.statistic, cells=4))),
        "another name": (first, one, swap(two, name="cells-lloyd-3"), last),
    }[how]  # fmt: skip


@pytest.mark.parametrize(
    "how", ["shares", "less noise", "fewer rounds", "more cells", "another name"]
)
def test_a_forged_split_is_refused(tmp_path: Path, how: str) -> None:
    run = planned(tmp_path)
    lock = read_lock(run / "plan.lock.json")
    forged = dataclasses.replace(lock, lock_hash="", slots=forged_slots(lock, how))
    assert not follows(forged, load_plan(tmp_path / "plan.yaml"))
    write_lock(run / "plan.lock.json", forged)
    with pytest.raises(BudgetError, match="does not follow"):
        load_verified(run)


# What people see


def test_the_table_shows_each_round() -> None:
    lock = verify(parse_plan(celled(spares=1)))
    m = lock.by_stage["moments"]["noise_multiplier"]
    rows = list(table.rows(lock))
    assert [row[0].strip() for row in rows] == [
        "moments", "moments", "cells-lloyd-1", "cells-lloyd-2", "cells", "composed", "budget",
    ]  # fmt: skip
    assert [row[1] for row in rows[:5]] == [8, 2, 2, 2, 2]
    assert [float(row[2]) for row in rows[1:5]] == pytest.approx(
        [m / math.sqrt(share) for share in (0.3, 0.05, 0.05, 0.6)], rel=1e-4
    )
    assert [row[5] for row in rows[1:5]] == ["(0.300)", "(0.050)", "(0.050)", "(0.600)"]
    assert "rounds of one stage" in "\n".join(table._footnotes(lock, "x"))
    assert [one["release"] for one in table.as_json(lock)["rounds"]["moments"]] == [
        "moments", "cells-lloyd-1", "cells-lloyd-2", "cells",
    ]  # fmt: skip


def test_the_table_of_other_plans_stays_short() -> None:
    lock = verify(parse_plan(TRAINED))
    assert [row[0] for row in table.rows(lock)] == ["moments", "train", "composed", "budget"]
    assert "rounds" not in "\n".join(table._footnotes(lock, "x"))
    text = changed("covariance: class", "covariance: shared, sensitivity: paper")
    paper = table.rounds(verify(parse_plan(text)), "moments")
    assert [one["share"] for one in paper] == pytest.approx([0.5, 0.5])


def charge(run: Path, number: int, *, settle: bool) -> None:
    folder = RunDir.open(run)
    lock = read_lock(folder.lock)
    slot = lock.slots[number - 1]
    with spending(folder, lock, calibration_hash="0" * 64, noise_source="os-entropy") as spender:
        assert spender.settled_digest(slot.release) is None
        assert spender.release_slot(slot.release) == slot
        spender.charge(slot)
        if settle:
            artifact = folder.released / f"{slot.release}.safetensors"
            artifact.write_bytes(slot.name.encode())
            spender.settle(slot, artifact)
            assert spender.settled_digest(slot.release) == sha256_bytes(slot.name.encode())


def test_the_step_is_done_when_every_round_is_settled(tmp_path: Path) -> None:
    run = planned(tmp_path)
    for number in (1, 2, 3, 4):
        step = status(RunDir.open(run)).step("release-moments")
        assert step is not None
        assert not step.done
        charge(run, number, settle=True)
        assert not status(RunDir.open(run)).release_lost
    step = status(RunDir.open(run)).step("release-moments")
    assert step is not None
    assert step.done


def test_a_lost_round_is_a_lost_release_unless_spared(tmp_path: Path) -> None:
    run = planned(tmp_path)
    charge(run, 1, settle=True)
    charge(run, 2, settle=False)
    assert status(RunDir.open(run)).release_lost
    assert "forfeited the release" in str(status(RunDir.open(run)).next_command)
    spared = planned(tmp_path / "b", celled(spares=1))
    charge(spared, 1, settle=True)
    charge(spared, 2, settle=False)
    assert not status(RunDir.open(spared)).release_lost
    charge(spared, 6, settle=True)
    assert status(RunDir.open(spared)).to_json()["forfeited"] == 1


def test_a_run_closed_between_rounds_says_so(tmp_path: Path) -> None:
    run = planned(tmp_path)
    charge(run, 1, settle=True)
    close_run(RunDir.open(run), read_lock(run / "plan.lock.json"))
    assert "closed before the release" in str(status(RunDir.open(run)).next_command)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 16), st.integers(1, 16))
def test_equal_facts_make_equal_slots(one: int, other: int) -> None:
    assume(one != other)
    a, b = (parse_plan(celled(f"most: {most}")) for most in (one, other))
    assert slots(a, {"moments": 2.0}) != slots(b, {"moments": 2.0})
    assert slots(a, {"moments": 2.0}) == slots(Plan.of_facts(a.facts()), {"moments": 2.0})
