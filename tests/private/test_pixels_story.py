"""A plan of `kind: pixels` from plan to replay; and rounds whose codes are kept or read again."""

import json
import sys

import numpy as np
import pytest

from dpsynth.artifacts.cells import load_cells
from dpsynth.artifacts.moments import load_moments
from dpsynth.assess.check import check
from dpsynth.errors import PlanError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.planning.yaml_plan import load_plan
from dpsynth.private import encoding
from dpsynth.private.encoding import is_kept
from dpsynth.private.moments import release_moments
from dpsynth.public.pretrain import pretrain
from dpsynth.released.handout import hand_out
from dpsynth.released.sampling import sample

PLAN = """\
version: 1
name: pixels
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: npz, path: {private}}}
  capacity: 100
  image: {{height: 6, width: 5}}
  classes: [a, b]
  held_out: {{by: hash, fraction: 0.1}}
public: [{{kind: letters, count: 80}}]
representation: {{kind: pixels}}
stages:
  moments: {{cells: {{most: 2, lloyd: 1}}, least_count: 1.0}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3}}
sampling: {{method: release, count: 6}}
"""
opened = []
_watched = {"path": None}


def _watch(event, given):
    if event == "open" and _watched["path"] is not None and str(given[0]) == _watched["path"]:
        opened.append(given[0])


sys.addaudithook(_watch)


def write(folder, **changes):
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (90, 6, 5), dtype=np.uint8)
    np.savez(folder / "private.npz", images=images, labels=np.arange(90) % 2)
    text = PLAN.format(private=folder / "private.npz")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "plan.yaml").write_text(text)
    return folder / "plan.yaml"


def prepared(folder, seed=None):
    folder.mkdir()
    verified = make_run(write(folder), folder / "run", unsafe_seed=seed)
    pretrain(verified)
    check(verified)
    return load_verified(folder / "run")


def test_pixels_from_plan_to_replay(tmp_path):
    verified = prepared(tmp_path / "a")
    assert verified.plan.representation.code == 30
    found = release_moments(verified)
    assert found["dim"] == 30
    moments = load_moments(verified.run.released / "moments.safetensors")
    assert moments.seconds.shape == (2, 30, 30)
    sample(verified)
    hand_out(verified.run)
    assert replay(verified.run.released).ok
    facts = json.loads((verified.run.released / "plan.lock.json").read_text())
    assert "30" in json.dumps(facts)


@pytest.mark.parametrize(("most", "passes"), [(2**28, 1), (4 * 100 * 30 - 1, 3)])
def test_rounds_release_the_same_whether_codes_are_kept(most, passes, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "MOST_KEPT", most)
    verified = prepared(tmp_path / "a", seed=5)
    opened.clear()
    _watched["path"] = str(tmp_path / "a" / "private.npz")
    try:
        release_moments(verified)
    finally:
        _watched["path"] = None
    assert len(opened) == passes
    cells = load_cells(verified.run.released / "cells.safetensors")
    other = prepared(tmp_path / "b", seed=5)
    monkeypatch.setattr(encoding, "MOST_KEPT", 2**28)
    release_moments(other)
    again = load_cells(other.run.released / "cells.safetensors")
    np.testing.assert_array_equal(cells.sums, again.sums)
    np.testing.assert_array_equal(cells.seconds, again.seconds)


def test_the_rule_reads_declared_numbers_alone(tmp_path):
    plan = load_plan(write(tmp_path))
    assert is_kept(plan)
    many = load_plan(write(tmp_path, **{"capacity: 100": f"capacity: {2**28 // 120 + 1}"}))
    assert not is_kept(many)
    few = load_plan(write(tmp_path, **{"capacity: 100": f"capacity: {2**28 // 120}"}))
    assert is_kept(few)


@pytest.mark.parametrize("code", [29, 31, 784])
def test_a_code_that_is_not_all_pixels_is_refused(code, tmp_path):
    changes = {"kind: pixels": f"kind: pixels, code: {code}"}
    with pytest.raises(PlanError, match="has 30 numbers"):
        load_plan(write(tmp_path, **changes))
    right = load_plan(write(tmp_path, **{"kind: pixels": "kind: pixels, code: 30"}))
    assert right.facts() == load_plan(write(tmp_path)).facts()


@pytest.mark.parametrize(
    ("old", "new"),
    [("kind: pixels", "kind: pca"), ("height: 6", "height: tall"), ("  image: {", "  picture: {")],
)
def test_other_kinds_still_need_their_code_and_other_faults_are_found(old, new, tmp_path):
    with pytest.raises(PlanError):
        load_plan(write(tmp_path, **{old: new}))
