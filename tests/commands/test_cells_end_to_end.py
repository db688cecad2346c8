"""Plans with cells on built-in digits, from the plan to the hand-out, as typed.

Each step is the command line's own `main`; they share one process, for torch to load once.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clikit
import pytest
from clikit import DIGITS, Typed

from dpsynth.errors import ReplayError
from dpsynth.planning.replay import replay

PLAN = """\
version: 1
name: celled
budget: {epsilon: 8.0, delta: 1e-5}
@DIGITS@
public:
  - {kind: letters, count: 300}
representation: {kind: pca, code: 12}
stages:
  moments: {cells: {most: 2, lloyd: 1}}
velocity: {width: 16, depth: 1}
prior: {steps: 2, batch: 32}
sampling: {method: release, count: 40, steps: 3, guidance: 1.5, sharpen: public, augment: {}}
evaluation: {probe_epochs: 1, feature_epochs: 1}
""".replace("@DIGITS@", DIGITS)
FLOW = PLAN.replace("name: celled", "name: taught").replace("method: release", "method: flow")
FLOW = FLOW.replace(", sharpen: public, augment: {}", "") + "distillation: {steps: 5, batch: 32}\n"
ROUNDS = ("moments", "cells-lloyd-1", "cells")


def typed(folder: Path, *lines: str) -> list[Typed]:
    """The commands, one after another in one process in `folder`; all must end well."""
    found = clikit.typed(folder, *lines)
    for line, one in zip(lines, found, strict=True):
        assert one.code == 0, f"{line}\n{one.err}"
        assert "Traceback" not in one.err
    return found


@dataclass(frozen=True)
class Story:
    """A run folder and what each command said."""

    run: Path
    steps: dict[str, Typed]

    def json(self, name: str) -> Any:
        return json.loads(self.steps[name].out)


CELLED = {
    "plan": "plan celled.yaml --json",
    "pretrain": "pretrain runs/celled",
    "release": "release-moments runs/celled",
    "sample": "sample runs/celled",
    "again": "sample runs/celled",
    "field": "sample runs/celled --model field -n 20",
    "replay": "replay runs/celled/released --json",
    "run": "run celled.yaml --json",
    "run again": "run celled.yaml --json",
    "status": "status runs/celled --json",
}
TAUGHT = {
    "run": "run taught.yaml --json",
    "train": "train runs/taught --json",
    "release": "sample runs/taught --model release -n 20",
    "replay": "replay runs/taught/released --json",
}


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Story]:
    folder = tmp_path_factory.mktemp("stories")
    for name, plan in (("celled", PLAN), ("taught", FLOW)):
        (folder / f"{name}.yaml").write_text(plan)
    steps = iter(typed(folder, *CELLED.values(), *TAUGHT.values()))
    return {
        name: Story(folder / "runs" / name, {key: next(steps) for key in lines})
        for name, lines in (("celled", CELLED), ("taught", TAUGHT))
    }


@pytest.fixture
def story(stories: dict[str, Story]) -> Story:
    """The plan that samples from the release."""
    return stories["celled"]


@pytest.fixture
def taught(stories: dict[str, Story]) -> Story:
    """The plan that teaches a flow."""
    return stories["taught"]


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "transcript.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pictures(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.rglob("*.png"))}


def settled(run: Path) -> dict[str, str]:
    """Hash of each round's file, as the transcript settled it, by release."""
    slots = {slot["id"]: slot["name"] for slot in read(run / "plan.lock.json")["slots"]}
    return {slots[line["slot"]]: line["sha256"] for line in lines_of(run, "settle")}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_plan_shows_its_rounds(story: Story) -> None:
    rounds = story.json("plan")["rounds"]["moments"]
    assert [one["release"] for one in rounds] == list(ROUNDS)
    assert [one["share"] for one in rounds] == pytest.approx([0.3, 0.1, 0.6], rel=1e-6)
    assert story.json("plan")["epsilon"] <= 8.0


@pytest.mark.parametrize("name", ["celled", "taught"])
def test_every_round_is_charged_and_settled_with_its_file(
    stories: dict[str, Story], name: str
) -> None:
    run = stories[name].run
    charges = lines_of(run, "charge")
    assert tuple(line["mechanism"] for line in charges) == ROUNDS
    kinds = [line["statistic"]["kind"] for line in charges]
    assert kinds == ["class-moments", "cell-sums", "cell-moments"]
    files = {release: f"{release}.safetensors" for release in ROUNDS}
    assert settled(run) == {
        release: sha256(run / "released" / file) for release, file in files.items()
    }
    assert len(lines_of(run, "close")) == 1


