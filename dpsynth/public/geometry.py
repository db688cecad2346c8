"""Affine code spaces, whose arithmetic is plain float64: PCA of public images, and pixels."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.errors import PlanError, UsageError

_ROWS = 5_000
# Pixels multiplied at once: bounds memory, and changes no bit of any code.
_NUMBERS = 2**22


@dataclass(frozen=True, eq=False)
class PcaCodec:
    """Codes are coordinates along the public images' leading principal directions.

    `basis` (d, D) has orthonormal rows and `centre` (D,) is the public mean, D = H W C pixels in
    [0, 1]; `shape` is (H, W, C).
    """

    basis: NDArray[np.float64]
    centre: NDArray[np.float64]
    shape: tuple[int, int, int]
    elementwise: ClassVar[bool] = False

    def encode_rows(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Codes (n, d) of images (n, H, W, C), each the same bits in any company.

        Pixels are whole and so is the basis on its grid: the products' sums are exact in float64,
        in any order, and the BLAS may take any.
        """
        basis, step = self._whole_basis
        exact = np.empty((len(images), basis.shape[1]))
        rows = max(1, _NUMBERS // len(basis))
        for start in range(0, len(images), rows):
            part = images[start : start + rows]
            exact[start : start + rows] = part.reshape(len(part), -1).astype(np.float64) @ basis
        return exact * step - self._offset

    @cached_property
    def _whole_basis(self) -> tuple[NDArray[np.float64], float]:
        """The basis (D, d) in whole multiples of a power of two, and what one of them is worth.

        As fine as keeps the sum of 255 times the sizes of a row below 2^53.
        """
        most = 2.0**53 / 255
        longest = float(np.abs(self.basis).sum(axis=1).max())
        places = math.floor(math.log2((most - self.basis.shape[1]) / longest))
        whole = np.rint(np.ldexp(self.basis, places))
        return np.ascontiguousarray(whole.T), math.ldexp(1.0, -places) / 255.0

    @cached_property
    def _offset(self) -> NDArray[np.float64]:
        """Code (d,) of an image whose pixels are all 0, negated."""
        found: NDArray[np.float64] = (self.basis * self.centre).sum(axis=1)
        return found

    def encode_many(self, images: NDArray[np.uint8]) -> Tensor:
        """Codes (n, d) float64 of public images (n, H, W, C)."""
        flat = torch.from_numpy(images.reshape(len(images), -1)).double() / 255.0
        return (flat - torch.from_numpy(self.centre)) @ torch.from_numpy(self.basis).T

    def decode(self, codes: Tensor) -> Tensor:
        """Pixels (n, H, W, C), about in [0, 1], of codes (n, d)."""
        flat = codes.double() @ torch.from_numpy(self.basis) + torch.from_numpy(self.centre)
        return flat.view(len(codes), *self.shape)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What `geometry.safetensors` keeps of it."""
        return {"basis": self.basis, "centre": self.centre}


@dataclass(frozen=True, eq=False)
class PixelCodec:
    """Codes are the pixels themselves, 0 to 255: D = H W C of them; `shape` is (H, W, C)."""

    shape: tuple[int, int, int]
    elementwise: ClassVar[bool] = True

    def encode_rows(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Codes (n, D) of images (n, H, W, C): whole numbers, the same bits in any company."""
        return images.reshape(len(images), math.prod(self.shape)).astype(np.float64)

    def encode_many(self, images: NDArray[np.uint8]) -> Tensor:
        """Codes (n, D) float64 of public images (n, H, W, C)."""
        return torch.from_numpy(self.encode_rows(images))

    def decode(self, codes: Tensor) -> Tensor:
        """Pixels (n, H, W, C), about in [0, 1], of codes (n, D)."""
        return codes.double().view(len(codes), *self.shape) / 255.0

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Nothing: there is nothing to learn."""
        return {}


def fit_pca(parts: Iterable[NDArray[np.uint8]], dim: int) -> PcaCodec:
    """Leading `dim` directions of images (n, H, W, C), in one pass over parts of them.

    Sums of pixels and of their products are exact whole numbers; the SVD of what they give is in
    float64. The sign of each direction is fixed by its largest entry, so that equal data give
    equal codes.

    Raises:
        PlanError: more directions are asked for than pixels or images allow.
        UsageError: a part is no array of images, or there is none.
    """
    count, shape, sums, products = _whole_sums(parts)
    pixels = math.prod(shape)
    most = min(pixels, count - 1)
    if dim > most:
        raise PlanError(
            f"representation.code is {dim}, but these public images span at most {most} directions",
            hint="lower representation.code in the plan",
        )
    # The right factor of the SVD of the (D, D) scatter is that of the (n, D) matrix, for less
    # memory. Meant for small images: D^2 numbers are held.
    scatter = (products - np.outer(sums, sums / count)) / 255.0**2
    basis = np.linalg.svd(scatter, hermitian=True)[2][:dim]
    largest = np.abs(basis).argmax(axis=1)
    signs = np.sign(basis[np.arange(dim), largest])
    return PcaCodec(np.ascontiguousarray(basis * signs[:, None]), sums / count / 255.0, shape)


def _whole_sums(
    parts: Iterable[NDArray[np.uint8]],
) -> tuple[int, tuple[int, int, int], NDArray[np.float64], NDArray[np.float64]]:
    """How many images, their shape, sums (D,) of pixels 0..255 and (D, D) of their products."""
    count, shape = 0, (0, 0, 0)
    sums, products = np.zeros(0), np.zeros((0, 0))
    for part in parts:
        if part.ndim != 4 or (count and part.shape[1:] != shape):
            raise UsageError(
                f"a part of shape {part.shape} was given, expected images (n, H, W, C)"
            )
        if not count:
            shape = part.shape[1:]
            sums, products = np.zeros(math.prod(shape)), np.zeros((math.prod(shape),) * 2)
        for start in range(0, len(part), _ROWS):
            rows = part[start : start + _ROWS].reshape(-1, len(sums)).astype(np.float64)
            sums += rows.sum(axis=0)
            products += rows.T @ rows
        count += len(part)
    if not count:
        raise UsageError("there are no public images to fit a code space to")
    return count, shape, sums, products
