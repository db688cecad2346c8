"""What every feature map offers: exact features of records, differentiable ones of a generator.

The two sides are the same map up to rounding far below the released noise. The exact side decides
on privacy: it is a function of one record alone, the same bits whatever was computed beside it.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.errors import UsageError

Images = NDArray[np.uint8]
Array = NDArray[np.float64]
Shape = tuple[int, int, int]

EXACT_BITS = 53
"""Whole numbers of float64: sums below 2^53 are exact in any order, fused or not."""


class Features(Protocol):
    """What a distance of means needs of a feature map, or of a part of it."""

    def sums(self, images: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums (Y, D) of the features of images (B, C, H, W) in [0, 1]; weights (Y, B)."""
        ...

    def squares(self, images: Tensor) -> Tensor:
        """Squared norm (B,) of each image's features."""
        ...


@dataclass(frozen=True, eq=False)
class Part:
    """Some features of a map, larger by `scale` (or (D',)); `places` (D',): which, None for all.

    Larger so that squared distances are the whole map's on average over the parts.
    """

    features: Features
    places: Tensor | None = None
    scale: float | Tensor = 1.0

    def of(self, vectors: Tensor) -> Tensor:
        """What the part sees of feature vectors (Y, D)."""
        return vectors if self.places is None else vectors[:, self.places] * self.scale


class FeatureMap(Features, Protocol):
    """Features f(x) of images, ||f(x)|| <= 1, D numbers each.

    `shape`: H, W, C of an image. `radius`: the bound on the norm, 1. `elementwise`: whether NumPy
    alone computes it, one thread a call. With these a map stands where a code space stands.
    """

    shape: Shape
    radius: float
    elementwise: bool

    @property
    def dim(self) -> int:
        """Numbers in a feature vector, D."""
        ...

    def encode_exact_many(self, images: Images) -> Array:
        """Features (n, D) of records uint8 (n, H, W, C), each a function of that record alone."""
        ...

    def part(self, share: float, source: torch.Generator) -> Part:
        """A random part with about this share of the features; all, where parts save nothing."""
        ...

    def digest(self) -> str:
        """SHA-256 of the numbers that define the map."""
        ...


def require_shape(images: Images, shape: Shape) -> None:
    """Raise UsageError for records that are not of `shape`."""
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise UsageError(
            f"a feature map for {shape} got {images.dtype} images of shape {images.shape[1:]}"
        )


def levels(images: Images) -> Array:
    """Grey levels (n, H W C) of records, as whole float64 numbers."""
    return images.reshape(len(images), -1).astype(np.float64)


def flat(images: Tensor, shape: Shape) -> Tensor:
    """Pixels (B, H W C) in the order of `levels`, of images (B, C, H, W)."""
    if (images.shape[2], images.shape[3], images.shape[1]) != shape:
        raise UsageError(f"a feature map for {shape} got images {tuple(images.shape)}")
    return images.permute(0, 2, 3, 1).flatten(1)


def require_exact(weights: Array, most: float, what: str) -> None:
    """Refuse whole weights (m, d) whose products with numbers up to `most` may leave 2^53."""
    largest = float(np.abs(weights).sum(axis=1).max(initial=0.0)) * most
    if not largest < 2.0**EXACT_BITS:
        raise UsageError(f"{what}: sums up to {largest:.3g} are not exact in float64")


def digest_of(*arrays: NDArray[np.generic]) -> str:
    """SHA-256 of arrays: their types, shapes and bytes."""
    found = hashlib.sha256()
    for array in arrays:
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
        found.update(f"{little.dtype.str}{little.shape}".encode())
        found.update(little.tobytes())
    return found.hexdigest()
