"""The embedding stage in a spending session: crashes, spares, units, and several processes."""

import json
import shutil

import methodkit
import numpy as np
import pytest
from warmkit import python

from dpsynth.artifacts.embedding import load_embedding, load_recipe, save_recipe
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.spending import read_state
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.assess.check import ensure_checked
from dpsynth.errors import BudgetError, MissingError, PlanError, ReplayError, UsageError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.private import embedding as mechanism
from dpsynth.private.embedded import spend_embedding
from dpsynth.public.pretrain import pretrain
from dpsynth.released.generating import fit
from dpsynth.released.handout import hand_out
from dpsynth.released.sampling import sample

PLAN = """\
version: 1
name: embedded
method: {method}
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: npz, path: {private}}}
  capacity: 100
  image: {{height: 6, width: 5}}
  classes: [a, b, never]
  held_out: {{by: hash, fraction: 0.1}}
public: [{{kind: letters, count: 60}}]
embedding:
  spares: 1
  features: 40
  pairs: 20
  generator: {{width: 8, depth: 1, steps: 3, batch: 12}}
sampling: {{count: 6}}
"""
SPEND = """
import sys
from pathlib import Path
from dpsynth.planning.verify import load_verified
from dpsynth.private.embedded import spend_embedding
spend_embedding(load_verified(Path(sys.argv[1])))
"""


def planned(folder, method="merf", seed=None):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 6, 5), dtype=np.uint8), rng.integers(0, 2, 60)
    np.savez(folder / "private.npz", images=images, labels=labels)
    (folder / "plan.yaml").write_text(PLAN.format(private=folder / "private.npz", method=method))
    verified = make_run(folder / "plan.yaml", folder / "run", unsafe_seed=seed)
    pretrain(verified)
    ensure_checked(verified)
    return load_verified(folder / "run")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedding")
    planned(folder)
    return folder


@pytest.fixture
def verified(prepared, tmp_path):
    shutil.copytree(prepared / "run", tmp_path / "run")
    return load_verified(tmp_path / "run")


def kinds(verified):
    return [line["kind"] for line in read_transcript(verified.run.transcript).lines]


def test_records_are_read_after_the_charge_and_exact_sums_are_in_no_file(verified, monkeypatch):
    exact, inner = [], mechanism.embedding_sums

    def embedding_sums(chunks, slot):
        exact.append(inner(chunks, slot))
        return exact[-1]

    monkeypatch.setattr(mechanism, "embedding_sums", embedding_sums)
    _, seen = methodkit.watched(verified, spend_embedding)
    assert set(seen) == {("charge", "embedding")}
    (sums,) = exact
    assert sums.counts.sum() > 0
    for row in sums.sums[:2]:
        assert methodkit.holds(verified.run.root, row.astype(np.int64)) == []
        assert methodkit.holds(verified.run.root, row.astype(np.float64) / 2**16) == []
    counts = [sums.counts.astype(kind).tobytes() for kind in (np.int64, np.float64)]
    files = [path.read_bytes() for path in verified.run.root.rglob("*") if path.is_file()]
    assert not any(one in data for one in counts for data in files)
    for after in (fit, sample):
        assert methodkit.watched(verified, after)[1] == [], "post-processing opens no private file"


@pytest.mark.parametrize(
    ("point", "lost"),
    [("charge:before", 0), ("mechanism:done", 1), ("settle:before", 1)],
)
def test_a_crash_costs_the_slot_and_the_spare_takes_its_place(verified, point, lost):
    done = python(SPEND, verified.run.root, environment={"DPSYNTH_KILL_AT": point})
    assert done.returncode == -9, done.stderr
    if point == "settle:before":  # the file is there, and no line speaks for it
        with pytest.raises(ReplayError, match="never settled") as error:
            fit(verified)
        assert "release-embedding" in error.value.hint
        with pytest.raises(ReplayError, match="never settled"):
            hand_out(verified.run)
    found = spend_embedding(verified)
    assert found["slots"] == ["embedding-spare-1" if lost else "embedding"]
    state = read_state(verified.run, verified.lock)
    assert (len(state.settled), len(state.forfeited), state.closed) == (1, lost, True)
    report = replay(verified.run.root)
    assert report.epsilon <= 3.0
    fit(verified)
    sample(verified)
    assert replay(verified.run.released).ok


def test_a_release_that_died_before_its_last_line_is_closed(verified):
    python(SPEND, verified.run.root, environment={"DPSYNTH_KILL_AT": "close:before"})
    assert kinds(verified) == ["open", "charge", "settle"]
    with pytest.raises(BudgetError, match="only once"):
        spend_embedding(verified)
    assert kinds(verified)[-1] == "close"


def test_what_is_not_the_map_that_was_named_spends_nothing(verified):
    path = verified.run.public / "feature-map.safetensors"
    whole, recipe = path.read_bytes(), load_recipe(path)
    path.unlink()
    with pytest.raises(MissingError, match="feature map is not there"):
        spend_embedding(verified)
    save_recipe(path, recipe, "another")
    with pytest.raises(UsageError, match="not the file that"):
        spend_embedding(verified)
    assert not verified.run.transcript.exists()
    pretrain(verified)
    assert path.read_bytes() == whole
    spend_embedding(verified)
    hand_out(verified.run)
    for lost in (path, verified.run.calibration):
        lost.unlink()
        pretrain(verified)
        assert lost.is_file()
    assert path.read_bytes() == whole


def test_a_plan_without_the_stage_is_told_so(verified):
    plan = verified.plan.model_copy(
        update={"stages": verified.plan.stages.model_copy(update={"embedding": None})}
    )
    other = verified.__class__.__new__(verified.__class__)
    other.__dict__.update({**verified.__dict__, "plan": plan})
    for step in (spend_embedding, fit):
        with pytest.raises(PlanError, match="no embedding stage"):
            step(other)


def test_a_generator_of_another_release_draws_nothing(verified):
    spend_embedding(verified)
    fit(verified)
    path = verified.run.released / "embedding.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises((ReplayError, BudgetError), match="not what"):
        sample(verified)
    with pytest.raises((ReplayError, BudgetError), match="not what"):
        fit(verified)
    path.write_bytes(whole)
    (verified.run.released / "generator.safetensors").unlink()
    with pytest.raises(MissingError, match="not there yet"):
        sample(verified)


def test_a_fit_that_was_cut_off_gives_the_same_generator(verified):
    spend_embedding(verified)
    first = fit(verified)
    (verified.run.released / "generator.safetensors").unlink()
    assert fit(verified) == first


@pytest.mark.parametrize("method", ["merf", "hermite"])
def test_several_processes_release_the_sums_of_one(tmp_path, method):
    from rankkit import Starter

    found = []
    with Starter() as start:
        for world in (1, 2):
            folder = tmp_path / str(world)
            folder.mkdir()
            verified = planned(folder, method, seed=7)
            done = start(
                "command", world, words=["release-embedding", str(verified.run.root), "--json"]
            )
            assert done["codes"] == [0] * world, done["err"]
            assert json.loads(done["out"][0])["slots"] == ["embedding"]
            path = verified.run.released / "embedding.safetensors"
            found.append((sha256_file(path), load_embedding(path)))
    assert found[0][0] == found[1][0]
    assert abs(found[0][1].counts[2]) < 12  # the class that no record has: noise alone
