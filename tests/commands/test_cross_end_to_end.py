"""Caption releases on built-in digits, as typed: planned, released, drawn from, replayed.

Class names are the captions. The commands share one process, for torch to load once.
"""

import json
import shutil
from hashlib import sha256

import numpy as np
import pytest
from clikit import DIGITS, typed
from rankkit import Starter

from dpsynth.artifacts.cross import load_cross
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.assess.check import ensure_checked
from dpsynth.errors import BudgetError, ReplayError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.private.encoding import private_stream
from dpsynth.private.moments import release_moments
from dpsynth.public.projection import load_release_space
from dpsynth.released.gaussians import load_mixture

PLAN = """\
version: 1
name: captioned
budget: {epsilon: 20.0, delta: 1e-5}
@DIGITS@
public:
  - {kind: letters, count: 200}
representation: {kind: pca, code: 12}
stages:
  moments: {covariance: shared, captions: {features: one-hot}}
velocity: {width: 16, depth: 1}
prior: {steps: 2, batch: 32}
sampling: {method: release, count: 40, steps: 3}
evaluation: {probe_epochs: 1, feature_epochs: 1}
""".replace("@DIGITS@", DIGITS)
PAPER = PLAN.replace("name: captioned", "name: paper").replace(
    "{covariance: shared,", "{covariance: shared, sensitivity: paper, projection: 8,"
)
NAME = "cross-moments.safetensors"
COMMANDS = [
    f"{words} runs/{name}{rest}"
    for name in ("captioned", "paper")
    for words, rest in [
        ("pretrain", ""),
        ("release-moments", " --json"),
        ("sample", ""),
        ("replay", "/released --json"),
    ]
]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The folder of both runs, and what each command printed."""
    folder = tmp_path_factory.mktemp("captioned")
    (folder / "captioned.yaml").write_text(PLAN)
    (folder / "paper.yaml").write_text(PAPER)
    lines = ["plan captioned.yaml --json", "plan paper.yaml --json", *COMMANDS]
    found = typed(folder, *lines)
    assert [one.code for one in found] == [0] * len(found), found[-1].err
    return folder, {line: one.out for line, one in zip(lines, found, strict=True)}


def lines_of(run, kind):
    return [
        line for line in read_transcript(run / "transcript.jsonl").lines if line["kind"] == kind
    ]


def test_the_release_is_one_mechanism_charged_and_settled_with_its_file(story):
    folder, said = story
    run = folder / "runs/captioned"
    (charge,) = lines_of(run, "charge")
    assert charge["mechanism"] == "cross-moments"
    assert charge["statistic"]["kind"] == "cross-moments"
    assert (charge["statistic"]["features"], charge["statistic"]["dim"]) == (11, 12)
    (settle,) = lines_of(run, "settle")
    assert settle["sha256"] == sha256((run / "released" / NAME).read_bytes()).hexdigest()
    told = json.loads(said["release-moments runs/captioned --json"])
    assert told["released"] == NAME
    assert told["features"] == 11
    assert json.loads(said["plan captioned.yaml --json"])["epsilon"] <= 20.0


def test_the_papers_release_is_three_mechanisms_in_one_file(story):
    folder, _ = story
    run = folder / "runs/paper"
    kinds = [line["statistic"]["kind"] for line in lines_of(run, "charge")]
    assert kinds == ["paper-class-sums", "paper-second-moment", "paper-cross-moments"]
    assert len({line["sha256"] for line in lines_of(run, "settle")}) == 1
    found = load_cross(run / "released" / NAME)
    assert (found.sensitivity, found.dim, found.features, found.constant) == ("paper", 8, 10, 0.0)
    assert found.count[0] == pytest.approx(1437, abs=60)  # four fifths of 1797 digits


@pytest.mark.parametrize("name", ["captioned", "paper"])
def test_what_is_handed_out_holds_and_images_come_of_it(story, name):
    folder, said = story
    run = folder / f"runs/{name}"
    report = json.loads(said[f"replay runs/{name}/released --json"])
    assert report["verdict"] == "the transcript holds"
    assert len(set((run / "released/samples").rglob("*.png"))) == 40
    origin = json.loads((run / "released/samples.json").read_text())["origin"]
    assert origin["moments_sha256"] == sha256((run / "released" / NAME).read_bytes()).hexdigest()
    assert NAME in (run / "released/card.md").read_text()


def test_another_release_than_the_settled_one_is_refused(story):
    folder, _ = story
    run = folder / "runs/captioned"
    path = run / "released" / NAME
    kept, other = path.read_bytes(), (folder / "runs/paper/released" / NAME).read_bytes()
    path.write_bytes(other)
    try:
        with pytest.raises(ReplayError):
            replay(run / "released")
        with pytest.raises((ReplayError, BudgetError)):
            replay(run)
    finally:
        path.write_bytes(kept)
    assert replay(run / "released").ok


def test_processes_release_what_one_does_bit_for_bit(story, tmp_path, starter):
    folder, released, name = story[0], [], "paper"
    for world in (1, 2):
        made = make_run(folder / f"{name}.yaml", tmp_path / f"run-{world}", unsafe_seed=7)
        shutil.copytree(folder / f"runs/{name}/public", made.run.public, dirs_exist_ok=True)
        ensure_checked(made)
        done = starter("command", world, words=["release-moments", str(made.run.root)])
        assert done["codes"] == [0] * world, done["err"]
        released.append((made.run.released / NAME).read_bytes())
    assert released[0] == released[1]


@pytest.fixture(scope="module")
def starter():
    with Starter() as starter:
        yield starter


def test_a_release_happens_once(story):
    with pytest.raises(BudgetError):
        release_moments(load_verified(story[0] / "runs/captioned"))


@pytest.mark.parametrize("name", ["captioned", "paper"])
def test_the_conditions_are_the_classes(story, name):
    """One-hot captions at a large epsilon: near the digits' own means and shares."""
    alone = load_verified(story[0] / f"runs/{name}")
    space = load_release_space(alone.run, alone.plan)
    parts = list(private_stream(alone, space.representation))
    codes = np.concatenate([part.codes for part in parts]) * (space.radius / 2**16)
    labels = np.concatenate([part.labels for part in parts])
    truth = space.lift_means(np.stack([codes[labels == y].mean(0) for y in range(10)]))
    mixture, _ = load_mixture(alone.run, alone.plan)
    found = mixture.class_means.numpy()
    spread = np.sqrt(np.square(truth - truth.mean(0)).mean())
    assert np.sqrt(np.square(found - truth).mean()) < 0.35 * spread
    np.testing.assert_allclose(mixture.weights.numpy(), np.full(10, 0.1), atol=0.05)
