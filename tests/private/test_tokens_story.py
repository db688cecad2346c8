"""`dpsynth train` on spectral tokens: cut off, resumed, ended, and closed in the middle."""

import json
import shutil

import numpy as np
import pytest
from rankkit import Starter
from token_runs import planned, pretrained

from dpsynth.artifacts.spending import close_run, read_state
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.artifacts.trained import checkpoint_path, finish_model
from dpsynth.assess.check import ensure_checked
from dpsynth.errors import BudgetError, ReplayError
from dpsynth.models.wavelet.autoregressive import load_transformer
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified
from dpsynth.private.dpsgd import train
from dpsynth.private.token_task import TokenTask
from dpsynth.private.training_state import TrainingState
from dpsynth.public.tokens import sizes_of

SEED = "{train: {rate: 0.1, steps: 4, chunk: 1, learning_rate: 0.02, parameters: UPDATE}}"


@pytest.fixture(scope="module")
def start():
    with Starter() as starter:
        yield starter


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Public rooms by number of levels, trained once."""
    made = {}

    def of(levels):
        if levels not in made:
            made[levels] = pretrained(tmp_path_factory.mktemp("public"), levels=levels).run.public
        return made[levels]

    return of


@pytest.fixture
def fresh(tmp_path, public):
    """A checked run that has spent nothing."""

    def of(update="all", levels=1):
        verified = planned(tmp_path, stages=SEED.replace("UPDATE", update), levels=levels)
        shutil.copytree(public(levels), verified.run.public, dirs_exist_ok=True)
        ensure_checked(verified)
        return verified

    return of


def model_of(verified):
    return (verified.run.released / "model.safetensors").read_bytes()


def command(start, verified, **more):
    return start("command", 1, words=["train", str(verified.run.root)], **more)


def charges(verified):
    state = read_state(verified.run, verified.lock)
    return state.settled, state.forfeited


def test_a_run_goes_on_wherever_it_was_cut_off(start, fresh):
    """One chunk settles, two are cut off in other places, and the last one is taken after both."""
    verified = fresh("lora")
    assert command(start, verified, kill_at={"0": "charge:written@2"})["codes"] == [-9]
    assert charges(verified) == ({1}, {2})
    assert command(start, verified, kill_at={"0": "checkpoint:written"})["codes"] == [-9]
    assert charges(verified) == ({1}, {2, 3})
    verified = load_verified(verified.run.root)
    found = train(verified)
    assert found == {
        "released": "model.safetensors",
        "steps": 2,
        "private_tokens": 4,
        "parameters": "lora",
    }
    assert charges(verified) == ({1, 4}, {2, 3})
    assert read_state(verified.run, verified.lock).closed
    with pytest.raises(BudgetError, match="closed"):
        train(verified)
    (whole,) = replay(verified.run.root).runs
    assert (whole.settled, whole.forfeited, whole.closed) == (2, 2, True)
    assert whole.epsilon <= 8.0
    public, facts = load_tensors(verified.run.public / "transformer.safetensors")
    released, about = load_tensors(verified.run.released / "model.safetensors")
    assert {n: a.shape for n, a in released.items()} == {n: a.shape for n, a in public.items()}
    assert about == {"format": facts["format"], "sizes": facts["sizes"], "room": "released"}
    for name, array in released.items():
        layers = ("mix_in", "mix_out", "text_in", "up", "down")
        moved = name.startswith("coarse.layers.") and name.split(".")[3] in layers
        moved = moved and name.endswith("weight")
        assert np.array_equal(array, public[name]) != moved
    load_transformer(verified.run.released / "model.safetensors", sizes_of(verified.plan))


@pytest.mark.parametrize(("update", "levels"), [("lora", 1), ("all", 0)])
def test_the_model_is_the_same_with_torch_and_without(fresh, update, levels):
    """What training writes at its end, and what NumPy makes of the last checkpoint, bit for bit."""
    verified = fresh(update, levels)
    train(verified)
    run, lock, by_training = verified.run, verified.lock, model_of(verified)
    last = lock.stage_slots("train")[-1]
    names = [path.name for path in (run.curator / "checkpoints").iterdir()]
    assert names == [f"{last.name}.safetensors"]
    digest = json.loads(run.transcript.read_text().splitlines()[-2])["sha256"]
    (run.released / "model.safetensors").unlink()
    assert finish_model(run, lock, last, digest) == 4
    assert model_of(verified) == by_training
    arrays, _ = load_tensors(run.released / "model.safetensors")
    public, facts = load_tensors(run.public / "transformer.safetensors")
    assert all(np.array_equal(arrays[n], public[n]) for n in public if n.startswith("fine."))
    assert not all(np.array_equal(arrays[n], public[n]) for n in public)
    assert any(n.startswith("fine.") for n in public) == (levels == 1)
    require_checkpoint(verified)
    # Another transformer than the calibration names makes no model of it.
    bias = public["coarse.norm.bias"]
    path = run.public / "transformer.safetensors"
    save_tensors(path, public | {"coarse.norm.bias": bias + 1}, facts)
    with pytest.raises(ReplayError, match="is not the file that calibration"):
        finish_model(run, lock, last, digest)


def require_checkpoint(verified):
    """It holds what noisy gradients made and no more: no id, no caption, nothing of a record."""
    (path,) = (verified.run.curator / "checkpoints").iterdir()
    arrays, facts = load_tensors(path)
    assert facts["room"] == "curator"
    parts = {name.partition("/")[0] for name in arrays}
    assert parts == {"average", "model", "exp_avg", "exp_avg_sq"}
    names = {name.partition("/")[2] for name in arrays}
    task = TokenTask.load(verified.run, verified.plan)
    assert names == {n for n, p in task.model.named_parameters() if p.requires_grad}
    assert all(array.dtype == np.float32 for array in arrays.values())


def test_a_run_that_is_closed_in_the_middle_has_the_model_of_its_settled_steps(start, fresh):
    verified = fresh("attention")
    assert command(start, verified, kill_at={"0": "checkpoint:before@3"})["codes"] == [-9]
    assert charges(verified) == ({1, 2}, {3})
    run, lock = verified.run, verified.lock
    close_run(run, lock)
    task = TokenTask.load(run, verified.plan)
    state = TrainingState(task.model, task.work.settings, 0.0, task.facts)
    state.load(checkpoint_path(run, lock.stage_slots("train")[1]))
    assert state.step == 2
    task.save(state.averaged(), run.root / "expected.safetensors")
    assert model_of(verified) == (run.root / "expected.safetensors").read_bytes()
    assert replay(run.root)
