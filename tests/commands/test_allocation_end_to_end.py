"""A plan with time buckets on built-in digits, as typed: two plans, one spend, one replay.

Each step is the command line's own `main`; they share one process, for torch to load once.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from clikit import DIGITS, typed

PLAN = """\
version: 1
name: allocated
budget: {epsilon: 8.0, delta: 1e-5}
@DIGITS@
public:
  - {kind: letters, count: 300}
representation: {kind: pca, code: 12}
stages:
  moments: {weight: 0.2}
  train: {weight: 0.65, rate: 1.0, steps: 5, chunk: 2, buckets: 2, multiplicity: 1,
          allocation: {shapes: [0, 1]}}
velocity: {width: 8, depth: 1}
prior: {steps: 2, batch: 32}
distillation: {steps: 2, batch: 32, cap: 0.6}
sampling: {method: flow, count: 20, steps: 2}
evaluation: {probe_epochs: 1, feature_epochs: 1}
""".replace("@DIGITS@", DIGITS)
BY_HAND = {
    "plan": "plan plan.yaml --run runs/hand --json",
    "early": "release-moments runs/hand",
    "check": "check runs/hand",
    "pretrain": "pretrain runs/hand --json",
    "refused": "release-moments runs/hand",
    "status": "status runs/hand --json",
    "again": "plan plan.yaml --run runs/hand --json",
    "shown": "plan plan.yaml --run runs/hand",
    "release": "release-moments runs/hand",
    "train": "train runs/hand --json",
    "late": "plan plan.yaml --run runs/hand --json",
    "replay": "replay runs/hand --json",
}
AT_ONCE = {"run": "run plan.yaml --json"}
REFUSED = {"early": 6, "refused": 2}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("allocated")
    (folder / "plan.yaml").write_text(PLAN)
    lines = BY_HAND | AT_ONCE
    found = typed(folder, *lines.values(), columns=150)
    named = dict(zip(lines, found, strict=True))
    for name, one in named.items():
        assert one.code == REFUSED.get(name, 0), f"{name}\n{one.err}"
    return folder, named


def test_the_first_plan_says_that_another_must_follow(steps) -> None:
    _, found = steps
    assert json.loads(found["plan"].out)["allocation"]["profile"] is None
    assert "after pretrain, plan again" in found["plan"].err.replace("\n", " ")
    assert "pretrain runs/hand" in found["early"].err
    line = "dpsynth plan "
    for name in ("pretrain", "refused"):
        assert line in found[name].err and "--run runs/hand" in found[name].err.replace("\n", "")
    status = json.loads(found["status"].out)
    assert status["steps"]["allocate"] is False and status["charged"] == 0


def test_the_second_plan_chooses_from_public_numbers(steps) -> None:
    folder, found = steps
    plan = json.loads(found["again"].out)
    allocation = plan["allocation"]
    calibration = json.loads((folder / "runs/hand/public/calibration.json").read_text())
    profile = calibration["profile"]
    assert allocation["edges"] == profile["edges"]
    assert profile["edges"][0] == min(calibration["tau"], 0.6)
    assert [one["beta"] for one in allocation["candidates"]] == [0.0, 1.0]
    scores = {one["beta"]: one["utility"] for one in allocation["candidates"]}
    assert scores[allocation["beta"]] == max(scores.values())
    assert plan["epsilon"] <= 8.0
    assert (folder / "runs/hand/public/allocation.png").stat().st_size > 1000
    for word in ("clip by time bucket", "chosen", "utility"):
        assert word in found["shown"].out


def test_what_was_planned_was_spent_and_replays(steps) -> None:
    folder, found = steps
    assert json.loads(found["late"].out)["lock_hash"] == json.loads(found["again"].out)["lock_hash"]
    report = json.loads(found["replay"].out)
    assert report["ok"] and report["epsilon"] <= 8.0
    rows = [row["mechanism"] for row in report["runs"][0]["rows"]]
    assert rows == ["moments: class-moments", "train: bucketed-gradient-sums"]
    train = json.loads(found["train"].out)["train"]
    edges = json.loads(found["again"].out)["allocation"]["edges"]
    assert (train["steps"], train["from_time"]) == (5, edges[0])
    assert (folder / "runs/hand/released/model.safetensors").is_file()


def test_run_plans_again_by_itself(steps) -> None:
    folder, found = steps
    summary = json.loads(found["run"].out)
    assert summary["replay"]["ok"] and summary["allocation"]["profile"] is not None
    card = (folder / "runs/allocated/released/card.md").read_text()
    assert "| flow time | clip | noise / clip |" in card
    assert "allocate:" in found["run"].err
    by_hand = json.loads(found["again"].out)["allocation"]
    assert by_hand == json.loads(found["run"].out)["allocation"]