def release_hash(released: Path) -> str:
    """What samples name: both files that the mixtures are estimated from."""
    files = [sha256(released / name) for name in ("moments.safetensors", "cells.safetensors")]
    return hashlib.sha256(json.dumps(files, separators=(",", ":")).encode()).hexdigest()


def test_samples_are_sharpened_moved_and_there_plain(story: Story) -> None:
    released, gain = story.run / "released", read(story.run / "public/calibration.json")
    origins = {
        name: read(released / f"{name}.json")["origin"] for name in ("samples", "samples-plain")
    }
    assert origins["samples"]["sharpen"] == gain["sharpen_gain"] > 0
    assert origins["samples-plain"]["sharpen"] == gain["sharpen_gain"]
    assert "augment" in origins["samples"]
    assert "augment" not in origins["samples-plain"]
    assert origins["samples"]["moments_sha256"] == release_hash(released)
    for name in origins:
        assert len(set(pictures(released / name).values())) == 40


def test_sampling_again_draws_nothing(story: Story) -> None:
    before, after = story.steps["sample"].files, story.steps["again"].files
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert "already there" in story.steps["again"].err
    kept = [name for name in before if "/samples" in name and name.endswith((".png", ".csv"))]
    assert len(kept) == 2 * 41
    assert not changed & set(kept)
    # What may be written anew are views of the same values: sheets and the manifest.
    assert all(Path(name).stem.startswith(("contact-sheet", "manifest")) for name in changed)


def test_the_mixture_field_is_a_sampler_of_its_own(story: Story) -> None:
    released = story.run / "released"
    origin = read(released / "samples-field.json")["origin"]
    assert (origin["model"], origin["steps"], origin["guidance"]) == ("field", 3, 1.5)
    assert origin["moments_sha256"] == release_hash(released)
    assert len(set(pictures(released / "samples-field").values())) == 20


@pytest.mark.parametrize("name", ["celled", "taught"])
def test_what_is_handed_out_holds(stories: dict[str, Story], name: str) -> None:
    run, report = stories[name].run, stories[name].json("replay")
    assert report["ok"]
    assert report["verdict"] == "the transcript holds"
    assert (report["runs"][0]["charges"], report["runs"][0]["settled"]) == (3, 3)
    for file in ("within.safetensors", "geometry.safetensors", "calibration.json"):
        assert sha256(run / "released/public" / file) == sha256(run / "public" / file)
    names = read(run / "released/public/calibration.json")
    assert names["within_sha256"] == sha256(run / "released/public/within.safetensors")


@pytest.mark.parametrize("lost", ["cells-lloyd-1.safetensors", "public/within.safetensors"])
def test_a_hand_out_that_lost_a_file_does_not_hold(story: Story, tmp_path: Path, lost: str) -> None:
    copy = Path(shutil.copytree(story.run / "released", tmp_path / "received"))
    assert replay(copy).ok
    (copy / lost).unlink()
    with pytest.raises(ReplayError, match=f"{lost}: missing"):
        replay(copy)


def test_run_finishes_what_is_left_and_then_does_nothing(story: Story) -> None:
    first, second = story.steps["run"], story.steps["run again"]
    for step in ("pretrain", "release-moments", "sample"):
        assert f"{step}: done already" in first.err
    assert "evaluate: done already" in second.err
    assert story.json("run")["replay"]["ok"]
    assert story.json("run") == story.json("run again")
    drawn = {name: time for name, time in story.steps["field"].files.items() if "samples" in name}
    assert drawn.items() <= second.files.items()
    assert story.steps["release"].files.keys() <= second.files.keys()
    changed = {name for name, time in second.files.items() if first.files.get(name) != time}
    assert {Path(name).name for name in changed} <= {"manifest.json", "check.json", "source.json"}
    assert story.json("status")["next"] is None
    assert story.json("status")["charged"] == 3


def test_a_flow_is_taught_the_mixture_field(taught: Story) -> None:
    run = taught.run
    assert taught.json("run")["replay"]["ok"]
    assert "already done for this release" in taught.steps["train"].err
    facts = taught.json("train")["distilled"]
    assert facts["sha256"] == sha256(run / "released/distilled.safetensors")
    origin = read(run / "released/samples.json")["origin"]
    assert origin["model"] == "distilled"
    assert origin["model_sha256"] == facts["sha256"]
    assert len(set(pictures(run / "released/samples").values())) == 40
    assert "sharpen" not in origin
    assert not (run / "released/samples-plain").exists()
    assert len(set(pictures(run / "released/samples-release").values())) == 20
