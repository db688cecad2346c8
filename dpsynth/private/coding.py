"""From images to whole numbers: quantised codes or features, or ids of private tokens."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.models.embeddings.space import FeatureMap
from dpsynth.private.lattice import quantise_rows
from dpsynth.public.representation import Representation

if TYPE_CHECKING:
    from dpsynth.public.tokens import TokenSpace

Images = NDArray[np.uint8]
Ids = NDArray[np.int64]

# Numbers of codes that are made at once: they stay in the processor's cache.
_NEAR = 2**17


@dataclass(frozen=True)
class TokenCodes:
    """A token space in a representation's place: a record's code is its private tokens.

    Tokens of the scales up to j0 are computed, and no others (DP-Wavelet, section 3).
    """

    space: "TokenSpace"
    elementwise = False

    @property
    def dim(self) -> int:
        """Private tokens of an image."""
        return self.space.dim

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image: height, width, channels."""
        return self.space.tokenizer.wavelet.shape

    def encode_exact_many(self, images: Images) -> Ids:
        """Token ids int64 (n, dim) of records (n, H, W, C), each the same bits in any company."""
        return self.space.encode_exact(images)

    def quantise(self, images: Images, out: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Overwrite `out` (n, dim) with ids; which records (n,) have every id in the codebook."""
        found = self.encode_exact_many(images)
        inside: NDArray[np.bool_] = (found >= 0) & (found < self.space.tokenizer.settings.codebook)
        out[...] = np.where(inside, found, 0)
        return np.asarray(inside.all(axis=1))


CodeSpace = Representation | FeatureMap | TokenCodes


class Encoder(AbstractContextManager["Encoder"]):
    """Encodes and quantises a few images at a time; elementwise codes by torch's many threads."""

    def __init__(self, space: CodeSpace) -> None:
        self._space, self.dim = space, space.dim
        self._step = max(1, _NEAR // space.dim)
        threads = torch.get_num_threads() if space.elementwise else 1
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def quantise(self, images: Images, out: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Overwrite `out` (n, d) with the codes of one image or more; which (n,) are finite."""
        starts = range(0, len(images), self._step)
        given = ((images[at : at + self._step], out[at : at + self._step]) for at in starts)
        parts = map(self._one, given) if self._pool is None else self._pool.map(self._one, given)
        return np.concatenate(list(parts))

    def _one(self, given: tuple[Images, NDArray[np.int32]]) -> NDArray[np.bool_]:
        """One step of `quantise`, in any thread."""
        images, out = given
        space = self._space
        if isinstance(space, TokenCodes):
            return space.quantise(images, out)
        return quantise_rows(space.encode_exact_many(images), space.radius, out)[1]
