"""What small deformations of an image do to its code: public shapes for covariances.

Each released cell centre is decoded, deformed in one way at a time, and encoded again; the
covariance of those codes says in which directions a hand would vary that very shape. How much of
each way there is, is fitted to released values (`shrink.fitted_targets`).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.deform import LEAST_SIDE, WAYS, deform_one_way
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread
from dpsynth.public.representation import Representation

Array = NDArray[np.float64]

STRENGTH = 0.6
COPIES = {"elastic": 40, "fine elastic": 40}
"""Copies of a way with many degrees of freedom; the others have `FEW`."""
FEW = 12
_PART = 2_000


class Templates:
    """Covariances of deformed decodings; called with centres (m, d), gives a list of (m, d, d)."""

    def __init__(self, representation: Representation, seed: int) -> None:
        self._representation, self._seed = representation, seed

    def __call__(self, centres: Array) -> list[Array]:
        """One covariance a centre for each way of deforming, (m, d, d) each."""
        if not len(centres) or min(self._representation.shape[:2]) < LEAST_SIDE // 2:
            return []  # of a few pixels, a deformation means nothing
        source = generator(self._seed)
        with one_thread():
            images = self._representation.decode_pixels(torch.from_numpy(centres)).float()
            return [self._covariances(images, way, source) for way in WAYS]

    def _covariances(self, images: torch.Tensor, way: str, source: torch.Generator) -> Array:
        copies = COPIES.get(way, FEW)
        parts = [
            self._representation.encode(as_bytes(deform_one_way(part, way, STRENGTH, source)))
            for part in torch.split(images.repeat_interleave(copies, dim=0), _PART)
        ]
        codes = torch.cat(parts).double().numpy().reshape(len(images), copies, -1)
        codes -= codes.mean(axis=1, keepdims=True)
        found: Array = np.einsum("mci,mcj->mij", codes, codes) / (copies - 1)
        return found
