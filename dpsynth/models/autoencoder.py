"""A small convolutional autoencoder for images of any height, width and channel count.

No layer looks across the batch, so in eval mode a record's code depends on that record alone.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.planning.schema import ImageShape, Representation

_SMALL, _LARGE = 16, 48


def halvings(height: int, width: int) -> int:
    """How often the encoder halves the image: 1 below 16 pixels, 2 below 48, else 3.

    >>> [halvings(side, side) for side in (8, 28, 64)]
    [1, 2, 3]
    """
    side = min(height, width)
    return 1 if side < _SMALL else 2 if side < _LARGE else 3


class ConvAutoencoder(nn.Module):
    """Strided convolutions to a code of `code` numbers, and back to logits.

    Images enter as floats in [0, 1], shape (n, C, H, W); they are padded at the right and the
    bottom to a multiple of the total stride, and logits are cropped back.
    """

    def __init__(self, height: int, width: int, channels: int, code: int, base: int) -> None:
        super().__init__()
        levels = halvings(height, width)
        stride = 2**levels
        self.shape = (channels, height, width)
        self.code = code
        self._pad = (-width % stride, -height % stride)
        rows, columns = (height + self._pad[1]) // stride, (width + self._pad[0]) // stride
        widths = [base * min(2**level, 2) for level in range(levels)]
        self._grid = (widths[-1], rows, columns)
        flat, hidden = widths[-1] * rows * columns, 8 * base
        down: list[nn.Module] = []
        for before, after in zip([channels, *widths[:-1]], widths, strict=True):
            down += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.GELU()]
        self.down = nn.Sequential(
            *down, nn.Flatten(), nn.Linear(flat, hidden), nn.GELU(), nn.Linear(hidden, code)
        )
        self.lift = nn.Sequential(
            nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, flat), nn.GELU()
        )
        up: list[nn.Module] = []
        for before, after in zip(widths[:0:-1], widths[-2::-1], strict=True):
            up += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1), nn.GELU()]
        self.up = nn.Sequential(
            *up, nn.ConvTranspose2d(widths[0], channels, 4, stride=2, padding=1)
        )

    def encode(self, images: Tensor) -> Tensor:
        """Codes (n, d) of images (n, C, H, W) in [0, 1]."""
        right, bottom = self._pad
        if right or bottom:
            images = functional.pad(images, (0, right, 0, bottom))
        codes: Tensor = self.down(images)
        return codes

    def decode(self, codes: Tensor) -> Tensor:
        """Logits (n, C, H, W) of codes (n, d); a sigmoid gives pixels in [0, 1]."""
        grid = self.lift(codes).unflatten(1, self._grid)
        logits: Tensor = self.up(grid)[..., : self.shape[1], : self.shape[2]]
        return logits

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Logits of the reconstruction; `noise` (n, d) is in units of the code's RMS.

        The noise is scaled by the batch's own root mean square code (no gradient through it),
        so that growing codes cannot drown it: information spreads over all coordinates.
        """
        codes = self.encode(images)
        if noise is not None:
            centred = codes - codes.mean(0)
            codes = codes + noise * centred.detach().square().mean().sqrt()
        return self.decode(codes)


def reconstruction_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Cross-entropy of pixels, mean over all of them: keeps thin strokes dark and sharp."""
    return functional.binary_cross_entropy_with_logits(logits, images)


def build_autoencoder(settings: Representation, image: ImageShape) -> ConvAutoencoder:
    """The autoencoder that the plan declares, with freshly drawn weights."""
    return ConvAutoencoder(
        image.height, image.width, image.channels, settings.code, settings.autoencoder.width
    )


def pixels(images: Tensor) -> Tensor:
    """Bytes (n, H, W, C) as floats (n, C, H, W) in [0, 1]."""
    return images.permute(0, 3, 1, 2).to(torch.float32).div(255.0).contiguous()


def as_bytes(images: Tensor) -> NDArray[np.uint8]:
    """Floats (n, C, H, W) in [0, 1] as bytes (n, H, W, C), rounded: the way back from `pixels`."""
    rounded = images.mul(255.0).round().to(torch.uint8)
    data: NDArray[np.uint8] = rounded.permute(0, 2, 3, 1).contiguous().numpy()
    return data
