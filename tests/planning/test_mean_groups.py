"""Means by class or for all: decided from declared numbers, held by the lock, bounded, replayed."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_texts import SMALL, changed
from spendkit import make_run, spend_all

from dpsynth.accounting.checks import AccountingError
from dpsynth.accounting.compose import event_for
from dpsynth.accounting.queries import ClassMeans
from dpsynth.accounting.statistics import ClassMoments, sensitivity, statistic_from_json
from dpsynth.artifacts.lock import Lock
from dpsynth.errors import PlanError, ReplayError
from dpsynth.planning.groups import LARGEST, mean_groups, mean_noise
from dpsynth.planning.release import Moments
from dpsynth.planning.replay import replay
from dpsynth.planning.schema import Plan
from dpsynth.planning.table import as_json
from dpsynth.planning.verify import verify
from dpsynth.planning.workload import coordinates, delta_slack, follows, slots
from dpsynth.planning.yaml_plan import parse_plan


def planned(settings: str = "groups: auto", capacity: int = 1000) -> tuple[Plan, Lock]:
    text = changed("covariance: class", f"covariance: public, {settings}")
    plan = parse_plan(changed("capacity: 1000", f"capacity: {capacity}", text))
    return plan, verify(plan)


@pytest.mark.parametrize(
    ("settings", "capacity", "groups"),
    [
        ("groups: class", 30, 2),
        ("groups: all", 100_000, 1),
        ("groups: auto", 100_000, 2),
        ("groups: auto", 30, 1),
    ],
)
def test_the_locks_statistic_says_the_groups(settings: str, capacity: int, groups: int) -> None:
    plan, lock = planned(settings, capacity)
    (slot,) = lock.slots
    assert isinstance(slot.statistic, ClassMeans)
    assert (slot.statistic.classes, slot.statistic.dim) == (groups, 4)
    assert slot.statistic.count**2 == pytest.approx(0.05 / 0.6)
    assert follows(lock, plan)
    assert follows(lock, Plan.of_facts(lock.facts))


def test_the_rule_is_the_noise_of_an_average_class_mean() -> None:
    moments = Moments(covariance="public", groups="auto")
    for capacity in (500, 5_000):
        noise = mean_noise(2.0, 0.9, 16, capacity / 10)
        assert noise == pytest.approx(2.0 / 0.9 * 4 / (capacity / 10))
        found = mean_groups(
            moments, classes=10, capacity=capacity, dim=16, weight=0.9, multiplier=2.0
        )
        assert found == (10 if noise <= LARGEST else 1)


def test_the_noise_does_not_depend_on_the_groups_and_delta_pays_for_the_most() -> None:
    (one, by_class), (other, all_records), (_, auto) = (
        planned(f"groups: {groups}", 30) for groups in ("class", "all", "auto")
    )
    assert by_class.slots[0].noise_std == pytest.approx(all_records.slots[0].noise_std, rel=1e-6)
    assert auto.delta_slack == delta_slack(one) > delta_slack(other)
    assert auto.slots[0].noise_std == by_class.slots[0].noise_std
    assert coordinates(all_records.slots[0].statistic) == 1 + 4
    assert coordinates(by_class.slots[0].statistic) == 2 * (1 + 4)


def test_a_lock_of_other_groups_weights_or_noise_does_not_follow() -> None:
    plan, lock = planned("groups: auto", 30)
    (slot,) = lock.slots
    forged = [{"classes": 2}, {"count": 0.05}, {"sum": 0.99}, {"dim": 3}]
    for change in forged:
        statistic = dataclasses.replace(slot.statistic, **change)
        other = dataclasses.replace(slot, statistic=statistic)
        assert not follows(dataclasses.replace(lock, slots=(other,), lock_hash=""), plan), change
    louder = dataclasses.replace(slot, noise_std=slot.noise_std / 100)
    assert not follows(dataclasses.replace(lock, slots=(louder,), lock_hash=""), plan)
    moments = dataclasses.replace(slot, statistic=ClassMoments(0.6, 0.64, 0.48, "class", 2, 4))
    assert not follows(dataclasses.replace(lock, slots=(moments,), lock_hash=""), plan)


def test_spares_are_of_the_same_groups() -> None:
    _, lock = planned("groups: auto, spares: 2", 30)
    assert {slot.statistic for slot in lock.slots} == {lock.slots[0].statistic}
    assert [slot.spare for slot in lock.slots] == [False, True, True]


def test_plan_says_what_was_decided_and_why() -> None:
    _, lock = planned("groups: auto", 60)
    said = as_json(lock)["means"]
    assert (said["groups"], said["means"]) == ("auto", 1)
    assert said["noise"] < LARGEST < said["noise_by_class"]
    assert as_json(verify(parse_plan(SMALL)))["means"] is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("covariance: class, groups: all", "releases no second moments"),
        ("covariance: shared, groups: auto", "releases no second moments"),
        ("covariance: public, sensitivity: paper", "needs covariance: shared"),
        ("covariance: public, cells: {}", "cells need covariance: class"),
        ("covariance: public, groups: some", "groups"),
    ],
)
def test_what_does_not_go_with_means_alone_is_refused(settings: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_plan(changed("covariance: class", settings))


def test_a_transcript_of_means_replays_to_the_locks_epsilon(tmp_path: Path) -> None:
    _, lock = planned("groups: auto", 30)
    run = spend_all(make_run(tmp_path / "runs" / "a", lock), lock)
    report = replay(run.root)
    assert report.epsilon == lock.epsilon <= 2.0
    assert report.runs[0].rows[0].mechanism == "moments: class-means"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=3),
    st.integers(0, 4),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_no_record_moves_means_further_than_their_sensitivity(
    values: list[float], label: int, count: float, total: float
) -> None:
    """One record more or less moves one group's count by a, its sum by at most b."""
    statistic = ClassMeans(count, total, classes=5, dim=3)
    norm = math.hypot(*values)
    inside = [value / max(norm, 1.0) for value in values]
    move = math.hypot(count, *(total * value for value in inside))
    assert move <= sensitivity(statistic) * (1 + 1e-12)
    if norm >= 1:
        assert move == pytest.approx(sensitivity(statistic), rel=1e-9)
    assert statistic_from_json(statistic.to_json()) == statistic
    assert sensitivity(dataclasses.replace(statistic, classes=1)) == sensitivity(statistic)
    assert label < statistic.classes


@pytest.mark.parametrize("key", ["count", "sum", "classes", "dim"])
def test_a_damaged_or_forged_statistic_is_refused(key: str) -> None:
    spec = ClassMeans(0.6, 0.8, classes=3, dim=4).to_json()
    for bad in (0, -1, math.nan, math.inf, True, None, "1", [1]):
        with pytest.raises(ReplayError):
            statistic_from_json({**spec, key: bad})
    with pytest.raises(ReplayError, match="keys"):
        statistic_from_json({k: v for k, v in spec.items() if k != key})


def test_means_are_of_all_records_and_gain_nothing_by_a_rate() -> None:
    with pytest.raises(AccountingError, match="sum over all records"):
        event_for(ClassMeans(0.6, 0.8, 3, 4), 1.0, 0.01, 5)


def test_slots_of_a_lock_are_remade_from_its_noise_alone() -> None:
    plan, lock = planned("groups: auto", 30)
    noise = {"moments": lock.by_stage["moments"]["noise_multiplier"]}
    assert slots(plan, noise) == lock.slots
    quiet = slots(plan, {"moments": noise["moments"] / 100})
    assert quiet[0].statistic.classes == 2  # less noise: other groups, and another lock
