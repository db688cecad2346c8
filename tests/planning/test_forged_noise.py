"""Locks with a noise multiplier or a share that no plan gives: refused, whatever they hash to."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
from plan_texts import SMALL, TRAINED, celled

from dpsynth.accounting.statistics import CellSums
from dpsynth.artifacts.lock import Lock, read_lock, write_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import spending
from dpsynth.errors import BudgetError, PlanError, ReplayError
from dpsynth.planning.replay import replay
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.planning.workload import follows, noise_std

NUMBERS = [-1, -0.8, 0, 0.0, 1e308, 10**400]
OTHERS = [True, "1", None, [2.0]]
STATISTIC = CellSums(0.6, 0.8, classes=2, cells=3, dim=4)


def planned(folder: Path, text: str) -> tuple[RunDir, Lock]:
    (folder / "plan.yaml").write_text(text)
    run = make_run(folder / "plan.yaml", folder / "run").run
    return run, read_lock(run.lock)


def forged(lock: Lock, **fields: object) -> Lock:
    """The lock with other facts on its moments stage, and a hash that fits them."""
    row = {**lock.by_stage["moments"], **fields}
    return dataclasses.replace(lock, by_stage={**lock.by_stage, "moments": row}, lock_hash="")


def spend_with(run: RunDir, lock: Lock) -> None:
    """A transcript that was opened with this very lock, of one charge."""
    write_lock(run.lock, lock)
    with spending(run, lock, calibration_hash="0" * 64, noise_source=lock.noise_source) as spender:
        spender.charge(lock.slots[0])
        spender.close()


@pytest.mark.parametrize("value", [*NUMBERS, *OTHERS], ids=str)
@pytest.mark.parametrize("text", [celled(), SMALL], ids=["cells", "plain"])
def test_a_lock_of_impossible_noise_is_refused(tmp_path: Path, text: str, value: object) -> None:
    run, lock = planned(tmp_path, text)
    spend_with(run, forged(lock, noise_multiplier=value))
    with pytest.raises(ReplayError, match="do not follow from the plan"):
        replay(run.root)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_noise_that_json_has_no_word_for(tmp_path: Path, value: float) -> None:
    run, lock = planned(tmp_path, celled())
    row = {**lock.by_stage["moments"], "noise_multiplier": value}
    other = dataclasses.replace(lock, by_stage={"moments": row}, lock_hash="0" * 64)
    assert not follows(other, Plan.of_facts(lock.facts))
    spend_with(run, lock)
    said = f'"noise_multiplier": {lock.by_stage["moments"]["noise_multiplier"]!r}'
    text = run.lock.read_text()
    assert said in text
    word = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    run.lock.write_text(text.replace(said, f'"noise_multiplier": {word}'))
    with pytest.raises(ReplayError, match="lock"):
        replay(run.root)


@pytest.mark.parametrize("value", [-1, -0.8, 0, math.inf, math.nan, True, "1", 10**400])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_noise_of_an_impossible_multiplier_is_no_noise(value: float, share: float) -> None:
    with pytest.raises(PlanError, match="finite and above 0"):
        noise_std(STATISTIC, value, share)


def test_noise_that_a_share_makes_infinite_is_refused() -> None:
    assert noise_std(STATISTIC, 5e-324, 0.3) > 0
    with pytest.raises(PlanError, match="finite"):
        noise_std(STATISTIC, sys.float_info.max, 0.3)


@pytest.mark.parametrize("share", [0.3, 1.5, "1", None])
def test_a_forged_share_is_refused(tmp_path: Path, share: object) -> None:
    run, lock = planned(tmp_path, TRAINED)
    assert follows(lock, Plan.of_facts(lock.facts))
    other = forged(lock, share=share)
    spend_with(run, other)
    with pytest.raises(ReplayError, match="do not follow from the plan"):
        replay(run.root)
    with pytest.raises(BudgetError, match="does not follow"):
        load_verified(run.root)
