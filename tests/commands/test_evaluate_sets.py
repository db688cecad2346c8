"""`dpsynth evaluate` beyond a run's private records: other sets, public references, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from clikit import dpsynth
from sklearn.datasets import load_digits

PLAN = """\
version: 1
name: small
budget: {epsilon: 3, delta: 1e-5}
private:
  source: {kind: npz, path: private.npz}
  capacity: 900
  image: {height: 8, width: 8}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {by: hash, fraction: 0.3}
public: [{kind: letters, count: 200}]
representation: {kind: pca, code: 6}
stages: {moments: {covariance: shared}}
sampling: {method: release, count: 100}
"""
# What networks learn is not asked here.
SHORT = """
import dpsynth.assess.domain, dpsynth.assess.imagesets, dpsynth.assess.sets, dpsynth.models.lenet
dpsynth.models.lenet.LEAST_STEPS = dpsynth.assess.domain.STEPS = 2
dpsynth.assess.sets.PROBE_EPOCHS = dpsynth.assess.sets.FEATURE_EPOCHS = 1
dpsynth.assess.imagesets.LETTERS = 100
"""
RELEASED = """
from pathlib import Path
from dpsynth.assess.check import ensure_checked
from dpsynth.planning.verify import make_run
from dpsynth.private.moments import release_moments
from dpsynth.public.pretrain import pretrain
from dpsynth.released.sampling import sample
verified = make_run(Path("plan.yaml"))
for step in (ensure_checked, pretrain, release_moments, sample):
    step(verified)
Path("private.npz").unlink()  # what follows must not need it
"""


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """private.npz (900 digits), and public.npz (897): other digits, which count as public."""
    data = load_digits()
    images = (data.images * 15.9).astype(np.uint8)
    for name, part in (("private", slice(900)), ("public", slice(900, None))):
        np.savez(tmp_path / f"{name}.npz", images=images[part], labels=data.target[part])
    return tmp_path


def test_two_sets_from_anywhere(sets: Path) -> None:
    line = ("evaluate", "--samples", "public.npz", "--reference", "private.npz")
    hidden = dpsynth(sets, *line, "--json", code=SHORT)
    assert hidden.returncode == 0, hidden.stderr
    told = json.loads(hidden.stdout)
    assert told.keys() == {"findings", "where"} and told["findings"] > 8
    report = sets / "evaluation/evaluation.json"
    assert told["where"] == "evaluation/evaluation.json" and report.stat().st_mode & 0o077 == 0
    assert "curator alone" in hidden.stderr and "private.npz" not in hidden.stderr
    assert "distances in features: done" in hidden.stderr


def test_a_run_against_a_public_reference_opens_nothing_private(sets: Path) -> None:
    (sets / "plan.yaml").write_text(PLAN)
    line = ("evaluate", "runs/small", "--reference", "public.npz", "--public-reference")
    done = dpsynth(sets, *line, code=SHORT + RELEASED)
    assert done.returncode == 0, done.stderr
    for words in ("measured on the public reference", "95% interval", "ceiling", "density",
                  "Frechet distance", "label consistency", "split in two"):  # fmt: skip
        assert words in done.stdout, words
    released = sets / "runs/small/released"
    report = json.loads((released / "evaluation-public.json").read_text())
    assert report["room"] == "public" and report["accuracy"]["synthetic"] > 0
    assert report["samples"]["count"] == 100
    assert (released / "evaluation-public.png").is_file()
    replayed = dpsynth(sets, "replay", str(released))
    assert replayed.returncode == 0, replayed.stderr
    refused = dpsynth(sets, "evaluate", "runs/small", "--reference", "public.npz")
    assert refused.returncode == 2 and "--public-reference" in refused.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--samples public.npz", "--reference PATH"),
        ("runs/x --samples public.npz --reference private.npz", "does not go with --samples"),
        ("runs/x --output out", "does not go with RUN"),
        ("runs/x --public-reference", "--reference PATH"),
        ("runs/x --full", "--probe wrn"),
        ("--samples public.npz --reference private.npz --model a", "does not go with"),
    ],
)
def test_what_does_not_go_together_is_refused(sets: Path, line: str, words: str) -> None:
    done = dpsynth(sets, "evaluate", *line.split())
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert not (sets / "evaluation").exists()
