"""`dpsynth guide` as typed, on built-in digits in pixels with a projection: plan to replay.

Each step is the command line's own `main`; they share one process, for torch to load once.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from clikit import DIGITS, typed

PLAN = """\
version: 1
name: guided
budget: {epsilon: 8.0, delta: 1e-5}
@DIGITS@
public: [{kind: letters, count: 200}]
representation: {kind: pixels}
stages:
  moments: {projection: 12}
velocity: {width: 16, depth: 1}
prior: {steps: 5, batch: 32}
sampling: {method: guide, count: 40, steps: 3}
""".replace("@DIGITS@", DIGITS)
LINES = {
    "plan": "plan guided.yaml",
    "check": "check runs/guided",
    "pretrain": "pretrain runs/guided --json",
    "early": "guide runs/guided --start 0.3",
    "release": "release-moments runs/guided --json",
    "sample": "sample runs/guided --json",
    "same": "guide runs/guided --json",
    "start": "guide runs/guided --start 0.31 -n 20 --json",
    "zero": "guide runs/guided --mean zero -n 20",
    "wrong start": "guide runs/guided --start 1.5",
    "wrong model": "guide runs/guided --model field",
    "replay": "replay runs/guided/released --json",
    "status": "status runs/guided --json",
}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The run's folder, and exit code, stdout and stderr of each line."""
    folder = tmp_path_factory.mktemp("guided")
    (folder / "guided.yaml").write_text(PLAN)
    found = [[one.code, one.out, one.err] for one in typed(folder, *LINES.values())]
    return folder / "runs/guided", dict(zip(LINES, found, strict=True))


@pytest.mark.parametrize("name", [n for n in LINES if n != "early" and "wrong" not in n])
def test_every_line_ends_well(story: tuple[Path, dict[str, list[Any]]], name: str) -> None:
    code, _, said = story[1][name]
    assert code == 0, said
    assert "Traceback" not in said


def test_moments_are_released_in_the_projection(
    story: tuple[Path, dict[str, list[Any]]],
) -> None:
    run, said = story
    assert json.loads(said["release"][1])["dim"] == 12
    facts = json.loads((run / "public/calibration.json").read_text())
    assert facts["dim"] == 64
    assert json.loads(said["release"][1])["rounds"]["moments"]["radius"] == facts["release_radius"]
    lock = json.loads((run / "plan.lock.json").read_text())
    assert lock["slots"][0]["statistic"]["dim"] == 12


def test_the_plan_samples_guided(story: tuple[Path, dict[str, list[Any]]]) -> None:
    run, said = story
    origin = json.loads((run / "released/samples.json").read_text())["origin"]
    t0 = json.loads((run / "public/calibration.json").read_text())["start"]["t0"]
    assert (origin["port"], origin["start"], origin["model"]) == ("guide", t0, "prior")
    assert json.loads(said["same"][1])["samples"] == json.loads(said["sample"][1])["samples"]
    assert "already there" in said["same"][2]
    assert json.loads(said["status"][1])["steps"]["sample"] is True


def test_flags_lead_to_other_folders(story: tuple[Path, dict[str, list[Any]]]) -> None:
    run, said = story
    assert json.loads(said["start"][1])["model"] == "guided"
    for name, start, mean in (
        ("samples-guided", 0.31, None),
        ("samples-guided-zero-mean", None, "zero"),
    ):
        summary = json.loads((run / f"released/{name}.json").read_text())
        assert summary["count"] == 20
        assert start in (None, summary["origin"]["start"])
        assert summary["origin"].get("mean") == mean
    card = (run / "released/card.md").read_text()
    assert "t0 0.31" in card and "a control, with zero means" in card
    assert (run / "released/contact-sheet-guided-zero-mean.png").is_file()


def test_refusals_say_what_to_type(story: tuple[Path, dict[str, list[Any]]]) -> None:
    _, said = story
    assert said["early"][0] != 0
    assert "dpsynth release-moments" in said["early"][2]
    assert said["wrong start"][0] != 0 and "--start 0.2" in said["wrong start"][2]
    assert said["wrong model"][0] != 0 and "field" in said["wrong model"][2]


def test_the_hand_out_replays(story: tuple[Path, dict[str, list[Any]]]) -> None:
    run, said = story
    assert json.loads(said["replay"][1])["epsilon"] <= 8.0
    assert (run / "released/public/projection.safetensors").is_file()
