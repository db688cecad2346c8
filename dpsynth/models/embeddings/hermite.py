"""Hermite features of Mehler's formula (DP-HP: Vinaroz et al. 2022, sections 2.3 and 4).

For numbers x, x': exp(-r/(1-r^2) (x - x')^2) = sum_c p_c(x) p_c(x') with

    p_c(x) = sqrt((1-r) r^c) H_c(x) exp(-r x^2 / (1+r)) / sqrt(2^c c! sqrt((1-r)/(1+r))),

so that sum_c p_c(x)^2 = 1, and any truncation has norm at most 1. The sum kernel has p(x_i) /
sqrt(d) for each pixel i; the product kernel p(x_i) (outer) p(x_j) / sqrt(P) for each of P pairs of
pixels. Both have norm at most 1, and so have they beside each other with squared weights 1 - a and
a. A pixel has 256 levels: features of records are look-ups and one product each. A generator's come
from Chebyshev polynomials, whose means over a class are taken before all else: a mean of features
is a matrix times a mean of polynomials.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.errors import UsageError
from dpsynth.models.embeddings.space import (
    Array,
    Images,
    Part,
    Shape,
    digest_of,
    flat,
    require_shape,
)

CLOSE = 1e-6
"""Largest error of a feature of one pixel on the generator's side."""


def rate_of(length: float) -> float:
    """Mehler's r of a kernel exp(-(x - x')^2 / (2 l^2)): the root in (0, 1) of r^2 + 2 l^2 r = 1.

    >>> r = rate_of(0.5)
    >>> round(r / (1 - r * r), 12)
    2.0
    """
    if not (math.isfinite(length) and length > 0):
        raise UsageError(f"a kernel's length must be finite and above 0, got {length}")
    return 1.0 / (length**2 + math.sqrt(length**4 + 1.0))  # of the two forms the one that is stable


def hermite(x: Tensor, rate: float, order: int) -> Tensor:
    """Features p_0..p_order (..., order + 1) of numbers x (...), by the three-term recursion."""
    first = (1 - rate**2) ** 0.25 * torch.exp(-rate / (1 + rate) * x.square())
    found = [first]
    for c in range(order):
        following = math.sqrt(2 * rate / (c + 1)) * x * found[c]
        if c:
            following = following - rate * math.sqrt(c / (c + 1)) * found[c - 1]
        found.append(following)
    return torch.stack(found, dim=-1)


