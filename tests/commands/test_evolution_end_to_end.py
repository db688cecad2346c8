"""Private Evolution on built-in digits, from the plan to the hand-out, as typed."""

import json
from pathlib import Path
from typing import Any

import clikit
import numpy as np
import pytest
from clikit import DIGITS, Typed

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.samples import read_samples
from dpsynth.artifacts.votes import load_population, load_votes
from dpsynth.released.evolution import PARENTS

PLAN = """\
version: 1
name: evolved
budget: {epsilon: 8.0, delta: 1e-4}
@DIGITS@
public: [{kind: letters, count: 120}]
representation: {kind: pca, code: 6}
velocity: {kind: mlp, width: 16, depth: 1}
prior: {steps: 5, batch: 32}
method: evolution
stages: {moments: {}, train: {rate: 0.1, steps: 4}}
evolution: {rounds: 2, population: 6, variations: 1, times: [0.4, 0.8]}
sampling: {method: release, count: 90, steps: 2, guidance: 1.0}
distillation: {steps: 5}
evaluation: {probe_epochs: 1, feature_epochs: 1}
""".replace("@DIGITS@", DIGITS)
LINES = {
    "run": "run evolved.yaml --json",
    "again": "run evolved.yaml --json",
    "evolve": "evolve runs/evolved --json",
    "more": "sample runs/evolved -n 100 --json",
    "prior": "sample runs/evolved --model prior -n 20 --json",
    "status": "status runs/evolved --json",
    "replay": "replay runs/evolved/released --json",
    "audit": "audit runs/evolved --quick",
    "reference": "reference runs/evolved",
    "guide": "guide runs/evolved",
    "train": "train runs/evolved",
    "moments": "release-moments runs/evolved",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evolution")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Typed]:
    (folder / "evolved.yaml").write_text(PLAN)
    return dict(zip(LINES, clikit.typed(folder, *LINES.values()), strict=True))


@pytest.fixture
def run(folder: Path, said: dict[str, Typed]) -> Path:
    return folder / "runs" / "evolved"


def found(said: dict[str, Typed], name: str) -> Any:
    assert said[name].code == 0, said[name].err
    return json.loads(said[name].out)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "transcript.jsonl").read_text().splitlines()]


def test_a_line_made_the_plan_an_evolution(said: dict[str, Typed]) -> None:
    steps = found(said, "status")["steps"]
    assert list(steps) == ["plan", "check", "pretrain", "evolve", "sample", "evaluate"]
    assert all(done for name, done in steps.items() if name != "evaluate")  # drawn anew since
    assert found(said, "run")["replay"]["ok"]


def test_each_round_is_charged_then_settled_with_its_file(run: Path) -> None:
    told = [(line["kind"], line.get("mechanism", line.get("slot"))) for line in lines_of(run)]
    assert told == [
        ("open", None),
        ("charge", "votes-01"), ("settle", 1), ("charge", "votes-02"), ("settle", 2),
        ("close", None),
    ]  # fmt: skip
    settled = [line["sha256"] for line in lines_of(run) if line["kind"] == "settle"]
    files = [run / "released" / f"votes-0{n}.safetensors" for n in (1, 2)]
    assert settled == [sha256_file(path) for path in files]


def test_populations_descend_and_have_declared_sizes(run: Path) -> None:
    for number in range(3):
        path = run / "released" / f"population-0{number}.safetensors"
        population = load_population(path)
        assert (np.bincount(population.labels) == [6] * 10).all()
        if number:
            parents = sha256_file(path.with_name(f"population-0{number - 1}.safetensors"))
            votes = load_votes(path.with_name(f"votes-0{number}.safetensors"))
            assert population.facts[PARENTS] == votes.population == parents


def test_votes_carry_noise_everywhere(run: Path) -> None:
    for number in (1, 2):
        votes = load_votes(run / "released" / f"votes-0{number}.safetensors")
        assert not (votes.votes == np.round(votes.votes)).any()


def test_nothing_un_noised_lies_in_the_run(run: Path) -> None:
    curator = {path.name for path in (run / "curator").rglob("*") if path.is_file()}
    assert not [name for name in curator if "vote" in name or "popul" in name]
    made = {path.name for path in (run / "released").glob("*.safetensors")}
    assert made == {f"votes-0{n}.safetensors" for n in (1, 2)} | {
        f"population-0{n}.safetensors" for n in (0, 1, 2)
    }


def test_a_second_run_changes_nothing(said: dict[str, Typed]) -> None:
    assert said["again"].code == 0
    for name in ("votes-01.safetensors", "population-02.safetensors", "samples.json"):
        path = next(p for p in said["run"].files if p.endswith(f"released/{name}"))
        assert said["run"].files[path] == said["again"].files[path]
    assert found(said, "evolve")["slots"] == []


def test_samples_are_members_then_variations_of_them(
    folder: Path, run: Path, said: dict[str, Typed]
) -> None:
    more = found(said, "more")
    assert more["model"] == "population"
    images, labels = read_samples(run / "released" / "samples", [str(n) for n in range(10)])
    assert len(images) == 100
    assert (np.bincount(labels) == [10] * 10).all()
    origin = json.loads((run / "released" / "samples.json").read_text())["origin"]
    path = run / "released" / "population-02.safetensors"
    assert origin["population_sha256"] == sha256_file(path)
    assert found(said, "prior")["model"] == "prior"


def test_the_hand_out_replays_and_its_card_speaks_of_votes(
    run: Path, said: dict[str, Typed]
) -> None:
    report = found(said, "replay")
    assert report["ok"]
    assert report["epsilon"] <= 8.0
    card = (run / "released" / "card.md").read_text()
    for words in ("votes", "population-02.safetensors", "The votes for every member"):
        assert words in card


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("audit", "no attack on stages.votes"),
        ("reference", "no reference without privacy"),
        ("guide", "no moments stage"),
        ("train", "nothing to train"),
        ("moments", "no moments stage"),
    ],
)
def test_what_the_plan_has_not_is_refused_in_a_line(
    said: dict[str, Typed], name: str, words: str
) -> None:
    assert said[name].code != 0
    assert words in " ".join(said[name].err.split())
    assert "Traceback" not in said[name].err
