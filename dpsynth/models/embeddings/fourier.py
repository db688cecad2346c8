"""Random Fourier features of the Gaussian kernel (DP-MERF: Harder et al. 2021, section 3).

Rahimi and Recht (2007): f(x) = (cos w_j.x, sin w_j.x)_j / sqrt(m) with w_j ~ N(0, I / s^2), of norm
exactly 1 and E f(x).f(x') = exp(-|x - x'|^2 / (2 s^2)).

Frequencies are whole numbers, in steps of 2^-24 of a turn a grey level: w.x of a record is then
exact in float64 in any order, and a cosine is a look-up by the phase's first 14 bits.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpsynth.errors import UsageError
from dpsynth.models.embeddings.space import (
    Array,
    Images,
    Part,
    Shape,
    digest_of,
    flat,
    levels,
    require_exact,
    require_shape,
)
from dpsynth.models.seeding import generator

PHASE_BITS = 24
TABLE_BITS = 14
_LEVELS = 255


class FourierMap:
    """Cosines and sines of `features` / 2 random frequencies.

    Args:
        shape: H, W, C.
        features: D, even.
        bandwidth: s, for pixels in [0, 1].
        seed: public; fixes the frequencies.

    Raises:
        UsageError: an odd number of features, or a bandwidth that is not finite and above 0.
    """

    radius = 1.0
    elementwise = False

    def __init__(self, shape: Shape, features: int, bandwidth: float, seed: int) -> None:
        if features < 2 or features % 2 or not (math.isfinite(bandwidth) and bandwidth > 0):
            raise UsageError(f"Fourier features: {features} of bandwidth {bandwidth} make no sense")
        self.shape, self.dim = shape, features
        size = (features // 2, math.prod(shape))
        drawn = torch.randn(size, generator=generator(seed), dtype=torch.float64)
        step = 2 * math.pi * _LEVELS / 2.0**PHASE_BITS  # radians of one step, pixels in [0, 1]
        whole = torch.round(drawn / (bandwidth * step))
        self._frequencies: Array = whole.numpy().T.copy()  # (H W C, m)
        require_exact(whole.numpy(), _LEVELS, "Fourier frequencies")
        self._radians = (whole * step).float().T.contiguous()
        middle = (np.arange(2**TABLE_BITS) + 0.5) * (2 * math.pi / 2**TABLE_BITS)
        self._cosines: Array = np.cos(middle) / math.sqrt(features / 2)
        self._sines: Array = np.sin(middle) / math.sqrt(features / 2)

    def encode_exact_many(self, images: Images) -> Array:
        """Features (n, D): cosines, then sines."""
        require_shape(images, self.shape)
        phases = (levels(images) @ self._frequencies).astype(np.int64)
        places = (phases & (2**PHASE_BITS - 1)) >> (PHASE_BITS - TABLE_BITS)
        found: Array = np.empty((len(images), self.dim))
        half = self.dim // 2
        found[:, :half] = self._cosines[places]
        found[:, half:] = self._sines[places]
        return found

    def features(self, images: Tensor) -> Tensor:
        """Features (B, D) of images (B, C, H, W) in [0, 1], differentiable."""
        angles = flat(images, self.shape) @ self._radians
        return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(self.dim / 2)

    def sums(self, images: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums (Y, D) of features; weights (Y, B)."""
        return weights @ self.features(images)

    def squares(self, images: Tensor) -> Tensor:
        """Ones (B,): cos^2 + sin^2 = 1 in every pair."""
        return torch.ones(len(images))

    def part(self, share: float, source: torch.Generator) -> Part:
        """One of 1/share blocks of frequencies side by side: all were drawn alike."""
        half = self.dim // 2
        blocks = min(half, max(1, round(1 / share)))
        if blocks == 1:
            return Part(self)
        edges = [number * half // blocks for number in range(blocks + 1)]
        chosen = int(torch.randint(blocks, (1,), generator=source))
        own = torch.arange(edges[chosen], edges[chosen + 1])
        some = _Block(self.shape, self._radians[:, own], blocks, half)
        return Part(some, torch.cat([own, half + own]), math.sqrt(blocks))

    def digest(self) -> str:
        """SHA-256 of frequencies and tables."""
        return digest_of(self._frequencies, self._cosines, self._sines)


@dataclass(frozen=True, eq=False)
class _Block:
    """Cosines and sines of k of `whole` frequencies, in one of `blocks`; radians (H W C, k)."""

    shape: Shape
    radians: Tensor
    blocks: int
    whole: int

    def sums(self, images: Tensor, weights: Tensor) -> Tensor:
        angles = flat(images, self.shape) @ self.radians
        found = weights @ torch.cat([angles.cos(), angles.sin()], dim=1)
        return found * math.sqrt(self.blocks / self.whole)

    def squares(self, images: Tensor) -> Tensor:
        return torch.full((len(images),), self.radians.shape[1] * self.blocks / self.whole)
