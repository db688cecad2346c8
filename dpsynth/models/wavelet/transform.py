"""The discrete wavelet transform of images, by the filters of PyWavelets, as dense matrices.

DP-Wavelet, sections 2.2 and 2.3: each level splits the approximation LL into the next, coarser LL
and three details. Extension is periodic (pywt's mode "periodization"), so that J levels of an
orthonormal wavelet are one orthogonal map: energy is kept and the inverse is the transpose.

On a constant image c, LL is c 2^J: `coarse_image` divides by that, for any wavelet here.
"""

from dataclasses import dataclass

import numpy as np
import pywt
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsynth.errors import UsageError

_EXACT = 1e-9


@dataclass(frozen=True, eq=False)
class Pyramid:
    """Wavelet coefficients of n images, coarse to fine.

    ll (n, h, w, C); details: from level 1, the coarsest, to J, each (n, 3, h_j, w_j, C) with LH,
    HL, HH on the second axis (pywt's cH, cV, cD: LH is high down the rows). There may be fewer
    than J details: then it is the beginning of a pyramid, whose inverse takes the rest as zero.
    """

    ll: Tensor
    details: tuple[Tensor, ...]

    def upto(self, scale: int) -> "Pyramid":
        """The scales 0 to `scale` alone."""
        return Pyramid(self.ll, self.details[:scale])

    def energy(self) -> Tensor:
        """Sum of squares by image and scale, (n, 1 + number of details)."""
        parts = [part.square().flatten(1).sum(1) for part in (self.ll, *self.details)]
        return torch.stack(parts, dim=1)


class Wavelet(nn.Module):
    """J levels of a wavelet for images (H, W, C), both ways, in the precision of its input.

    Sides are padded at the bottom and the right to a multiple of 2^J, mirrored with the edge
    repeated, and cropped on the way back. With J = 0 LL is the image itself, and all there is.
    """

    def __init__(self, name: str, levels: int, height: int, width: int, channels: int) -> None:
        super().__init__()
        if levels < 0 or min(height, width, channels) < 1:
            raise UsageError(
                f"{levels} levels of an image {height} x {width} x {channels} were asked for",
                hint="expected no level or more, and no empty side",
            )
        self.name, self.levels, self.shape = name, levels, (height, width, channels)
        self.padded = (height + -height % 2**levels, width + -width % 2**levels)
        # Cloned into memory that torch aligned: kernels may order their sums by alignment.
        for axis, (side, padded) in enumerate(zip(self.shape, self.padded, strict=False)):
            mirror = np.pad(np.arange(side), (0, padded - side), mode="symmetric")
            self.register_buffer(
                f"mirror{axis}", torch.from_numpy(mirror).clone(), persistent=False
            )
            for level in range(levels):  # 0: the finest
                matrix = torch.from_numpy(analysis(name, padded >> level)).clone()
                self.register_buffer(f"analysis{axis}_{level}", matrix, persistent=False)

    def sides(self, scale: int) -> tuple[int, int]:
        """Height and width of a subband of `scale`: 0 is LL, 1 to J are details."""
        down = self.levels + 1 - max(scale, 1)
        return self.padded[0] >> down, self.padded[1] >> down

    def forward(self, images: Tensor) -> Pyramid:
        """Coefficients of images (n, H, W, C): bytes, read as x / 255, or floats as they are."""
        if images.shape[1:] != self.shape:
            raise UsageError(
                f"images of shape {tuple(images.shape[1:])} were given, expected {self.shape}"
            )
        low = images.float() / 255.0 if images.dtype == torch.uint8 else images
        low = low[:, self.get_buffer("mirror0")][:, :, self.get_buffer("mirror1")]
        details: list[Tensor] = []
        for level in range(self.levels):
            rows, columns = self._matrices(level, low)
            both = torch.einsum("ah,nhwc,bw->nabc", rows, low, columns)
            (low, hl), (lh, hh) = _quarters(both)
            details.insert(0, torch.stack([lh, hl, hh], dim=1))
        return Pyramid(low, tuple(details))

    def inverse(self, pyramid: Pyramid) -> Tensor:
        """Images (n, H, W, C) of a pyramid; scales that it lacks count as zero."""
        low = pyramid.ll
        if low.shape[1:3] != self.sides(0) or len(pyramid.details) > self.levels:
            raise UsageError(
                f"LL of {tuple(low.shape[1:3])} with {len(pyramid.details)} details was given, "
                f"expected {self.sides(0)} and at most {self.levels}"
            )
        for scale in range(1, self.levels + 1):
            if scale <= len(pyramid.details):
                lh, hl, hh = pyramid.details[scale - 1].unbind(1)
            else:
                lh = hl = hh = torch.zeros_like(low)
            both = torch.cat([torch.cat([low, hl], 2), torch.cat([lh, hh], 2)], 1)
            rows, columns = self._matrices(self.levels - scale, low)
            low = torch.einsum("ah,nabc,bw->nhwc", rows, both, columns)
        return low[:, : self.shape[0], : self.shape[1]]

    def coarse_image(self, ll: Tensor) -> Tensor:
        """LL (n, h, w, C) as a small image in the units of the pixels."""
        return ll * 0.5**self.levels

    def coarse_coefficients(self, image: Tensor) -> Tensor:
        """A small image (n, h, w, C) in the units of the pixels as LL: the way back."""
        return image * 2.0**self.levels

    def _matrices(self, level: int, like: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = (self.get_buffer(f"analysis{axis}_{level}") for axis in (0, 1))
        return rows.to(like.dtype), columns.to(like.dtype)


def analysis(name: str, size: int) -> NDArray[np.float64]:
    """The orthogonal matrix (size, size) of one level: low-pass rows, then high-pass rows.

    Row k is sum_j f_j e_((2 k + F / 2 - j) mod size) for a filter f of length F.

    >>> analysis("haar", 2).round(4).tolist()
    [[0.7071, 0.7071], [0.7071, -0.7071]]

    Raises:
        UsageError: no wavelet of that name, or one that is not orthonormal.
    """
    try:
        wavelet = pywt.Wavelet(name)
    except (TypeError, ValueError) as error:
        raise UsageError(f"there is no discrete wavelet {name!r}", hint=_NAMES) from error
    filters = np.array([wavelet.dec_lo, wavelet.dec_hi])  # (2, F)
    length, half = filters.shape[1], size // 2
    matrix = np.zeros((2, half, size))
    rows = np.arange(half)
    for j in range(length):
        # Within one j no two rows meet the same column, so += adds each once.
        matrix[:, rows, (2 * rows + length // 2 - j) % size] += filters[:, j, None]
    square = matrix.reshape(size, size)
    if not np.allclose(square @ square.T, np.eye(size), rtol=0, atol=_EXACT):
        raise UsageError(f"the wavelet {name!r} is not orthonormal", hint=_NAMES)
    return square


_NAMES = "write haar, or a name such as db2, sym4 or coif1"


def _quarters(both: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The four corners (n, h / 2, w / 2, C) of (n, h, w, C)."""
    top, bottom = both.chunk(2, dim=1)
    (a, b), (c, d) = top.chunk(2, dim=2), bottom.chunk(2, dim=2)
    return (a, b), (c, d)
