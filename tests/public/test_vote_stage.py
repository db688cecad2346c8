"""The space in which records vote: made of public images, named by the calibration, read back."""

import numpy as np
import pytest

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.settled import DERIVED
from dpsynth.errors import DataError, MissingError, PlanError, UsageError
from dpsynth.planning.verify import make_run
from dpsynth.public import vote_stage
from dpsynth.public.pretrain import pretrain
from dpsynth.public.representation import load_representation
from dpsynth.public.sources import read_public
from dpsynth.public.vote_stage import HASH_KEY, load_vote_space
from dpsynth.public.voting import NAME, WIDE

PLAN = """\
version: 1
name: voting
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: folder, path: {folder}/nowhere}}
  capacity: 100
  image: {{height: 8, width: 8}}
  classes: [a, b]
  held_out: {{by: hash, fraction: 0.1}}
public: [{public}]
representation: {{kind: pixels}}
stages: {{votes: {{rounds: 1, population: 3, features: {features}}}}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 2}}
sampling: {{method: population}}
"""
LETTERS = "{kind: letters, count: 40}"


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(vote_stage, "STEPS", 3)


def planned(folder, features, public=LETTERS):
    plan = folder / "plan.yaml"
    plan.write_text(PLAN.format(folder=folder, features=features, public=public))
    return make_run(plan, folder / "run")


def test_codes_have_twice_the_largest_public_norm(tmp_path):
    verified = planned(tmp_path, "codes")
    facts = pretrain(verified)
    space = load_representation(verified.run, verified.plan)
    images = read_public(verified.plan).images
    largest = space.encode(images).double().norm(dim=1).max().item()
    assert facts["votes"] == {
        "features": "codes",
        "dim": 64,
        "radius": pytest.approx(WIDE * largest),
    }
    found = load_vote_space(verified.run, verified.plan, verified.plan.stages.votes)
    assert (found.radius, found.dim) == (facts["votes"]["radius"], 64)
    assert not (verified.run.public / NAME).exists()
    assert HASH_KEY not in facts


def test_a_public_network_is_made_once_and_named(tmp_path, capsys):
    verified = planned(tmp_path, "lenet")
    facts = pretrain(verified)
    path = verified.run.public / NAME
    assert facts[HASH_KEY] == sha256_file(path)
    assert f"public/{NAME}" in DERIVED
    before = path.read_bytes()
    capsys.readouterr()
    assert pretrain(verified) == facts
    assert "all there already" in capsys.readouterr().err
    (verified.run.public / "calibration.json").unlink()
    assert pretrain(verified) == facts
    assert "vote features: kept" in capsys.readouterr().err
    path.unlink()
    pretrain(verified)
    assert path.read_bytes() == before, "the same public images make the same network"
    space = load_vote_space(verified.run, verified.plan, verified.plan.stages.votes)
    images = read_public(verified.plan).images
    assert np.abs(space.encode_exact_many(images[:5]) - space.encode(images[:5]).numpy()).max() < (
        1e-4 * space.radius
    )
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(UsageError, match="not the file that"):
        load_vote_space(verified.run, verified.plan, verified.plan.stages.votes)


def test_another_space_is_another_calibration(tmp_path):
    verified = planned(tmp_path, "codes")
    pretrain(verified)
    first = read_json(verified.run.calibration)["recipe"]
    verified = planned(tmp_path, "lenet")
    with pytest.raises(PlanError, match="no vote space of this plan"):
        load_vote_space(verified.run, verified.plan, verified.plan.stages.votes)
    assert pretrain(verified)["recipe"] != first


def test_a_network_needs_two_public_classes(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (9, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "public.npz", images=images, labels=np.zeros(9, np.int64))
    verified = planned(tmp_path, "lenet", f"{{kind: npz, path: {tmp_path}/public.npz}}")
    with pytest.raises(DataError, match="at least two classes"):
        pretrain(verified)


def test_inception_needs_weights_that_are_here(tmp_path, monkeypatch):
    monkeypatch.setattr(vote_stage, "find_weights", lambda _: None)
    with pytest.raises(MissingError, match="not on this machine"):
        pretrain(planned(tmp_path, "inception"))
