"""DP-LoRA on a tiny text-to-image checkpoint: plan to hand-out, cut off, resumed and replayed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from frozenkit import latent_of, sd3_pipeline, tiny_sd3

from dpsynth.artifacts.adapter import CONFIG, DIFFUSERS, PEFT
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.manifest import check_manifest, write_manifest
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import read_state
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.errors import ReplayError, UsageError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import VerifiedPlan, load_verified, make_run

pytest.importorskip("diffusers")
pytest.importorskip("peft")

PLAN = """\
version: 1
name: tuned
budget: {{epsilon: 8.0, delta: 1e-3}}
private:
  source: {{kind: npz, path: {private}}}
  capacity: 60
  image: {{height: 16, width: 16, channels: 3}}
  classes: [cat, dog]
  held_out: {{by: hash, fraction: 0.1}}
public: [{{kind: prior, count: 12}}]
representation: {{kind: latent, clip_quantile: 0.95}}
prior:
  kind: diffusers
  model: {model}
  latent: {{channels: {latent[0]}, height: {latent[1]}, width: {latent[2]}}}
  prompt: "a photo of a {{label}}"
stages:
  moments: {{covariance: public, groups: auto, projection: 4}}
  train:
    parameters: lora
    lora: {{rank: 2, scale: 3.0}}
    {times}
    buckets: 1
    multiplicity: 2
    rate: 0.2
    steps: 5
    chunk: 2
    learning_rate: 0.2
    ema: 0.0
{more}
sampling: {{method: flow, steps: 2, guidance: 2.0, count: 4}}
"""
NO_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "diffusers", "peft"):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Absent())
sys.argv[0] = "dpsynth"
from dpsynth.cli import main
main()
"""


