"""Checkpoints that are damaged, hostile or replaced meanwhile: said in a line, and never used."""

import json
import shutil

import pytest
import torch
from frozenkit import frozen_plan, tiny_flux, tiny_sd3

from dpsynth.errors import DpsynthError, MissingError, PlanError, UsageError
from dpsynth.models.frozen import families
from dpsynth.models.frozen.checkpoint import open_checkpoint
from dpsynth.models.frozen.latents import LatentCodec
from dpsynth.models.frozen.machine import is_there, machine
from dpsynth.models.frozen.prompts import encode_prompts
from dpsynth.models.frozen.stored import build_frozen

pytest.importorskip("diffusers")
TEXTS = ["cat", ""]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_sd3(tmp_path_factory.mktemp("whole") / "sd3")


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of its own."""
    return shutil.copytree(whole, tmp_path / "sd3")


def weights(folder, part):
    return next((folder / part).glob("*.safetensors"))


def without_one(path):
    from safetensors.torch import load_file, save_file

    held = load_file(path)
    held.pop(sorted(held)[5])
    save_file(held, path, metadata={"format": "pt"})


def configured(folder, part, **values):
    path = next((folder / part).glob("*config.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("part", ["vae", "transformer", "text_encoder"])
def test_weights_that_are_not_there_are_not_drawn(folder, part):
    plan = frozen_plan(folder)
    without_one(weights(folder, part))
    with pytest.raises(MissingError, match=f"{part} lacks 1 of its weights"):
        found = open_checkpoint(plan)
        build_frozen(plan, encode_prompts(found, TEXTS)), LatentCodec.of(plan)


@pytest.mark.parametrize("part", ["vae", "transformer", "text_encoder"])
def test_weights_that_are_no_safetensors(folder, part):
    plan = frozen_plan(folder)
    weights(folder, part).write_bytes(b"junk" * 100)
    with pytest.raises(MissingError, match=f"{part} cannot be loaded"):
        found = open_checkpoint(plan)
        build_frozen(plan, encode_prompts(found, TEXTS)), LatentCodec.of(plan)


def test_tied_weights_are_there(tmp_path):
    found = open_checkpoint(frozen_plan(tiny_flux(tmp_path / "flux"), family="flux"))
    assert len(encode_prompts(found, TEXTS)["prompt.pooled"]) == 2


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer"])
def test_code_in_a_checkpoint_is_not_run_and_nobody_is_asked(folder, part, monkeypatch, capfd):
    (folder / part / "evil.py").write_text("raise SystemExit('evil code ran')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    own = {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None]}
    configured(folder, part, auto_map=own, model_type="evil", tokenizer_class="Evil")
    with pytest.raises(MissingError, match=f"{part} cannot be loaded"):
        encode_prompts(open_checkpoint(frozen_plan(folder)), TEXTS)
    assert "Do you wish to run" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("text_encoder", {"architectures": ["Nothing"]}),
        ("text_encoder", {"architectures": []}),
        ("transformer", {"patch_size": [2]}),
        ("transformer", {"pos_embed_max_size": "many"}),
        ("vae", {"block_out_channels": 5}),
        ("scheduler", {"shift": "much"}),
        ("scheduler", {"num_train_timesteps": 0}),
    ],
)
def test_configurations_that_mean_nothing(folder, part, values):
    configured(folder, part, **values)
    plan = frozen_plan(folder, latent=(4, 4, 4))
    with pytest.raises(DpsynthError, match="cannot be loaded"):
        build_frozen(plan, encode_prompts(open_checkpoint(plan), TEXTS))


def test_weights_replaced_while_they_are_read(folder, monkeypatch, tmp_path):
    plan, other = frozen_plan(folder), tiny_sd3(tmp_path / "other", seed=1)
    library = families.diffusers()
    real = library.AutoencoderKL.from_pretrained

    def swapped(*args, **kwargs):
        shutil.copy(weights(other, "vae"), weights(folder, "vae"))
        return real(*args, **kwargs)

    monkeypatch.setattr(library.AutoencoderKL, "from_pretrained", swapped)
    with pytest.raises(PlanError, match="not those that this run was calibrated with"):
        LatentCodec.of(plan)


@pytest.mark.parametrize("name", ["meta", "cuda:99", "mps:7", "xla"])
def test_a_device_that_does_not_compute_is_refused_before_a_charge(whole, monkeypatch, name):
    monkeypatch.setenv("DPSYNTH_DEVICE", name)
    with pytest.raises(UsageError, match="--device"):
        _ = machine().torch_device
    with pytest.raises(UsageError, match="--device"):
        LatentCodec.of(frozen_plan(whole))


def test_a_part_that_lies_on_a_gpu_is_not_moved_again():
    place = torch.device
    assert is_there(place("cuda:0"), place("cuda"))
    assert is_there(place("cuda:1"), place("cuda:1"))
    assert not is_there(place("cuda:0"), place("cuda:1"))
    assert not is_there(place("cpu"), place("cuda"))
