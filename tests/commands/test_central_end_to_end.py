"""Central images (DP-FETA) on built-in digits, from the plan to the hand-out, as typed."""

import json
from pathlib import Path
from typing import Any

import clikit
import pytest
from clikit import DIGITS, Typed

from dpsynth.artifacts.central import load_central
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.tensors import load_tensors

PLAN = """\
version: 1
name: central
budget: {epsilon: 8.0, delta: 1e-4}
@DIGITS@
public: [{kind: letters, count: 120}]
representation: {kind: pca, code: 6}
velocity: {kind: mlp, width: 16, depth: 1}
prior: {steps: 5, batch: 32}
method: central-images
stages: {moments: {}, train: {rate: 0.05, steps: 4, chunk: 2}}
central: {images: 3, rate: 0.2, warm_up: {steps: 5, batch: 8}}
sampling: {method: release, count: 40, steps: 2}
evaluation: {probe_epochs: 1, feature_epochs: 1}
""".replace("@DIGITS@", DIGITS)
LINES = {
    "plan": "plan central.yaml --json",
    "pretrain": "pretrain runs/central",
    "early": "train runs/central",
    "release": "release-central runs/central --json",
    "twice": "release-central runs/central",
    "train": "train runs/central --json",
    "run": "run central.yaml --json",
    "status": "status runs/central --json",
    "replay": "replay runs/central/released --json",
    "audit": "audit runs/central --quick",
    "reference": "reference runs/central -n 20 --json",
    "votes": "evolve runs/central",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("central")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Typed]:
    (folder / "central.yaml").write_text(PLAN)
    return dict(zip(LINES, clikit.typed(folder, *LINES.values()), strict=True))


@pytest.fixture
def run(folder: Path, said: dict[str, Typed]) -> Path:
    return folder / "runs" / "central"


def found(said: dict[str, Typed], name: str) -> Any:
    assert said[name].code == 0, said[name].err
    return json.loads(said[name].out)


def test_central_images_come_before_training(said: dict[str, Typed]) -> None:
    assert said["early"].code != 0
    assert "the central images come first" in said["early"].err
    assert "release-central" in said["early"].err


def test_they_are_released_once_for_all_steps(run: Path, said: dict[str, Typed]) -> None:
    told = found(said, "release")
    assert (told["images"], told["classes"], told["dim"], told["rate"]) == (3, 10, 6, 0.2)
    assert said["twice"].code != 0
    assert "released already" in said["twice"].err
    central = load_central(run / "released" / "central.safetensors")
    assert central.divisor == pytest.approx(0.2 * 1800 / 10)
    lines = [json.loads(line) for line in (run / "transcript.jsonl").read_text().splitlines()]
    charges = [line for line in lines if line["kind"] == "charge"]
    assert [c["mechanism"] for c in charges] == ["central", "train-0001", "train-0002"]
    assert (charges[0]["rate"], charges[0]["steps"]) == (0.2, 3)
    assert lines[2]["sha256"] == sha256_file(run / "released" / "central.safetensors")


def test_training_starts_from_the_warm_model(run: Path, said: dict[str, Typed]) -> None:
    told = found(said, "train")
    assert told["warm_up"]["file"] == "released/warm.safetensors"
    assert told["train"]["steps"] == 4
    _, facts = load_tensors(run / "released" / "warm.safetensors")
    assert facts["central_sha256"] == sha256_file(run / "released" / "central.safetensors")
    assert facts["start_sha256"] == sha256_file(run / "public" / "prior.safetensors")


def test_the_chain_finds_all_done_and_the_card_says_it(run: Path, said: dict[str, Typed]) -> None:
    assert found(said, "run")["replay"]["ok"]
    assert list(found(said, "status")["steps"]) == [
        "plan", "check", "pretrain", "release-central", "warm-up", "train", "sample", "evaluate",
    ]  # fmt: skip
    assert found(said, "replay")["ok"]
    card = (run / "released" / "card.md").read_text()
    for words in ("central.safetensors", "warm.safetensors", "random subsets whose coins"):
        assert words in card


def test_other_commands_know_the_stage(said: dict[str, Typed]) -> None:
    assert "no attack on stages.central" in " ".join(said["audit"].err.split())
    assert found(said, "reference")["count"] == 20
    assert "no votes stage" in said["votes"].err
    for one in said.values():
        assert "Traceback" not in one.err