def planned(root: Path, name: str, *, times: str = "times: logit-normal", more: str = ""):
    """A run of a joint plan, with its public room, checked and with its moments released."""
    from dpsynth.assess.check import ensure_checked
    from dpsynth.private.moments import release_moments
    from dpsynth.public.pretrain import pretrain

    model = root / "model"
    if not model.exists():
        tiny_sd3(model, layers=2)
        rng = np.random.default_rng(0)
        images = rng.integers(0, 255, (60, 16, 16, 3), dtype=np.uint8)
        np.savez(root / "private.npz", images=images, labels=rng.integers(0, 2, 60))
    text = PLAN.format(
        private=root / "private.npz", model=model, latent=latent_of(model), times=times, more=more
    )
    (root / f"{name}.yaml").write_text(text)
    verified = make_run(root / f"{name}.yaml", root / name / "run")
    pretrain(verified)
    ensure_checked(verified)
    release_moments(verified)
    return verified


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the run: with half of its steps, with all of them, and handed out."""
    from dpsynth.private import dpsgd
    from dpsynth.private.engine import EngineSettings
    from dpsynth.released.sampling import sample

    root = tmp_path_factory.mktemp("tuned")
    verified = planned(root, "whole")
    reached = []

    def cut(place: str) -> None:
        reached.append(place)
        if reached.count("checkpoint:before") == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpsgd, "reach", cut)
        with pytest.raises(KeyboardInterrupt):
            dpsgd.train(verified, engine=EngineSettings(physical=3))
    shutil.copytree(root / "whole", root / "half")
    # Another physical batch: no more than rounding, and nothing of what is charged.
    done = dpsgd.train(load_verified(verified.run.root), engine=EngineSettings(physical=5))
    assert done["steps"] == 3  # two settled, two forfeited, and the fifth
    sample(load_verified(verified.run.root))
    return {name: root / name for name in ("model", "whole", "half")}


def test_charges_are_kept_by_the_interruption(story):
    run = RunDir(story["whole"] / "run")
    state = read_state(run, read_lock(run.lock))
    assert state.closed
    assert len(state.settled) == 3  # the moments, and chunks 1 and 3
    assert len(state.forfeited) == 1
    report = replay(run.released)
    assert report.ok
    assert report.runs[0].epsilon <= 8.0


def test_the_model_holds_prompts_and_factors_and_no_weight_of_the_prior(story):
    run = RunDir(story["whole"] / "run")
    arrays, facts = load_tensors(run.released / "model.safetensors")
    start, _ = load_tensors(run.public / "prior.safetensors")
    assert arrays.keys() == start.keys()
    factors = {name for name in arrays if ".lora_" in name}
    assert {name.partition(".")[0] for name in arrays.keys() - factors} == {"prompt", "mean"}
    assert all((arrays[n] == start[n]).all() == (n not in factors) for n in arrays)
    assert facts["room"] == "released"


def test_the_adapter_is_handed_out_and_loads_as_it_is(story):
    from dpsynth.models.velocity import load_for

    run = RunDir(story["whole"] / "run")
    listed = check_manifest(run.released)["files"]
    assert {f"adapter/{name}" for name in (CONFIG, PEFT, DIFFUSERS)} <= set(listed)
    assert f"adapter/{PEFT}" in (run.released / "card.md").read_text()
    assert str(story["model"]) not in (run.released / "adapter" / CONFIG).read_text()
    plan = load_verified(run.root).plan
    own = load_for(run.released / "model.safetensors", plan)[0].transformer
    pipeline = sd3_pipeline(story["model"])
    draw = torch.Generator().manual_seed(0)
    config = own.config

    def noise(*shape):
        return torch.randn(shape, generator=draw)

    given = {
        "hidden_states": noise(2, *latent_of(story["model"])),
        "encoder_hidden_states": noise(2, 5, config.joint_attention_dim),
        "pooled_projections": noise(2, config.pooled_projection_dim),
        "timestep": torch.tensor([10.0, 700.0]),
        "return_dict": False,
    }
    with torch.no_grad():
        before, wanted = pipeline.transformer(**given)[0], own(**given)[0]
        pipeline.load_lora_weights(run.released / "adapter")
        found = pipeline.transformer(**given)[0]
    assert (before - wanted).abs().max() > 1e-2
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_a_model_that_the_engine_refuses_costs_no_charge(story, tmp_path, monkeypatch):
    from dpsynth.private import dpsgd
    from dpsynth.private.engine import PerExampleClipper

    def refused(*batch: object) -> None:
        raise UsageError(f"a layer mixes examples, in a batch of {len(batch)}")

    shutil.copytree(story["half"], tmp_path / "here")
    run = RunDir(tmp_path / "here" / "run")
    before = run.transcript.read_bytes()
    monkeypatch.setattr(PerExampleClipper, "clipped_sum", refused)
    with pytest.raises(UsageError, match="mixes examples"):
        dpsgd.train(load_verified(run.root))
    assert run.transcript.read_bytes() == before


def test_close_ends_a_cut_training_without_torch(story, tmp_path):
    shutil.copytree(story["half"], tmp_path / "here")
    run = RunDir(tmp_path / "here" / "run")
    before = load_tensors(run.public / "prior.safetensors")[0]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, "close", str(run.root), "--json"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "made of the 2 steps of training that settled" in done.stderr
    after = load_tensors(run.released / "model.safetensors")[0]
    moved = {name for name in after if (after[name] != before[name]).any()}
    assert moved == {name for name in after if ".lora_" in name}
    assert replay(run.released).ok
    held = load_tensors(run.released / "adapter" / PEFT)[0]
    name = "transformer_blocks.0.attn.to_q.lora_B"
    own = after[f"transformer.{name}.default.weight"]
    assert (held[f"base_model.model.{name}.weight"] == own).all()


def test_close_and_training_write_the_same_bytes(story, tmp_path):
    from dpsynth.artifacts.trained import finish_model

    shutil.copytree(story["whole"], tmp_path / "here")
    run = RunDir(tmp_path / "here" / "run")
    lock = read_lock(run.lock)
    made = [run.released / "model.safetensors", *sorted((run.released / "adapter").iterdir())]
    hashes = [sha256_file(path) for path in made]
    for path in made:
        path.unlink()
    last = max((path for path in (run.curator / "checkpoints").iterdir()), key=lambda p: p.name)
    slot = next(one for one in lock.stage_slots("train") if one.name == last.stem)
    assert finish_model(run, lock, slot, sha256_file(last)) == 3
    assert hashes == [sha256_file(path) for path in made]


def test_an_adapter_without_its_model_is_not_handed_out(story, tmp_path):
    from dpsynth.released.handout import hand_out

    shutil.copytree(story["whole"], tmp_path / "here")
    run = RunDir(tmp_path / "here" / "run")
    changed = run.released / "adapter" / PEFT
    right = changed.read_bytes()
    changed.write_bytes(b"others")
    hand_out(run)
    assert changed.read_bytes() == right
    (run.released / "model.safetensors").unlink()
    with pytest.raises(ReplayError, match="adapter"):
        hand_out(run)


def test_replay_refuses_a_hand_out_of_an_adapter_alone(story, tmp_path):
    handed = tmp_path / "handed"
    shutil.copytree(story["whole"] / "run" / "released", handed)
    (handed / "model.safetensors").unlink()
    write_manifest(handed)  # by whoever took the model out
    with pytest.raises(ReplayError, match=r"without the model\.safetensors"):
        replay(handed)


@pytest.mark.parametrize("stranger", ["adapter_model.bin", "notes.txt", "checkpoint-2"])
def test_nothing_else_lies_in_an_adapter_that_is_handed_out(story, tmp_path, stranger):
    from dpsynth.released.handout import hand_out

    shutil.copytree(story["whole"], tmp_path / "here")
    run = RunDir(tmp_path / "here" / "run")
    path = run.released / "adapter" / stranger
    path.write_bytes(b"not private") if path.suffix else path.mkdir()
    with pytest.raises(ReplayError, match=stranger):
        hand_out(run)
    if path.suffix == ".bin":
        write_manifest(run.released)  # by whoever put it there
        with pytest.raises(ReplayError, match="is no file of a hand-out"):
            replay(run.released)


@pytest.mark.parametrize(
    ("name", "value"), [("DTYPE", "float16"), ("DEVICE", "meta"), ("BATCH", "many")]
)
def test_settings_that_cannot_train_are_refused_before_a_charge(
    story, tmp_path, monkeypatch, name, value
):
    from dpsynth.private.dpsgd import train

    shutil.copytree(story["half"], tmp_path / "here")
    verified = load_verified(tmp_path / "here" / "run")
    before = verified.run.transcript.read_bytes()
    monkeypatch.setenv(f"DPSYNTH_{name}", value)
    with pytest.raises(UsageError, match=value):
        train(verified)
    assert verified.run.transcript.read_bytes() == before


def test_the_reference_without_privacy_keeps_factors_alone(story):
    from dpsynth.assess.nonprivate.making import reference

    run = RunDir(story["whole"] / "run")
    for _ in range(2):  # the second is kept
        assert reference(load_verified(run.root), "nonprivate", 3)["count"] == 3
    arrays, facts = load_tensors(run.curator / "reference-nonprivate.safetensors")
    assert facts["room"] == "curator"
    assert all(".lora_" in name for name in arrays)
    moved = (run.curator / "reference-nonprivate" / "metadata.csv").stat().st_mtime_ns
    assert reference(load_verified(run.root), "nonprivate", 2)["count"] == 2
    assert (run.curator / "reference-nonprivate" / "metadata.csv").stat().st_mtime_ns != moved


def test_distillation_teaches_the_factors_and_training_goes_on_there(story):
    """The paper's negative control: the analytic field in the factors of a large prior."""
    from dpsynth.private.dpsgd import train
    from dpsynth.released.distill import distill

    more = "distillation: {steps: 3, batch: 4, learning_rate: 0.01, horizon: 0.35}"
    verified: VerifiedPlan = planned(
        story["model"].parent, "distilled", times="times: uniform", more=more
    )
    distill(verified)
    start, facts = load_tensors(verified.run.public / "prior.safetensors")
    taught, said = load_tensors(verified.run.released / "distilled.safetensors")
    moved = {name for name in taught if (taught[name] != start[name]).any()}
    assert moved == {name for name in taught if ".lora_" in name}
    assert said["frozen"] == facts["frozen"]
    assert distill(verified)["sha256"] == sha256_file(
        verified.run.released / "distilled.safetensors"
    )
    assert train(verified)["from_time"] == 0.35
    assert (verified.run.released / "adapter" / CONFIG).is_file()
