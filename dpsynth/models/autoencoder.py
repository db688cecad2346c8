"""A small convolutional autoencoder for images of any height, width and channel count.

In eval mode no layer looks across the batch, so a record's code depends on that record alone.
"""

from typing import Literal

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

    `hidden` units stand between convolutions and code, 8 `base` of them unless given. With `norm`
    every layer but the two that end in code and pixels is normalised over the batch in training
    (Ioffe and Szegedy 2015), and by the public averages of that training in eval mode.
    """

    def __init__(
        self,
        height: int,
        width: int,
        channels: int,
        code: int,
        base: int,
        *,
        hidden: int | None = None,
        norm: bool = False,
    ) -> None:
        super().__init__()
        levels = halvings(height, width)
        stride = 2**levels
        self.shape = (channels, height, width)
        self.code = code
        self._pad = (-width % stride, -height % stride)
        rows, columns = (height + self._pad[1]) // stride, (width + self._pad[0]) // stride
        widths = [base * min(2**level, 2) for level in range(levels)]
        self._grid = (widths[-1], rows, columns)
        flat = widths[-1] * rows * columns
        hidden = 8 * base if hidden is None else hidden
        down: list[nn.Module] = []
        for before, after in zip([channels, *widths[:-1]], widths, strict=True):
            down += _activated(
                nn.Conv2d(before, after, 4, stride=2, padding=1, bias=not norm), after, norm
            )
        self.down = nn.Sequential(
            *down, nn.Flatten(), *_linear(flat, hidden, norm), nn.Linear(hidden, code)
        )
        self.lift = nn.Sequential(*_linear(code, hidden, norm), *_linear(hidden, flat, norm))
        up: list[nn.Module] = []
        for before, after in zip(widths[:0:-1], widths[-2::-1], strict=True):
            layer = nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=not norm)
            up += _activated(layer, after, norm)
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


def _linear(before: int, after: int, norm: bool) -> list[nn.Module]:
    """A hidden linear layer and what follows it."""
    return _activated(nn.Linear(before, after, bias=not norm), after, norm)


def _activated(layer: nn.Module, width: int, norm: bool) -> list[nn.Module]:
    """The layer, then GELU; with `norm`, then batch normalisation of its `width` and ReLU."""
    if not norm:
        return [layer, nn.GELU()]
    flat = isinstance(layer, nn.Linear)
    return [layer, nn.BatchNorm1d(width) if flat else nn.BatchNorm2d(width), nn.ReLU()]


def reconstruction_loss(
    logits: Tensor, images: Tensor, kind: Literal["cross-entropy", "squares"] = "cross-entropy"
) -> Tensor:
    """Loss of pixels, mean over all of them.

    Cross-entropy keeps thin strokes dark and sharp. Squared errors of the sigmoid, times 4 so that
    their gradients are of the same size, say less about greys that no code can tell.
    """
    if kind == "squares":
        return 4.0 * (logits.sigmoid() - images).square().mean()
    return functional.binary_cross_entropy_with_logits(logits, images)


def build_autoencoder(settings: Representation, image: ImageShape) -> ConvAutoencoder:
    """The autoencoder that the plan declares, with freshly drawn weights."""
    options = settings.autoencoder
    return ConvAutoencoder(
        image.height,
        image.width,
        image.channels,
        settings.code,
        options.width,
        hidden=options.hidden,
        norm=options.norm,
    )


def pixels(images: Tensor) -> Tensor:
    """Bytes (n, H, W, C) as floats (n, C, H, W) in [0, 1]."""
    return images.permute(0, 3, 1, 2).to(torch.float32).div(255.0).contiguous()


def as_bytes(images: Tensor) -> NDArray[np.uint8]:
    """Floats (n, C, H, W) in [0, 1] as bytes (n, H, W, C), rounded: the way back from `pixels`."""
    rounded = images.mul(255.0).round().to(torch.uint8)
    data: NDArray[np.uint8] = rounded.permute(0, 2, 3, 1).contiguous().numpy()
    return data
