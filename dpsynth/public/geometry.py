"""PCA of public images: an affine code space whose arithmetic is plain float64."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.errors import PlanError

_ROWS = 5_000


@dataclass(frozen=True, eq=False)
class PcaCodec:
    """Codes are coordinates along the public images' leading principal directions.

    `basis` (d, D) has orthonormal rows and `centre` (D,) is the public mean, D = H W C pixels in
    [0, 1]; `shape` is (H, W, C).
    """

    basis: NDArray[np.float64]
    centre: NDArray[np.float64]
    shape: tuple[int, int, int]

    def encode_one(self, image: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Code (d,) of one image (H, W, C).

        Products, then NumPy's pairwise sums along rows: an order that depends on D alone, where
        a BLAS call may choose another by memory alignment.
        """
        centred = image.reshape(-1) / 255.0 - self.centre
        code: NDArray[np.float64] = (self.basis * centred).sum(axis=1)
        return code

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


def fit_pca(images: NDArray[np.uint8], dim: int) -> PcaCodec:
    """Leading `dim` directions of images (n, H, W, C), by an SVD in float64.

    The sign of each direction is fixed by its largest entry, so that equal data give equal codes.

    Raises:
        PlanError: more directions are asked for than pixels or images allow.
    """
    pixels = int(np.prod(images.shape[1:]))
    most = min(pixels, len(images) - 1)
    if dim > most:
        raise PlanError(
            f"representation.code is {dim}, but these public images span at most {most} directions",
            hint="lower representation.code in the plan",
        )
    centre = images.reshape(len(images), -1).mean(axis=0, dtype=np.float64) / 255.0
    # The right factor of the SVD of the (D, D) scatter is that of the (n, D) matrix, for less
    # memory. Meant for small images: D^2 numbers are held.
    scatter = np.zeros((pixels, pixels))
    for start in range(0, len(images), _ROWS):
        centred = _flat(images[start : start + _ROWS]) - centre
        scatter += centred.T @ centred
    basis = np.linalg.svd(scatter, hermitian=True)[2][:dim]
    largest = np.abs(basis).argmax(axis=1)
    signs = np.sign(basis[np.arange(dim), largest])
    return PcaCodec(np.ascontiguousarray(basis * signs[:, None]), centre, images.shape[1:])


def _flat(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Pixels in [0, 1] as rows (n, D)."""
    flat: NDArray[np.float64] = images.reshape(len(images), -1) / 255.0
    return flat
