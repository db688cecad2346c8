"""LoRA factors beside a frozen transformer, and the folder that peft and diffusers load."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from frozenkit import TEXT_DIM, sd3_pipeline, tiny_flux, tiny_sd3
from torch import nn

from dpsynth.artifacts.adapter import (
    ADAPTER,
    CONFIG,
    DIFFUSERS,
    PEFT,
    adapter_facts,
    factors_of,
    write_adapter,
)
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import UsageError
from dpsynth.models.frozen.adapters import add_factors, start_factors
from dpsynth.models.trainable import train_only
from dpsynth.planning.optimizer import LowRank

pytest.importorskip("peft")
diffusers = pytest.importorskip("diffusers")


class Holder(nn.Module):
    """A transformer where a velocity model of a frozen prior has it."""

    def __init__(self, transformer):
        super().__init__()
        self.transformer = transformer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    tiny_sd3(root / "sd3", layers=2, qk_norm="rms_norm", dual=(0,))
    tiny_flux(root / "flux")
    return root


def pipeline(checkpoints, kind):
    if kind == "sd3":
        return sd3_pipeline(checkpoints / kind)
    found = diffusers.FluxPipeline.from_pretrained(checkpoints / kind, local_files_only=True)
    found.set_progress_bar_config(disable=True)
    return found


@torch.no_grad()
def predicted(transformer, kind):
    draw = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(shape, generator=draw)

    text = {"encoder_hidden_states": noise(2, 7, 2 * TEXT_DIM), "return_dict": False}
    if kind == "sd3":
        return transformer(
            hidden_states=noise(2, 4, 4, 4), pooled_projections=noise(2, 2 * TEXT_DIM),
            timestep=torch.tensor([3.0, 500.0]), **text,
        )[0]  # fmt: skip
    return transformer(
        hidden_states=noise(2, 16, 16), pooled_projections=noise(2, TEXT_DIM),
        timestep=torch.tensor([0.1, 0.5]), guidance=torch.ones(2),
        img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(7, 3), **text,
    )[0]  # fmt: skip


def adapted(checkpoints, kind, scale=3.0, folder=None):
    """A holder whose factors moved, and a released file of them in `folder`."""
    model = Holder(pipeline(checkpoints, kind).transformer)
    add_factors(model.transformer, LowRank(rank=4, scale=scale), seed=3)
    draw = torch.Generator().manual_seed(2)
    for factor in start_factors(model).values():
        factor.add_(0.3 * torch.randn(factor.shape, generator=draw))
    if folder is not None:
        arrays = {name: factor.numpy() for name, factor in start_factors(model).items()}
        facts = {"room": "released", ADAPTER: adapter_facts(4, scale, "a/b", None)}
        save_tensors(folder / "model.safetensors", {"mean": np.zeros(3), **arrays}, facts)
    return model


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_factors_start_as_nothing_and_are_all_that_moves(checkpoints, kind):
    model = Holder(pipeline(checkpoints, kind).transformer)
    before = predicted(model.transformer, kind)
    add_factors(model.transformer, LowRank(rank=2, scale=2.0), seed=3)
    assert torch.equal(predicted(model.transformer, kind), before)
    train_only(model, "lora")
    moving = {name for name, p in model.named_parameters() if p.requires_grad}
    assert moving == set(start_factors(model))
    assert all(p.dtype == torch.float32 for p in start_factors(model).values())
    assert all(bool(p.any()) == (".lora_A." in n) for n, p in start_factors(model).items())
    for parameters in ("all", "last", "attention"):
        with pytest.raises(UsageError, match="never move"):
            train_only(model, parameters)
    with pytest.raises(UsageError, match="already"):
        add_factors(model.transformer, LowRank(), seed=3)


def test_the_seed_decides_the_start(checkpoints):
    found = []
    for seed in (3, 3, 4):
        model = Holder(pipeline(checkpoints, "sd3").transformer)
        add_factors(model.transformer, LowRank(rank=2), seed=seed)
        found.append(torch.cat([p.flatten() for p in start_factors(model).values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_what_nothing_depends_on_has_no_factors(checkpoints):
    model = Holder(pipeline(checkpoints, "sd3").transformer)
    add_factors(model.transformer, LowRank(rank=2), seed=0)
    names = set(start_factors(model))
    assert any("transformer_blocks.0.attn.add_q_proj" in name for name in names)
    assert any("transformer_blocks.0.attn2.to_q" in name for name in names)
    assert any("transformer_blocks.1.attn.add_k_proj" in name for name in names)
    assert not any("transformer_blocks.1.attn.add_q_proj" in name for name in names)


def test_a_module_without_attention_is_refused():
    with pytest.raises(UsageError, match="Linear"):
        add_factors(nn.Linear(2, 2), LowRank(), seed=0)


@pytest.mark.parametrize(("kind", "scale"), [("sd3", 4.0), ("sd3", 3.0), ("flux", 3.0)])
def test_diffusers_and_peft_load_the_folder_as_it_is(checkpoints, kind, scale, tmp_path):
    import peft

    model = adapted(checkpoints, kind, scale, tmp_path)
    folder = write_adapter(tmp_path / "model.safetensors")
    wanted = predicted(model.transformer, kind)
    fresh = pipeline(checkpoints, kind)
    plain = predicted(fresh.transformer, kind)
    assert (plain - wanted).abs().max() > 0.05
    fresh.load_lora_weights(folder)
    torch.testing.assert_close(predicted(fresh.transformer, kind), wanted, atol=1e-6, rtol=1e-5)
    fresh = pipeline(checkpoints, kind)
    loaded = peft.PeftModel.from_pretrained(fresh.transformer, folder)
    torch.testing.assert_close(predicted(loaded, kind), wanted, atol=1e-6, rtol=1e-5)


def test_the_folder_is_the_same_bytes_each_time(checkpoints, tmp_path):
    adapted(checkpoints, "sd3", folder=tmp_path)
    folder = write_adapter(tmp_path / "model.safetensors")
    assert {path.name for path in folder.iterdir()} == {CONFIG, PEFT, DIFFUSERS}
    hashes = {path.name: sha256_file(path) for path in folder.iterdir()}
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    write_adapter(tmp_path / "model.safetensors")
    assert times == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / PEFT).write_bytes(b"something else")
    write_adapter(tmp_path / "model.safetensors")
    assert hashes == {path.name: sha256_file(path) for path in folder.iterdir()}
    config = json.loads((folder / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 3, "a/b")


def test_only_whole_factors_make_a_folder(checkpoints, tmp_path):
    adapted(checkpoints, "sd3", folder=tmp_path)
    path = tmp_path / "model.safetensors"
    arrays, facts = load_tensors(path)
    name = next(name for name in arrays if ".lora_B." in name)
    for wrong in (
        {key: array for key, array in arrays.items() if key != name},
        {**arrays, name: arrays[name][:, :-1]},
        {"mean": arrays["mean"]},
    ):
        with pytest.raises(UsageError, match="LoRA"):
            factors_of(wrong)
    save_tensors(path, arrays, facts | {ADAPTER: "{}"})
    with pytest.raises(UsageError, match="damaged"):
        write_adapter(path)
    save_tensors(path, arrays, facts | {"room": "curator"})
    with pytest.raises(UsageError, match="not for release"):
        write_adapter(path)
    save_tensors(path, arrays, {"room": "released"})
    assert write_adapter(path) is None
    assert not (Path(tmp_path) / "adapter").exists()
