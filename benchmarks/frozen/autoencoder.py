"""The small prior's autoencoder: diffusers' `AutoencoderKL`, 16 latent channels as SD3's.

Trained on public images by absolute plus squared error and a light KL; afterwards its latents'
mean and standard deviation become `shift_factor` and `scaling_factor`, as in SD3.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.frozen import things
from benchmarks.frozen.sizes import Size

KL = 1e-5
RATE = 3e-3


def train(folder: Path, size: Size) -> Any:
    """The autoencoder in `folder`, trained where it is missing."""
    from diffusers import AutoencoderKL

    if not (folder / "config.json").exists():
        fit(size).save_pretrained(folder)
    return AutoencoderKL.from_pretrained(folder, local_files_only=True).eval()


def fit(size: Size) -> Any:
    """Train one from the start."""
    torch.manual_seed(0)
    model = build(size)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=size.rebuilding)
    grey, _ = things.clothes("train", slice(0, size.clothes))
    start = time.process_time()
    for step in range(size.rebuilding):
        rows = torch.randint(len(grey), (size.images,)).numpy()
        batch = as_tensor(things.dyed(grey[rows], things.STYLES["any"], step + 10, size.side))
        posterior = model.encode(batch).latent_dist
        gap = model.decode(posterior.sample()).sample - batch
        loss = gap.abs().mean() + gap.square().mean() + KL * posterior.kl().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        decay.step()
        if step % 100 == 0:
            spent = time.process_time() - start
            print(
                f"autoencoder {step}: {float(gap.detach().square().mean()):.4f}, {spent:.0f} s",
                flush=True,
            )
    with torch.no_grad():
        some = as_tensor(things.dyed(grey[:256], things.STYLES["any"], 3, size.side))
        found = model.encode(some).latent_dist.mode()
    model.register_to_config(
        shift_factor=float(found.mean()), scaling_factor=1 / float(found.std())
    )
    return model


def build(size: Size) -> Any:
    """The untrained model: three levels, half or a quarter of an image's side."""
    from diffusers import AutoencoderKL

    levels = len(size.widths)
    model = AutoencoderKL(
        sample_size=size.side,
        latent_channels=size.channels,
        block_out_channels=size.widths,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        norm_num_groups=1,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    with torch.no_grad():  # else it first has to learn not to drown its latents in noise
        model.encoder.conv_out.bias[size.channels :] -= 5.0
    return model


@torch.no_grad()
def latents(model: Any, images: things.Images) -> Tensor:
    """The latents (n, C, h, w) of images, in the transformer's units."""
    parts = (as_tensor(images[start : start + 64]) for start in range(0, len(images), 64))
    found = torch.cat([model.encode(part).latent_dist.mode() for part in parts])
    scaled: Tensor = (found - model.config.shift_factor) * model.config.scaling_factor
    return scaled


@torch.no_grad()
def pictures(model: Any, codes: Tensor) -> things.Images:
    """The images of latents (n, C, h, w)."""
    found = []
    for part in codes.split(64):
        drawn = model.decode(part / model.config.scaling_factor + model.config.shift_factor).sample
        found.append(((drawn.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8))
    whole: things.Images = torch.cat(found).permute(0, 2, 3, 1).numpy()
    return whole


def as_tensor(images: things.Images) -> Tensor:
    """Images uint8 (n, H, W, 3) as (n, 3, H, W) in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
