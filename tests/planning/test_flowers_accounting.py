"""Table 3 of StraightDP: N = 2040, delta = 1/(2N); the paper's sums, composed, and replayed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from spendkit import make_run, spend_all

from dpsynth.artifacts.lock import Lock
from dpsynth.planning.replay import replay
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import verify
from dpsynth.planning.yaml_plan import plan_values

PLANS = Path(__file__).parents[2] / "plans"
CAPACITY, DELTA = 2040, 1 / (2 * 2040)
GUIDED = {"method": "guide", "start": 0.05, "count": 10}


def facts(name: str, epsilon: float, **changes: Any) -> Plan:
    """A shipped plan at another budget, and at exactly the paper's delta."""
    values = plan_values(PLANS / f"{name}.yaml")
    return Plan.model_validate(
        {**values, "budget": {"epsilon": epsilon, "delta": DELTA}, **changes}
    )


def joint() -> Plan:
    """Training at 10 and a release at 0.4, as the paper adds them up."""
    stages = {
        "moments": {**plan_values(PLANS / "sd3-guide.yaml")["stages"]["moments"], "weight": 0.4},
        "train": {**plan_values(PLANS / "sd3-lora.yaml")["stages"]["train"], "weight": 10.0},
    }
    return facts("sd3-lora", 10.4, stages=stages, split="epsilon", sampling=GUIDED)


ROWS = {
    "uniform DP-SGD, 10": (lambda: facts("sd3-lora", 10.0), {"train": 10.0}),
    "uniform DP-SGD, 2": (lambda: facts("sd3-lora", 2.0), {"train": 2.0}),
    "Private Evolution, 10": (lambda: facts("sd3-evolution", 10.0), {"votes": 10.0}),
    "distillation + DP-SGD, 2+8": (
        lambda: facts("sd3-distilled", 10.0),
        {"moments": 2.0, "train": 8.0},
    ),
    "moment guidance, 2": (lambda: facts("sd3-guide", 2.0), {"moments": 2.0}),
    "DP-SGD + guidance, 10+0.4": (joint, {"moments": 0.4, "train": 10.0}),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_composes_to_no_more_than_the_papers_sum_and_replays(
    row: str, tmp_path: Path
) -> None:
    plan_of, stated = ROWS[row]
    plan = plan_of()
    assert plan.private.capacity == CAPACITY
    lock = verify(plan)
    alone = {stage: known["epsilon_alone"] for stage, known in lock.by_stage.items()}
    assert alone == pytest.approx(stated, rel=2e-3)
    assert all(alone[stage] <= stated[stage] for stage in stated)
    total = sum(stated.values())
    assert lock.epsilon <= total
    if len(stated) > 1:  # composed exactly, a sum of two epsilons is too much
        assert lock.epsilon < 0.99 * total
    else:
        assert lock.epsilon == pytest.approx(total, rel=2e-3)
    assert replayed(lock, tmp_path) == pytest.approx(lock.epsilon, rel=1e-9)


def replayed(lock: Lock, folder: Path) -> float:
    run = spend_all(make_run(folder / "runs" / "row", lock), lock)
    report = replay(run.root)
    assert report.runs[0].lock_checked
    assert report.delta == DELTA
    return report.epsilon


def test_the_planner_falls_back_to_one_mean_as_the_paper_does() -> None:
    """Section 4.4: at N = 2040 the signal of a class is too low for its noise."""
    for name in ("sd3-guide", "sd3-distilled"):
        (slot, *_) = verify(facts(name, 10.0 if name == "sd3-distilled" else 2.0)).slots
        assert slot.statistic.to_json() | {"count": 0, "sum": 0} == {
            "kind": "class-means", "classes": 1, "dim": 64, "count": 0, "sum": 0,
        }  # fmt: skip


def test_a_light_install_plans_it_without_torch_or_diffusers() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dpsynth.planning.verify import verify\n"
        "from dpsynth.planning.yaml_plan import load_plan\n"
        f"print(verify(load_plan(Path({str(PLANS / 'sd3-guide.yaml')!r}))).epsilon)\n"
        "print(sorted({'torch', 'diffusers', 'transformers', 'peft'} & sys.modules.keys()))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    spent, heavy = found.stdout.splitlines()
    assert 1.99 < float(spent) <= 2.0
    assert heavy == "[]"
