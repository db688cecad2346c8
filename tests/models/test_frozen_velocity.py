"""A frozen model as a velocity field: its steps are the pipeline's own."""

import copy

import numpy as np
import pytest
import torch
from frozenkit import frozen_plan, sd3_pipeline, tiny_flux, tiny_sd3

from dpsynth.errors import MissingError, PlanError, UsageError
from dpsynth.models.flow import euler
from dpsynth.models.frozen.checkpoint import open_checkpoint, require_weights
from dpsynth.models.frozen.families import EMBEDS, POOLED, packed, unpacked
from dpsynth.models.frozen.latents import LatentCodec
from dpsynth.models.frozen.machine import machine
from dpsynth.models.frozen.prompts import encode_prompts
from dpsynth.models.frozen.schedule import euler_times, schedule_of
from dpsynth.models.frozen.stored import build_frozen
from dpsynth.models.seeding import generator

pytest.importorskip("diffusers")
LABELS = ["cat", "red dog", ""]


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    return tiny_sd3(tmp_path_factory.mktemp("frozen") / "sd3")


@pytest.fixture(scope="module")
def model(sd3):
    plan = frozen_plan(sd3)
    return build_frozen(plan, encode_prompts(open_checkpoint(plan), LABELS))


def test_steps_are_the_pipeline_s_own(sd3, model):
    noise = torch.randn(2, *model.shape, generator=generator(1))
    pipeline = sd3_pipeline(sd3)
    wanted = pipeline(
        LABELS[:2], height=16, width=16, num_inference_steps=6, guidance_scale=7.0,
        latents=noise.clone(), output_type="latent",
    ).images  # fmt: skip
    found = euler(model, noise.flatten(1), torch.tensor([0, 1]), null=2, steps=6, guidance=7.0)
    torch.testing.assert_close(found.view(wanted.shape), wanted, rtol=1e-4, atol=1e-4)


def test_the_later_version_s_blocks_too(tmp_path):
    """Stable Diffusion 3.5: a second attention of the image alone, normalised queries and keys."""
    folder = tiny_sd3(tmp_path / "sd35", layers=2, dual=(0,), qk_norm="rms_norm", channels=16)
    plan = frozen_plan(folder)
    model = build_frozen(plan, encode_prompts(open_checkpoint(plan), LABELS))
    noise = torch.randn(1, *model.shape, generator=generator(1))
    wanted = sd3_pipeline(folder)(
        LABELS[1], height=16, width=16, num_inference_steps=3, guidance_scale=1.0, latents=noise,
        output_type="latent",
    ).images  # fmt: skip
    found = euler(model, noise.flatten(1), torch.tensor([1]), null=2, steps=3)
    torch.testing.assert_close(found.view(wanted.shape), wanted, rtol=1e-4, atol=1e-4)


def test_weights_in_bfloat16_are_near(sd3, model, monkeypatch):
    x, t = torch.randn(2, model.dim, generator=generator(1)), torch.tensor([0.2, 0.8])
    monkeypatch.setenv("DPSYNTH_DTYPE", "bfloat16")
    plan = frozen_plan(sd3)
    coarse = build_frozen(plan, encode_prompts(open_checkpoint(plan), LABELS))
    with torch.no_grad():
        found, wanted = (one(x, t, torch.tensor([0, 1])) for one in (coarse, model))
    assert found.dtype == torch.float32 and next(coarse.parameters()).dtype == torch.bfloat16
    assert 0 < (found - wanted).abs().max() < 0.2 * wanted.abs().max()


def test_flux_too(tmp_path):
    from diffusers import FluxPipeline

    folder = tiny_flux(tmp_path / "flux")
    plan = frozen_plan(folder, family="flux")
    model = build_frozen(plan, encode_prompts(open_checkpoint(plan), LABELS))
    noise = torch.randn(2, *model.shape, generator=generator(1))
    pipeline = FluxPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    wanted = pipeline(
        LABELS[:2], negative_prompt=["", ""], true_cfg_scale=2.0, height=16, width=16,
        num_inference_steps=5, latents=packed(noise), output_type="latent",
    ).images  # fmt: skip
    found = euler(model, noise.flatten(1), torch.tensor([0, 1]), null=2, steps=5, guidance=2.0)
    wanted = unpacked(wanted, *model.shape[1:])
    torch.testing.assert_close(found.view(wanted.shape), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 28])
def test_sigma_is_one_less_time(shift, steps):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    found = schedule_of(dict(scheduler.config), 16, even=False).times(steps)
    assert 1.0 - np.array(found) == pytest.approx(scheduler.sigmas.numpy(), abs=1e-6)
    assert scheduler.timesteps.numpy() == pytest.approx(
        1000 * (1.0 - np.array(found[:-1])), abs=1e-3
    )


def test_a_later_start_keeps_the_levels_below_it():
    whole, later = euler_times(28, 3.0), euler_times(28, 3.0, 0.05)
    assert later[0] == 0.05 and later[-1] == 1.0
    assert later[1:] == [t for t in whole if t > 0.05] and len(later) < len(whole)
    assert euler_times(4, 1.0, 0.999) == [0.999, 1.0]


