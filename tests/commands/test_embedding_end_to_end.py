"""Plans of the embedding family on built-in digits, from the plan to the hand-out, as typed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clikit
import numpy as np
import pytest
from clikit import DIGITS, Typed

from dpsynth.artifacts.embedding import load_embedding, load_recipe
from dpsynth.artifacts.samples import read_samples
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.planning.replay import replay

PLAN = """\
version: 1
name: embedded
method: merf
budget: {epsilon: 8.0, delta: 1e-5}
@DIGITS@
public:
  - {kind: letters, count: 200}
embedding:
  features: 60
  pairs: 10
  order: 3
  width: 5
  generator: {width: 16, depth: 1, steps: 20, batch: 40}
sampling: {count: 40, augment: {}}
evaluation: {probe_epochs: 1, feature_epochs: 1}
""".replace("@DIGITS@", DIGITS)
KINDS = {"merf": "fourier", "hermite": "hermite", "ntk": "tangent"}
FILES = ("embedding.safetensors", "generator.safetensors", "public/feature-map.safetensors")
TYPED = {
    "plan": "plan merf.yaml --json",
    "too early": "train runs/merf",
    "pretrain": "pretrain runs/merf --json",
    "pretrain again": "pretrain runs/merf --json",
    "release": "release-embedding runs/merf --json",
    "release again": "release-embedding runs/merf",
    "sample too early": "sample runs/merf",
    "train": "train runs/merf --json",
    "train again": "train runs/merf --json",
    "sample": "sample runs/merf --json",
    "other model": "sample runs/merf --model prior",
    "merf": "run merf.yaml --run runs/merf --json",
    "status": "status runs/merf --json",
    **{
        f"{method} {step}": f"{step} {where}"
        for method in ("hermite", "ntk")
        for step, where in (
            ("plan", f"{method}.yaml --json"),
            *(
                (step, f"runs/{method} --json")
                for step in ("pretrain", "release-embedding", "train", "sample")
            ),
        )
    },
}


@dataclass(frozen=True)
class Story:
    """The runs, and what each command said."""

    runs: Path
    typed: dict[str, Typed]

    def json(self, name: str) -> Any:
        """The answer of a command that must have ended well."""
        found = self.typed[name]
        assert found.code == 0, f"{TYPED[name]}\n{found.err}"
        return json.loads(found.out)

    def lock(self, name: str) -> Any:
        return json.loads((self.runs / name / "plan.lock.json").read_text())


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Each step of the first method, twice where it may be, and its `run`; the others once."""
    folder = tmp_path_factory.mktemp("embedded")
    for method in KINDS:
        text = PLAN.replace("method: merf", f"method: {method}")
        (folder / f"{method}.yaml").write_text(text.replace("embedded", method))
    found = clikit.typed(folder, *TYPED.values())
    return Story(folder / "runs", dict(zip(TYPED, found, strict=True)))


def test_the_line_makes_the_method(story):
    assert story.json("plan")["epsilon"] <= 8.0
    lock = story.lock("merf")
    assert [slot["stage"] for slot in lock["slots"]] == ["embedding"]
    assert lock["facts"]["method"] == "merf"
    assert lock["facts"]["stages"]["embedding"]["kind"] == "fourier"
    assert lock["facts"]["sampling"]["method"] == "generator"


def test_pretrain_makes_the_map_and_nothing_else(story):
    room = story.runs / "merf" / "public"
    assert {path.name for path in room.iterdir()} == {"feature-map.safetensors", "calibration.json"}
    assert story.json("pretrain")["dim"] == 60
    assert "calibration: kept" in story.typed["pretrain again"].err
    before, after = (story.typed[name].files for name in ("pretrain", "pretrain again"))
    assert before == after
    assert load_recipe(room / "feature-map.safetensors").kind == "fourier"


def test_a_release_is_charged_settled_and_not_repeated(story):
    found = story.json("release")
    assert found["slots"] == ["embedding"]
    assert (found["classes"], found["dim"], found["features"]) == (10, 60, "fourier")
    again = story.typed["release again"]
    assert again.code == 3
    assert "released only once" in again.err
    transcript = (story.runs / "merf" / "released" / "transcript.jsonl").read_text()
    kinds = [json.loads(line)["kind"] for line in transcript.splitlines()]
    assert kinds == ["open", "charge", "settle", "close"]
    embedding = load_embedding(story.runs / "merf" / "released" / "embedding.safetensors")
    assert 1000 < embedding.counts.sum() < 1800  # of about 1,440, with noise of some counts
    assert np.linalg.norm(embedding.means(), axis=1).max() < 1.2


def test_steps_wait_for_each_other_and_say_for_which(story):
    for name, code, words in (
        ("too early", 6, "dpsynth release-embedding runs/merf"),
        ("sample too early", 6, "dpsynth train runs/merf"),
        ("other model", 2, "--model generator|plain"),
    ):
        assert story.typed[name].code == code
        assert words in story.typed[name].err


def test_the_generator_is_fitted_once(story):
    assert story.json("train")["generator"]["steps"] == 20
    assert "already fitted" in story.typed["train again"].err
    _, metadata = load_tensors(story.runs / "merf" / "released" / "generator.safetensors")
    assert metadata["room"] == "released"


@pytest.mark.parametrize("method", KINDS)
def test_the_steps_end_in_a_hand_out_that_replays(story, method):
    if method == "merf":
        assert story.json(method)["replay"]["ok"]
    else:
        assert story.json(f"{method} sample")["count"] == 40
    released = story.runs / method / "released"
    assert replay(released).ok
    card = (released / "card.md").read_text()
    for name in FILES:
        assert (released / name).is_file()
        assert f"`{name}`" in card
    assert "| embedding | 1 |" in card
    assert "Counts and sums of features carry discrete Gaussian noise" in card
    classes = [str(number) for number in range(10)]
    for folder in ("samples", "samples-plain"):
        images, labels = read_samples(released / folder, classes)
        assert images.shape == (40, 8, 8, 1)
        assert np.bincount(labels).tolist() == [4] * 10
    assert load_embedding(released / "embedding.safetensors").recipe.kind == KINDS[method]


def test_status_names_every_step(story):
    steps = story.json("status")["steps"]
    assert "release-embedding" in steps
    assert all(steps.values())


def test_what_was_counted_stays_off_the_terminal(story):
    for name in ("release", "train"):
        assert "counts" not in story.typed[name].out + story.typed[name].err
    assert not list((story.runs / "merf" / "curator").glob("*embedding*"))
