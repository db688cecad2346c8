"""A charged evaluation as typed: the whole chain, by steps, and what reaches the terminal."""

import json
import re

import pytest
from clikit import DIGITS, typed

PLAN = """\
version: 1
name: NAME
budget: {epsilon: 8.0, delta: 1e-5}
@DIGITS@
public:
  - {kind: letters, count: 300}
representation: {kind: pca, code: 8}
stages:
  moments: {covariance: shared}
  evaluation: {weight: 0.5}
velocity: {width: 16, depth: 1}
prior: {steps: 2, batch: 32}
sampling: {method: release, count: 40}
evaluation: {probe_epochs: 20, feature_epochs: 1}
"""
SECRET = DIGITS.replace("  public: true\n", "").replace("fraction: 0.2", "fraction: 0.06")
LINES = {
    "plan": "plan shown.yaml --json",
    "early": "release-evaluation runs/shown",
    "pretrain": "pretrain runs/shown",
    "moments": "release-moments runs/shown",
    "before samples": "release-evaluation runs/shown",
    "sample": "sample runs/shown",
    "status": "status runs/shown",
    "evaluation": "release-evaluation runs/shown --json",
    "again": "release-evaluation runs/shown",
    "replay": "replay runs/shown/released --json",
    "run": "run whole.yaml --json",
    "run again": "run whole.yaml",
    "after": "status runs/whole --json",
}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    for name in ("shown", "whole"):
        text = PLAN.replace("NAME", name).replace("@DIGITS@", SECRET)
        (folder / f"{name}.yaml").write_text(text)
    steps = dict(zip(LINES, typed(folder, *LINES.values()), strict=True))
    assert not any("Traceback" in one.err for one in steps.values())
    return folder / "runs", steps


def test_the_steps_lead_to_it_in_order(story):
    _, steps = story
    assert json.loads(steps["plan"].out)["mechanisms"]["evaluation"]["share"] == pytest.approx(
        1 / 3
    )
    assert steps["early"].code == 6
    assert "dpsynth pretrain runs/shown" in steps["early"].err
    assert steps["before samples"].code == 6
    assert "dpsynth sample runs/shown" in steps["before samples"].err
    assert "next: dpsynth release-evaluation runs/shown" in steps["sample"].err
    assert re.search(r"-  release-evaluation", steps["status"].out)
    assert "next: dpsynth evaluate runs/shown" in steps["evaluation"].err
    assert steps["again"].code == 3


def test_the_terminal_shows_released_values_alone(story):
    """The source is not public: what is printed is evaluation.json, and stderr has no number."""
    runs, steps = story
    said = json.loads(steps["evaluation"].out)
    written = json.loads((runs / "shown/released/evaluation.json").read_text())
    assert said == {"released": "confusion.safetensors", "slots": ["confusion"], **written}
    talk = [line for line in steps["evaluation"].err.splitlines() if "next:" not in line]
    assert not re.search(r"\d", "\n".join(talk))


def test_run_does_it_in_its_turn_and_once(story):
    runs, steps = story
    assert steps["run"].code == 0, steps["run"].err
    order = [line for line in steps["run"].err.splitlines() if line.endswith(":")]
    assert order.index("sample:") < order.index("release-evaluation:") < order.index("evaluate:")
    found = json.loads(steps["run"].out)
    assert found["replay"]["verdict"] == "the transcript holds"
    assert found["released_evaluation"]["accuracy"]["error"] > 0
    assert "accuracy" not in found["evaluation"]  # the measured one stays with the curator
    assert steps["run again"].code == 0
    assert "release-evaluation: done already" in steps["run again"].err
    assert re.search(r"charged accuracy: 0\.\d+ \(0\.\d+ to [01]\.\d+\)", steps["run again"].out)
    after = json.loads(steps["after"].out)
    assert after["closed"]
    assert after["next"] is None
    assert after["charged"] == 2
    lines = (runs / "whole/transcript.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("close") == 1


def test_the_hand_out_replays(story):
    _, steps = story
    report = json.loads(steps["replay"].out)
    assert report["ok"]
    assert report["runs"][0]["rows"][-1]["mechanism"] == "evaluation: confusion-matrix"
