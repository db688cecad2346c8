"""`dpsynth close` in the middle of training: the steps that were paid for end in a model."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import clikit
import numpy as np
import pytest
import warmkit

from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import close_run, read_state
from dpsynth.errors import MissingError, ReplayError

PLAN = """\
version: 1
name: cut-off
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: npz, path: {private}}}
  capacity: 100
  image: {{height: 8, width: 8}}
  classes: [a, b]
  held_out: {{by: hash, fraction: 0.1}}
public:
  - {{kind: letters, count: 60}}
representation: {{kind: pca, code: 4}}
stages:
  moments: {{spares: 1}}
  train: {{rate: 0.05, steps: 5, chunk: 2, multiplicity: 2}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3}}
distillation: {{steps: 3, horizon: 0.5}}
sampling: {{method: flow, count: 4, steps: 2}}
"""

# Training in a process that dies at a named point; three chunks of 2, 2 and 1 steps.
TRAIN = """
import sys
from pathlib import Path
from dpsynth.planning.verify import load_verified
from dpsynth.private.dpsgd import train
train(load_verified(Path(sys.argv[1])))
"""

NO_TORCH = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Absent())
"""


def dpsynth(*arguments: object, **named: Any) -> subprocess.CompletedProcess[str]:
    return clikit.dpsynth(Path.cwd(), *map(str, arguments), **named)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is ready to train."""
    from dpsynth.assess.check import ensure_checked
    from dpsynth.planning.verify import make_run
    from dpsynth.private.moments import release_moments
    from dpsynth.public.pretrain import pretrain
    from dpsynth.released.distill import distill

    root = tmp_path_factory.mktemp("cut-off")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (50, 8, 8), dtype=np.uint8)
    np.savez(root / "private.npz", images=images, labels=rng.integers(0, 2, 50))
    (root / "plan.yaml").write_text(PLAN.format(private=root / "private.npz"))
    verified = make_run(root / "plan.yaml", root / "ready" / "run")
    pretrain(verified)
    ensure_checked(verified)
    release_moments(verified)
    distill(verified)
    return root / "ready"


def cut_off(ready: Path, at: str, to: Path) -> RunDir:
    """A copy of the run (and of its ledger) whose training died at a named point."""
    shutil.copytree(ready, to)
    done = warmkit.python(TRAIN, to / "run", environment={"DPSYNTH_KILL_AT": at})
    assert done.returncode == -9, done.stderr
    return RunDir(to / "run")


@pytest.fixture(scope="module")
def half(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps settled, two forfeited, one never charged."""
    folder = tmp_path_factory.mktemp("half") / "half"
    cut_off(released, "checkpoint:written@2", folder)
    return folder


def copied(folder: Path, to: Path) -> RunDir:
    shutil.copytree(folder, to)
    return RunDir(to / "run")


def test_close_makes_the_model_of_the_settled_steps(half: Path, tmp_path: Path) -> None:
    run = copied(half, tmp_path / "here")
    closed = dpsynth("close", run.root, "--json", code=NO_TORCH, fresh=True)
    assert closed.returncode == 0, closed.stderr
    said = json.loads(closed.stdout)
    assert (said["model"], said["settled"], said["forfeited"]) == ("model.safetensors", 2, 1)
    assert "made of the 2 steps of training that settled" in closed.stderr

    replayed = dpsynth("replay", run.released, "--head", said["head"], "--json")
    assert replayed.returncode == 0, replayed.stderr
    (found,) = json.loads(replayed.stdout)["runs"]
    assert (found["closed"], found["settled"], found["forfeited"]) == (True, 2, 1)

    resumed = dpsynth("train", run.root, "--json")
    assert resumed.returncode == 3
    assert "this run is closed" in json.loads(resumed.stdout)["error"]["message"]

    before = {path: path.read_bytes() for path in (run.transcript, run.released / said["model"])}
    again = dpsynth("close", run.root)
    assert again.returncode == 0
    assert "closed before: no line is added" in again.stderr
    assert before == {path: path.read_bytes() for path in before}

    sampled = dpsynth("sample", run.root, "--json")
    assert sampled.returncode == 0, sampled.stderr
    assert json.loads(sampled.stdout)["model"] == "model"


def test_the_model_is_the_one_that_training_would_have_written(
    released: Path, tmp_path: Path
) -> None:
    """All chunks settled, and the end cut off: training goes on to its end, close ends it too."""
    run = cut_off(released, "settle:written@3", tmp_path / "one")
    other = copied(tmp_path / "one", tmp_path / "two")
    trained = dpsynth("train", run.root)
    assert trained.returncode == 0, trained.stderr
    close_run(other, read_lock(other.lock))
    model = (other.released / "model.safetensors").read_bytes()
    assert model == (run.released / "model.safetensors").read_bytes()


def test_without_a_settled_step_close_just_closes(released: Path, tmp_path: Path) -> None:
    run = cut_off(released, "checkpoint:written", tmp_path / "none")
    closed = dpsynth("close", run.root, "--json")
    assert closed.returncode == 0, closed.stderr
    assert json.loads(closed.stdout)["model"] is None
    assert not (run.released / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("harm", "error"),
    [(Path.unlink, MissingError), (lambda path: path.write_bytes(b"another"), ReplayError)],
    ids=["gone", "changed"],
)
def test_paid_steps_are_given_up_by_name_alone(harm, error, half: Path, tmp_path: Path) -> None:
    run = copied(half, tmp_path / "here")
    harm(run.curator / "checkpoints" / "train-0001.safetensors")
    lock = read_lock(run.lock)
    with pytest.raises(error, match=r"train-0001\.safetensors") as caught:
        close_run(run, lock)
    assert caught.value.hint.endswith("--without-model")
    assert not read_state(run, lock).closed
    closed = dpsynth("close", run.root, "--without-model")
    assert closed.returncode == 0, closed.stderr
    assert "model: -" in closed.stdout
    assert close_run(run, lock).closed  # refreshing a closed run asks for no checkpoint


def test_a_checkpoint_of_other_weights_is_refused(half: Path, tmp_path: Path) -> None:
    """The start weights name the arrays: a model is never put together from two trainings."""
    from dpsynth.artifacts.tensors import load_tensors, save_tensors

    run = copied(half, tmp_path / "here")
    start = run.released / "distilled.safetensors"
    arrays, facts = load_tensors(start)
    save_tensors(start, {n: value for n, value in arrays.items() if "leave" not in n}, facts)
    with pytest.raises(ReplayError, match="no checkpoint of training that started from"):
        close_run(run, read_lock(run.lock))
