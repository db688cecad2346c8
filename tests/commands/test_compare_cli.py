"""`dpsynth compare` as typed: tiny plans on public and on private records, in one process."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest
from clikit import Typed, typed
from pagekit import require_inert

from dpsynth.artifacts.ledger import dataset_text

PLAN = """\
name: {name}
budget: {{epsilon: {epsilon}, delta: {delta}}}
private:
  source: {source}
  public: {public}
{cap}  capacity: 1800
  image: {{height: 8, width: 8}}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {{by: hash, fraction: 0.28, salt: {salt}}}
public:
  - {{kind: letters, count: 200}}
representation: {{kind: pca, code: 6}}
stages:
  moments: {{covariance: {covariance}}}
prior: {{steps: 1, batch: 32}}
sampling: {{method: release, count: {count}}}
evaluation: {{probe_epochs: 1, feature_epochs: 1}}
"""
DEFAULTS = {
    "epsilon": 3.0, "delta": 1e-5, "source": "{kind: digits}", "public": "true", "cap": "",
    "salt": "a", "covariance": "class", "count": 100,
}  # fmt: skip
SECRET = {"source": "{kind: npz, path: secret.npz}", "public": "false"}
CAP = "  cap: {epsilon: 4.0, delta: 1e-3}\n"
PLANS = {
    "fine": {},
    "coarse": {"covariance": "shared"},
    "dear": {"epsilon": 9.0, "covariance": "shared"},
    "loose": {"delta": 1e-4},
    "salted": {"salt": "b"},
    "secret": SECRET,
    "other": SECRET | {"source": "{kind: npz, path: other.npz}"},
    "capped": SECRET | {"cap": CAP},
}
LINES = {
    "earlier": "run fine.yaml",
    "made": "compare fine.yaml coarse.yaml --epsilon 3 --epsilon 1",
    "again": "compare fine.yaml coarse.yaml --epsilon 3 --epsilon 1 --json",
    "picked": "compare runs/fine runs/coarse --no-run --out picked",
    "unfinished": "compare fine.yaml coarse.yaml --no-run --repeat 2",
    "epsilons": "compare fine.yaml dear.yaml",
    "deltas": "compare fine.yaml loose.yaml",
    "splits": "compare fine.yaml salted.yaml",
    "data": "compare secret.yaml other.yaml",
    "kinds": "compare fine.yaml secret.yaml",
    "repeat": "compare secret.yaml --repeat 2",
    "paths": "compare secret.yaml --epsilon 1 --epsilon 2",
    "cap": "compare capped.yaml --repeat 2",
    "twice": "compare fine.yaml runs/fine",
    "inside": "compare fine.yaml --out runs/fine/released/x",
    "taken": "compare fine.yaml --out elsewhere",
    "negative": "compare fine.yaml --epsilon -1",
    "planned": "plan secret.yaml",
    "begun": "pretrain runs/secret",
    "secret": "compare secret.yaml",
    "shown": "compare secret.yaml --show-curator",
}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Typed]]:
    from sklearn.datasets import load_digits

    root = tmp_path_factory.mktemp("compare")
    values, labels = load_digits(return_X_y=True)
    images = np.rint(values * 15.9375).astype(np.uint8).reshape(-1, 8, 8)
    for name in ("secret", "other"):
        np.savez(root / f"{name}.npz", images=images, labels=labels)
    for name, changes in PLANS.items():
        text = PLAN.format(name=name, **(DEFAULTS | changes))
        (root / f"{name}.yaml").write_text(text)
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "thesis.txt").write_text("mine")
    return root, dict(zip(LINES, typed(root, *LINES.values()), strict=True))


def report(root: Path, folder: str = "runs/comparison-fine-coarse") -> dict:
    return json.loads((root / folder / "comparison.json").read_text())


def test_one_row_for_each_method_and_epsilon(story):
    root, said = story
    assert said["made"].code == 0, said["made"].err
    found = report(root)
    rows = [(row["method"], row["epsilon"], row["runs"]) for row in found["rows"]]
    assert rows == [
        ("fine", 1.0, ["fine-eps-1"]), ("fine", 3.0, ["fine"]),
        ("coarse", 1.0, ["coarse-eps-1"]), ("coarse", 3.0, ["coarse"]),
    ]  # fmt: skip
    for row in found["rows"]:
        assert 0 < row["spent"] <= row["epsilon"]
        assert {"accuracy", "frechet", "coverage"} <= row["measures"].keys()
    for side in ("ceiling", "floor"):
        assert len(found["bounds"][side]["accuracy"]["values"]) == 4
    assert "coarse" in said["made"].out
    assert "ceiling" in said["made"].out


def test_values_are_those_of_the_evaluations(story):
    root, _ = story
    for one in report(root)["runs"]:
        own = json.loads((root / "runs" / one["run"] / "curator/evaluation.json").read_text())
        for key in ("accuracy", "frechet"):
            assert one["measures"][key]["synthetic"] == own[key]["synthetic"]


def test_every_run_is_in_one_ledger(story):
    root, _ = story
    index = json.loads((root / "runs/ledgers/.index.json").read_text())
    name = index[dataset_text({"kind": "digits"})]
    ledger = json.loads((root / "runs/ledgers" / f"{name}.json").read_text())
    assert {run["run"] for run in ledger["runs"].values()} == {
        "fine", "fine-eps-1", "coarse", "coarse-eps-1"
    }  # fmt: skip
    assert report(root)["ledgers"] == [{"runs": 4, "epsilon": 8.0, "delta": 4e-5}]


def test_an_earlier_run_is_picked_up_and_public_files_are_shared(story):
    root, said = story
    runs = {one["run"]: one for one in report(root)["runs"]}
    assert runs["fine"]["seconds"] is None
    assert runs["coarse"]["seconds"] > 0
    assert runs["coarse"]["public_files_of"] == "fine"
    assert "fine: finished already" in said["made"].err
    first, other = (
        root / "runs" / name / "public/geometry.safetensors" for name in ("fine", "coarse")
    )
    assert first.read_bytes() == other.read_bytes()


def test_again_does_nothing_anew(story):
    _, said = story
    assert said["again"].code == 0
    before, after = (
        {
            path: time
            for path, time in said[name].files.items()
            if "comparison" not in path and "ledgers" not in path
        }
        for name in ("made", "again")
    )
    assert before == after
    assert json.loads(said["again"].out)["findings"] > 0


def test_run_folders_are_picked_up(story):
    root, said = story
    assert said["picked"].code == 0, said["picked"].err
    assert [row["method"] for row in report(root, "picked")["rows"]] == ["fine", "coarse"]
    assert said["unfinished"].code == 6
    assert "fine-1: not finished" in said["unfinished"].err


def test_page_and_files_are_for_the_curator(story):
    root, _ = story
    folder = root / "runs/comparison-fine-coarse"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    page = require_inert((folder / "comparison.html").read_text())
    assert len(page.all("img")) == 1
    assert "coarse-eps-1" in page.text
    assert b"public" in (folder / "comparison.png").read_bytes()[:200]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("epsilons", 2, ("fine and dear have different budgets", "3", "9")),
        ("deltas", 2, ("fine and loose differ in the budget's delta",)),
        ("splits", 2, ("fine and salted differ in the held-out rule",)),
        ("data", 2, ("secret and other differ in where the private records lie",)),
        ("kinds", 2, ("fine and secret differ in the private source",)),
        ("repeat", 3, ("2 runs of secret.yaml", "epsilon 6")),
        ("paths", 3, ("2 runs of secret.yaml", "epsilon 3")),
        ("cap", 3, ("capped-2", "epsilon 6", "cap of 4")),
        ("twice", 2, ("are one run",)),
        ("inside", 2, ("in a run's folder",)),
        ("taken", 2, ("holds no comparison",)),
        ("negative", 2, ("--epsilon",)),
    ],
)
def test_what_cannot_be_compared_is_refused(story, line, code, words):
    root, said = story
    assert said[line].code == code, said[line].err
    for text in words:
        assert text in said[line].err
    assert "secret.npz" not in said[line].err
    made = {Path(path).relative_to(root / "runs").parts[0] for path in said["negative"].files}
    assert not made & {"dear", "loose", "salted", "secret", "secret-1", "capped-1"}


def test_a_run_that_was_begun_goes_on(story):
    root, said = story
    assert said["begun"].code == 0, said["begun"].err
    (one,) = report(root, "runs/comparison-secret")["runs"]
    assert one["seconds"] is None  # they would be of a part of it
    room = "runs/secret/public/"
    kept = {path: time for path, time in said["begun"].files.items() if room in path}
    assert len(kept) > 3
    assert kept.items() <= said["secret"].files.items()
    transcript = next(p for p in said["secret"].files if p.endswith("secret/transcript.jsonl"))
    assert said["secret"].files[transcript] == said["shown"].files[transcript]


def test_private_values_stay_unsaid(story):
    root, said = story
    assert said["secret"].code == 0, said["secret"].err
    accuracy = report(root, "runs/comparison-secret")["rows"][0]["measures"]["accuracy"]["mean"]
    assert said["secret"].out.split()[0] == "measured:"
    assert f"{accuracy:.4g}" not in said["secret"].out + said["secret"].err
    assert f"{accuracy:.4g}" in said["shown"].out
    figure = (root / "runs/comparison-secret/comparison.png").read_bytes()
    assert b"curator-only" in figure[:200]
