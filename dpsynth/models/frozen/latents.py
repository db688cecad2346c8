"""Codes of a frozen model: latents of its VAE in the transformer's own units, flattened."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsynth.models.frozen.checkpoint import open_checkpoint
from dpsynth.models.frozen.families import load_vae
from dpsynth.models.frozen.machine import exact_kernels, machine, on_device
from dpsynth.planning.schema import Plan

_POINTS = 2**16
"""Points of latents that the VAE works on at once: bounds memory."""
_vaes: dict[str, nn.Module] = {}


@dataclass(frozen=True, eq=False)
class LatentCodec:
    """A code is (latent - shift) * scaling, the latent being the mean of the VAE's posterior.

    shape: (C, h, w) of a latent. channels: 3, or 1 for grey images, which the VAE sees as three
    equal channels and of whose colours the mean is taken. The VAE computes in float32 always.
    """

    vae: nn.Module
    shape: tuple[int, int, int]
    channels: int
    scaling: float
    shift: float
    elementwise: ClassVar[bool] = False

    @classmethod
    def of(cls, plan: Plan) -> "LatentCodec":
        """The codec of a plan's frozen prior; its VAE is read once in a process.

        Raises:
            MissingError, PlanError: see `open_checkpoint`.
            UsageError: this machine has not the device that was asked for.
        """
        _ = machine().torch_device
        found, prior = open_checkpoint(plan), plan.frozen
        assert prior is not None
        if found.weights_sha256 not in _vaes:
            _vaes.clear()
            _vaes[found.weights_sha256] = load_vae(found)
        vae, latent = _vaes[found.weights_sha256], prior.latent
        config: Any = vae.config
        return cls(
            vae,
            (latent.channels, latent.height, latent.width),
            plan.private.image.channels,
            float(config.scaling_factor),
            float(config.shift_factor or 0.0),
        )

    @property
    def dim(self) -> int:
        """Numbers in a code."""
        return int(np.prod(self.shape))

    def encode_rows(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Codes (n, d) of images (n, H, W, C): a forward pass for each record and no other.

        A batch of one, on one thread or by fixed kernels: no bit depends on other records. The
        input is copied into memory that torch aligned.
        """
        codes = np.empty((len(images), self.dim))
        with exact_kernels(), torch.inference_mode():
            device = on_device(self.vae)
            for code, image in zip(codes, images, strict=True):
                batch = torch.from_numpy(np.array(image, order="C"))[None]
                code[...] = self._encoded(batch, device)[0].double().numpy()
        return codes

    def encode_many(self, images: NDArray[np.uint8]) -> Tensor:
        """Codes (n, d) of public images (n, H, W, C), in batches."""
        with torch.no_grad():
            device, size = on_device(self.vae), self._at_once
            parts = [
                self._encoded(
                    torch.from_numpy(np.ascontiguousarray(images[at : at + size])), device
                )
                for at in range(0, len(images), size)
            ]
        return torch.cat(parts) if parts else torch.zeros(0, self.dim)

    def decode(self, codes: Tensor) -> Tensor:
        """Pixels (n, H, W, C), about in [0, 1], of codes (n, d)."""
        with torch.no_grad():
            device, size = on_device(self.vae), self._at_once
            parts = [
                self._decoded(codes[at : at + size], device) for at in range(0, len(codes), size)
            ]
        return torch.cat(parts).permute(0, 2, 3, 1)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Nothing: the VAE's weights stay where they are, and are known by their hash."""
        return {}

    @property
    def _at_once(self) -> int:
        """Images of a batch: at most the machine's, fewer of large ones."""
        return max(1, min(machine().batch, _POINTS // (self.shape[1] * self.shape[2])))

    def _encoded(self, images: Tensor, device: torch.device) -> Tensor:
        """Codes (b, d) on the CPU of bytes (b, H, W, C)."""
        pixels = images.permute(0, 3, 1, 2).to(device, torch.float32) / 127.5 - 1.0
        vae: Any = self.vae
        latents: Tensor = vae.encode(pixels.expand(-1, 3, -1, -1)).latent_dist.mode()
        return ((latents - self.shift) * self.scaling).flatten(1).cpu()

    def _decoded(self, codes: Tensor, device: torch.device) -> Tensor:
        """Pixels (b, C, H, W) on the CPU of codes (b, d)."""
        latents = codes.to(device, torch.float32).view(-1, *self.shape) / self.scaling + self.shift
        vae: Any = self.vae
        pixels: Tensor = vae.decode(latents, return_dict=False)[0].cpu() / 2.0 + 0.5
        return pixels if self.channels == 3 else pixels.mean(1, keepdim=True)
