"""The Inception network of FID, with pytorch-fid's layers and weights that the user has.

Nothing is ever downloaded: weights come from a file that the user names, or from torch's hub
cache when pytorch-fid once put them there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.artifacts.files import sha256_file
from dpsynth.errors import MissingError, UsageError

WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
OFFICIAL = "6726825d"
"""First digits of the SHA-256 of pytorch-fid's own weights; torch hub names files so."""
WIDTH = 2048
SIDE = 299
BATCH = 50


@dataclass(frozen=True)
class Inception:
    """A loaded network and what it is: `name` goes into the report beside every FID."""

    net: nn.Module
    name: str

    def features(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Activations (n, 2048) of images uint8 (n, H, W, 1 or 3), as pytorch-fid computes them.

        Grey is copied to three channels; scaled to [0, 1], resized to 299x299 (bilinear, corners
        not aligned, no antialiasing), scaled to [-1, 1]; final average pool.
        """
        out = np.empty((len(images), WIDTH))
        with torch.no_grad():
            for start in range(0, len(images), BATCH):
                batch = _prepared(images[start : start + BATCH])
                out[start : start + BATCH] = self.net(batch).numpy()
        return out


def find_weights(named: Path | None) -> Path | None:
    """The weights file to use: `named`, else torch's hub cache, else None.

    Raises:
        MissingError: `named` is not there.
    """
    if named is not None:
        if not named.is_file():
            raise MissingError(
                f"no Inception weights at {named}", hint=f"--inception-weights PATH/{WEIGHTS}"
            )
        return named
    cached = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
    return cached if cached.is_file() else None


def load_inception(path: Path) -> Inception:
    """Build pytorch-fid's network and load `path` into it (tensors alone are unpickled).

    Raises:
        UsageError: the file holds something else.
    """
    net = build()
    try:
        net.load_state_dict(_read(path))
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, zip and key errors
        raise UsageError(
            f"{path} does not hold the weights of FID's Inception network",
            hint=f"use pytorch-fid's {WEIGHTS}",
        ) from error
    digest = sha256_file(path)
    origin = "pytorch-fid weights" if digest.startswith(OFFICIAL) else "FOREIGN weights"
    return Inception(_Pooled(net).eval(), f"inception-v3 pool3 2048 ({origin} {digest[:8]})")


def build() -> nn.Module:
    """FID's Inception with fresh weights, put together as `fid_inception_v3` does.

    That function itself always fetches its weights by URL, so only its parts are used.
    """
    from pytorch_fid import inception as fid
    from torchvision.models import inception_v3

    net: Any = inception_v3(weights=None, num_classes=1008, aux_logits=False, init_weights=False)
    net.Mixed_5b = fid.FIDInceptionA(192, pool_features=32)
    net.Mixed_5c = fid.FIDInceptionA(256, pool_features=64)
    net.Mixed_5d = fid.FIDInceptionA(288, pool_features=64)
    net.Mixed_6b = fid.FIDInceptionC(768, channels_7x7=128)
    net.Mixed_6c = fid.FIDInceptionC(768, channels_7x7=160)
    net.Mixed_6d = fid.FIDInceptionC(768, channels_7x7=160)
    net.Mixed_6e = fid.FIDInceptionC(768, channels_7x7=192)
    net.Mixed_7b = fid.FIDInceptionE_1(1280)
    net.Mixed_7c = fid.FIDInceptionE_2(2048)
    built: nn.Module = net
    return built


class _Pooled(nn.Module):
    """The layers up to the final average pool, in pytorch-fid's order (its blocks 0 to 3)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        parts: Any = net
        self.layers = nn.Sequential(
            parts.Conv2d_1a_3x3,
            parts.Conv2d_2a_3x3,
            parts.Conv2d_2b_3x3,
            nn.MaxPool2d(kernel_size=3, stride=2),
            parts.Conv2d_3b_1x1,
            parts.Conv2d_4a_3x3,
            nn.MaxPool2d(kernel_size=3, stride=2),
            parts.Mixed_5b,
            parts.Mixed_5c,
            parts.Mixed_5d,
            parts.Mixed_6a,
            parts.Mixed_6b,
            parts.Mixed_6c,
            parts.Mixed_6d,
            parts.Mixed_6e,
            parts.Mixed_7a,
            parts.Mixed_7b,
            parts.Mixed_7c,
            nn.AdaptiveAvgPool2d(output_size=(1, 1)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Activations (B, 2048) of images (B, 3, 299, 299) in [-1, 1]."""
        pooled: Tensor = self.layers(images)
        return pooled.flatten(1)


def _prepared(images: NDArray[np.uint8]) -> Tensor:
    moved = np.moveaxis(images, 3, 1).astype(np.float32, order="C")
    pixels = (torch.from_numpy(moved) / 255).expand(-1, 3, -1, -1)
    resized = functional.interpolate(
        pixels, size=(SIDE, SIDE), mode="bilinear", align_corners=False
    )
    return 2 * resized - 1


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state