class HermiteMap:
    """Sum kernel over all pixels, product kernel over pairs of them.

    Args:
        shape: H, W, C.
        length: of each pixel's kernel, pixels in [0, 1].
        order: of the sum kernel's features; order + 1 numbers a pixel.
        pairs: places (P, 2) in an image's flat order (H, W, C); P may be 0.
        pair_order: of the product kernel's features; (order + 1)^2 numbers a pair.
        alpha: the product kernel's share of the squared norm, in [0, 1].

    Raises:
        UsageError: numbers out of range, or pairs outside the image.
    """

    radius = 1.0
    elementwise = True

    def __init__(
        self,
        shape: Shape,
        *,
        length: float,
        order: int,
        pairs: NDArray[np.int64],
        pair_order: int,
        alpha: float,
    ) -> None:
        size = math.prod(shape)
        inside = pairs.ndim == 2 and pairs.shape[1] == 2 and (pairs >= 0).all()
        if not inside or (pairs >= size).any() or not 0 <= alpha <= 1 or min(order, pair_order) < 0:
            raise UsageError("Hermite features: pairs, orders or alpha out of range")
        self.shape, self._pairs, self._size = shape, pairs, size
        self._rate, self._order, self._pair_order = rate_of(length), order, pair_order
        share = alpha if len(pairs) else 0.0
        self._of_sum = math.sqrt((1 - share) / size)
        self._of_pairs = math.sqrt(share / max(1, len(pairs)))
        grey = torch.arange(256, dtype=torch.float64) / 255
        self._sum_table: Array = (hermite(grey, self._rate, order) * self._of_sum).numpy()
        self._pair_table: Array = hermite(grey, self._rate, pair_order).numpy()
        alone = hermite(grey, self._rate, order)
        self._whole = _Some(
            shape=shape,
            pixels=torch.arange(size),
            pairs=torch.from_numpy(pairs),
            fit=_chebyshev(torch.cat([alone, alone.square().sum(1, keepdim=True)], dim=1)),
            rate=self._rate,
            pair_order=pair_order,
            of_sum=self._of_sum,
            of_pairs=self._of_pairs,
        )

    @property
    def dim(self) -> int:
        """D: of the sum kernel, then of the product kernel."""
        return self._size * (self._order + 1) + len(self._pairs) * (self._pair_order + 1) ** 2

    def encode_exact_many(self, images: Images) -> Array:
        """Features (n, D) of records."""
        require_shape(images, self.shape)
        pixels = images.reshape(len(images), -1)
        first = self._pair_table[pixels[:, self._pairs[:, 0]]] * self._of_pairs
        second = self._pair_table[pixels[:, self._pairs[:, 1]]]
        product = first[..., :, None] * second[..., None, :]
        alone = self._sum_table[pixels].reshape(len(images), -1)
        found: Array = np.concatenate([alone, product.reshape(len(images), -1)], axis=1)
        return found

    def features(self, images: Tensor) -> Tensor:
        """Features (B, D) of images (B, C, H, W) in [0, 1], differentiable."""
        pixels = flat(images, self.shape)
        each = hermite(pixels, self._rate, max(self._order, self._pair_order))
        alone = each[..., : self._order + 1].flatten(1) * self._of_sum
        few = each[..., : self._pair_order + 1]
        first, second = (few[:, torch.from_numpy(self._pairs[:, i])] for i in (0, 1))
        product = (first * self._of_pairs)[..., :, None] * second[..., None, :]
        return torch.cat([alone, product.flatten(1)], dim=1)

    def sums(self, images: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums (Y, D) of features; weights (Y, B)."""
        return self._whole.sums(images, weights)

    def squares(self, images: Tensor) -> Tensor:
        """Squared norms (B,): below 1 by what the orders leave out."""
        return self._whole.squares(images)

    def part(self, share: float, source: torch.Generator) -> Part:
        """This share of the pixels and this share of the pairs, at random: one each at least."""
        kept = [
            torch.randperm(count, generator=source)[: math.ceil(share * count)].sort().values
            for count in (self._size, len(self._pairs))
        ]
        if sum(map(len, kept)) == self._size + len(self._pairs):
            return Part(self)
        lengths = self._order + 1, (self._pair_order + 1) ** 2
        starts = 0, self._size * lengths[0]
        counts = self._size, len(self._pairs)
        places, scales = [], []
        for own, length, start, count in zip(kept, lengths, starts, counts, strict=True):
            places.append((start + own[:, None] * length + torch.arange(length)).flatten())
            scales.append(torch.full((len(own) * length,), math.sqrt(count / max(1, len(own)))))
        scale = torch.cat(scales)
        some = replace(
            self._whole,
            pixels=kept[0],
            pairs=self._whole.pairs[kept[1]],
            of_sum=self._of_sum * float(scale[0]),
            of_pairs=self._of_pairs * float(scale[-1]),
        )
        return Part(some, torch.cat(places), scale)

    def digest(self) -> str:
        """SHA-256 of tables and pairs."""
        return digest_of(self._sum_table, self._pair_table, self._pairs)


@dataclass(frozen=True, eq=False)
class _Some:
    """Features of `pixels` (k,) and of `pairs` (p, 2) alone, on the generator's side.

    `fit`: Chebyshev coefficients of p_0..p_order, and of the sum of their squares.
    """

    shape: Shape
    pixels: Tensor
    pairs: Tensor
    fit: Tensor
    rate: float
    pair_order: int
    of_sum: float
    of_pairs: float

    def sums(self, images: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums (Y, D') of features; weights (Y, B)."""
        found = flat(images, self.shape)
        basis = self._basis(found)
        means = (weights @ basis.flatten(1)).view(len(weights), *basis.shape[1:])
        alone = means @ self.fit[:, :-1] * self.of_sum
        first, second = self._paired(found)
        product = (first * self.of_pairs)[..., :, None] * second[..., None, :]
        return torch.cat([alone.flatten(1), weights @ product.flatten(1)], dim=1)

    def squares(self, images: Tensor) -> Tensor:
        """Squared norms (B,)."""
        found = flat(images, self.shape)
        alone = (self._basis(found) @ self.fit[:, -1]).sum(1)
        first, second = (each.square().sum(2) for each in self._paired(found))
        return self.of_sum**2 * alone + self.of_pairs**2 * (first * second).sum(1)

    def _basis(self, pixels: Tensor) -> Tensor:
        """Chebyshev polynomials (B, k, n) of the pixels that count."""
        u = 2 * pixels[:, self.pixels] - 1
        found = [torch.ones_like(u), u]
        while len(found) < len(self.fit):
            found.append(2 * u * found[-1] - found[-2])
        return torch.stack(found, dim=-1)

    def _paired(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, p, pair_order + 1) of both places of each pair."""
        first, second = (
            hermite(pixels[:, self.pairs[:, i]], self.rate, self.pair_order) for i in (0, 1)
        )
        return first, second


def _chebyshev(values: Tensor) -> Tensor:
    """Coefficients (k, n), k >= 2, of functions known at all 256 grey levels (256, n).

    As many polynomials as bring every error below `CLOSE`; what noise hides needs no more.
    """
    at = np.linspace(-1, 1, len(values))
    for degree in (4, 8, 12, 16, 24, 32, 48):
        basis = np.polynomial.chebyshev.chebvander(at, degree)
        found, *_ = np.linalg.lstsq(basis, values.numpy(), rcond=None)
        if np.abs(basis @ found - values.numpy()).max() < CLOSE:
            break
    return torch.from_numpy(found).float()
