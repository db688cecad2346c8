"""One run from check to close, with a crash in each stage: the charge comes before the data."""

import json
import sys

import numpy as np
import pytest
from warmkit import python

from dpsynth.artifacts.moments import load_moments
from dpsynth.artifacts.spending import read_state
from dpsynth.assess.check import ensure_checked
from dpsynth.errors import BudgetError, MissingError, UsageError
from dpsynth.models.velocity import load_velocity
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.private.dpsgd import train
from dpsynth.private.moments import release_moments
from dpsynth.public.pretrain import pretrain
from dpsynth.released.distill import distill

PLAN = """\
version: 1
name: story
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: npz, path: {private}}}
  capacity: 100
  image: {{height: 8, width: 8}}
  classes: [a, b, never]
  held_out: {{by: hash, fraction: 0.1}}
public:
  - {{kind: letters, count: 60}}
representation: {{kind: pca, code: 4}}
stages:
  moments: {{spares: 1}}
  train: {{rate: 0.05, steps: 8, chunk: 3, multiplicity: 2}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3}}
distillation: {{steps: 3, horizon: 0.5}}
"""

RUN_STAGE = """
import sys
from pathlib import Path
from dpsynth.planning.verify import load_verified
from dpsynth.private.dpsgd import train
from dpsynth.private.moments import release_moments
{"train": train, "moments": release_moments}[sys.argv[1]](load_verified(Path(sys.argv[2])))
"""

_watched = {"path": None, "run": None, "seen": []}


def _watch(event, given):
    """At each opening of the private file, note what the transcript says by then."""
    if event != "open" or _watched["path"] is None or str(given[0]) != _watched["path"]:
        return
    transcript = _watched["run"].transcript
    lines = transcript.read_text().splitlines() if transcript.exists() else []
    last = json.loads(lines[-1]) if lines else {}
    _watched["seen"].append((last.get("kind"), last.get("mechanism")))


sys.addaudithook(_watch)


@pytest.fixture
def story(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (50, 8, 8), dtype=np.uint8)
    images[3] = 0  # all black
    labels = rng.integers(0, 2, 50)  # the third class never occurs
    np.savez(tmp_path / "private.npz", images=images, labels=labels)
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.format(private=tmp_path / "private.npz"))
    verified = make_run(plan, tmp_path / "run")
    pretrain(verified)
    yield verified
    _watched.update(path=None, run=None)


def killed(stage, run, point):
    """Run a stage in a process of its own that dies at a named point."""
    return python(RUN_STAGE, stage, run.root, environment={"DPSYNTH_KILL_AT": point}).returncode


def watch(verified):
    source = str(verified.plan.private.source.path)
    _watched.update(path=source, run=verified.run, seen=[])


def test_story(story):
    run, lock = story.run, story.lock
    with pytest.raises(UsageError, match="not checked"):
        release_moments(story)
    ensure_checked(story)
    with pytest.raises(MissingError, match="moments come first"):
        train(story)
    assert not read_state(run, lock).charged

    assert killed("moments", run, "mechanism:done") == -9
    assert read_state(run, lock).forfeited == {1}

    watch(story)
    found = release_moments(story)
    assert found["slots"] == ["moments-spare-1"]
    assert set(_watched["seen"]) == {("charge", "moments-spare-1")}
    _watched.update(path=None)
    moments = load_moments(run.released / "moments.safetensors")
    assert moments.seconds.shape == (3, 4, 4)
    assert abs(moments.counts[2]) < 8 * moments.count_std
    with pytest.raises(BudgetError, match="only once"):
        release_moments(story)

    with pytest.raises(MissingError, match="distilled"):
        train(story)
    distill(story)
    assert killed("train", run, "checkpoint:written@2") == -9  # 3 steps settled, 3 forfeited
    state = read_state(run, lock)
    assert (state.settled, state.forfeited) == ({2, 3}, {1, 4})

    again = load_verified(run.root)
    watch(again)
    found = train(again)
    assert set(_watched["seen"]) == {("charge", "train-0003")}
    assert found == {"released": "model.safetensors", "steps": 5, "from_time": 0.5}
    state = read_state(run, lock)
    assert state.closed
    assert state.forfeited == {1, 4}
    _, facts = load_velocity(run.released / "model.safetensors", again.plan.velocity, 4, 3)
    assert facts["room"] == "released"
    with pytest.raises(BudgetError, match="closed"):
        train(again)


def test_nothing_private_lies_outside_the_curators_room(story):
    ensure_checked(story)
    release_moments(story)
    distill(story)
    train(story)
    lines = (story.run.curator / "training.jsonl").read_text().splitlines()
    assert len(lines) == 8
    kept = {p.name for p in story.run.released.iterdir()}
    assert kept == {"moments.safetensors", "distilled.safetensors", "model.safetensors"}
    text = story.run.transcript.read_text()
    assert "private.npz" not in text
    for word in ("loss", "norm", "batch", "clipped"):
        assert f'"{word}"' not in text