def test_other_schedulers_are_refused():
    with pytest.raises(UsageError, match="use_karras_sigmas"):
        schedule_of({"use_karras_sigmas": True}, 4, even=False)
    with pytest.raises(UsageError, match="DDIM"):
        schedule_of({"_class_name": "DDIMScheduler"}, 4, even=False)


def test_the_mean_moves_codes_and_velocity(sd3, model):
    mean = np.linspace(-1, 1, model.dim)
    centred = build_frozen(frozen_plan(sd3), model.prompts, mean)
    x, t = torch.randn(3, model.dim, generator=generator(2)), torch.tensor([0.1, 0.5, 0.9])
    y = torch.tensor([0, 1, 2])
    moved = model(x + t[:, None] * centred.mean, t, y) - centred.mean
    torch.testing.assert_close(centred(x, t, y), moved)


def test_draws_side_by_side_are_rows(model, monkeypatch):
    x = torch.randn(3, 2, model.dim, generator=generator(3))
    t, y = torch.rand(3, 2, generator=generator(4)), torch.tensor([0, 1, 2])
    with torch.no_grad():
        found = model(x, t, y)
        each = torch.stack([model(x[:, k], t[:, k], y) for k in range(2)], 1)
        torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-5)
        monkeypatch.setenv("DPSYNTH_BATCH", "1")
        torch.testing.assert_close(model(x, t, y), found, rtol=1e-4, atol=1e-5)


def test_copies_share_the_frozen_weights(model):
    copied = copy.deepcopy(model)
    own = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert {name: p.data_ptr() for name, p in copied.named_parameters()} == own
    assert copied.transformer is not model.transformer


def test_a_code_is_a_latent_in_the_transformer_s_units(sd3):
    codec, pipeline = LatentCodec.of(frozen_plan(sd3)), sd3_pipeline(sd3)
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
    pixels = pipeline.image_processor.preprocess(list(images.astype(np.float32) / 255))
    config = pipeline.vae.config
    with torch.no_grad():
        latents = pipeline.vae.encode(pixels).latent_dist.mode()
        latents = (latents - config.shift_factor) * config.scaling_factor
        decoded = pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor).sample
    codes = codec.encode_rows(images)
    assert codes == pytest.approx(latents.flatten(1).numpy(), abs=1e-4)
    assert codec.encode_many(images).numpy() == pytest.approx(codes, abs=1e-4)
    assert codec.encode_rows(images[1:2])[0].tobytes() == codes[1].tobytes()
    shown = codec.decode(torch.from_numpy(codes)).permute(0, 3, 1, 2)
    torch.testing.assert_close(shown.float(), decoded / 2 + 0.5, rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_is_said(sd3, tmp_path):
    with pytest.raises(PlanError, match="the VAE makes"):
        open_checkpoint(frozen_plan(sd3, latent=(8, 4, 4)))
    with pytest.raises(PlanError, match=r"prior\.family is flux"):
        open_checkpoint(frozen_plan(sd3, family="flux"))
    with pytest.raises(MissingError, match="there is no folder"):
        open_checkpoint(frozen_plan(tmp_path / "gone", latent=(4, 4, 4)))
    with pytest.raises(PlanError, match="not those that this run was calibrated with"):
        require_weights(open_checkpoint(frozen_plan(sd3)), "0" * 64)


def test_a_part_that_is_missing(tmp_path):
    folder = tiny_sd3(tmp_path / "sd3")
    plan = frozen_plan(folder)
    (folder / "text_encoder_2").rename(folder / "elsewhere")
    with pytest.raises(MissingError, match="no text_encoder_2/"):
        encode_prompts(open_checkpoint(plan), LABELS)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(MissingError, match=r"no vae/\*.safetensors"):
        _ = open_checkpoint(plan).weights_sha256
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(MissingError, match=r"no vae/config\.json"):
        open_checkpoint(plan)


def test_a_hub_id_without_network(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MissingError, match="not on this machine"):
        open_checkpoint(frozen_plan("stabilityai/no-such-model", latent=(4, 4, 4)))


def test_prompts_that_read_alike(sd3):
    found = open_checkpoint(frozen_plan(sd3))
    with pytest.raises(UsageError, match="alike"):
        encode_prompts(found, ["cat", "dog " * 30 + "cat", "dog " * 30 + "emu"])
    encoded = encode_prompts(found, ["cat", ""])
    assert {name: len(rows) for name, rows in encoded.items()} == {EMBEDS: 2, POOLED: 2}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("DTYPE", "int8", "expected float32"), ("BATCH", "0", "above 0"), ("DEVICE", "tpu9", "cpu")],
)
def test_machine_settings_that_mean_nothing(monkeypatch, name, value, why):
    monkeypatch.setenv(f"DPSYNTH_{name}", value)
    with pytest.raises(UsageError, match=why):
        _ = machine().torch_device
