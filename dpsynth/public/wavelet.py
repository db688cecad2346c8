"""The code space of `kind: wavelet`: the LL0 band of an orthonormal wavelet transform.

DP-Wavelet, section 3.1, releases the coarse approximation of an image and leaves its details to
public models. Here the approximation is the code itself: a fixed linear map of the pixels, for
which nothing is learned. See docs/maths/wavelet.md.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.planning.schema import ImageShape, Representation
from dpsynth.planning.wavelets import canvas_of

Array = NDArray[np.float64]

# Pixels multiplied at once: bounds memory, and changes no bit of any code.
_NUMBERS = 2**20
_MOST_PLACES = 30


@dataclass(frozen=True, eq=False)
class WaveletCodec:
    """Codes are LL0 = A_h X A_w^T of each channel X, padded by mirroring; pixels are 0 to 255.

    `rows` A_h (h, H') and `columns` A_w (w, W') have orthonormal rows: J levels of low-pass
    filtering by 2 of a canvas of H' x W'. `shape` is (H, W, C), and a code is LL0 (h, w, C), row
    by row. `corner`: where on the canvas the image's first pixel lies.
    """

    rows: Array
    columns: Array
    shape: tuple[int, int, int]
    corner: tuple[int, int] = (0, 0)
    elementwise: ClassVar[bool] = False

    @property
    def band(self) -> tuple[int, int, int]:
        """Shape (h, w, C) of LL0."""
        return len(self.rows), len(self.columns), self.shape[2]

    def encode_rows(self, images: NDArray[np.uint8]) -> Array:
        """Codes (n, h w C) of images (n, H, W, C), each the same bits in any company.

        Pixels are whole and so are the filters on their grid: the products' sums are exact in
        float64, in any order, and the BLAS may take any.
        """
        first, second, worth = self._whole_filters
        height, width, channels = self.shape
        codes = np.empty((len(images), *self.band))
        step = max(1, _NUMBERS // (height * width * channels))
        for start in range(0, len(images), step):
            part = images[start : start + step].astype(np.float64, order="C")
            tall = first @ part.reshape(len(part), height, width * channels)
            codes[start : start + step] = second @ tall.reshape(len(part), -1, width, channels)
        codes *= worth
        codes += 0.0  # no -0.0, whose sign the order of a sum may decide
        return codes.reshape(len(images), math.prod(self.band))

    @cached_property
    def _whole_filters(self) -> tuple[Array, Array, float]:
        """2^(J/2) A P of both sides, (h, H) and (w, W), in whole steps; and a product's worth.

        P mirrors an image into its canvas. Steps are 2^-b, as fine as keeps 255 times the longest
        rows' sums of sizes below 2^53. Haar's entries 2^(J/2) A are 0 and 1, so that nothing is
        rounded.
        """
        levels = _levels(self.rows)
        filters = [
            math.sqrt(2.0**levels) * _mirrored(given, side, before)
            for given, side, before in zip(
                (self.rows, self.columns), self.shape, self.corner, strict=False
            )
        ]
        for places in range(_MOST_PLACES, -1, -1):
            first, second = (np.rint(np.ldexp(given, places)) for given in filters)
            longest = [int(np.abs(given).sum(axis=1).max()) for given in (first, second)]
            if 255 * longest[0] * longest[1] < 2**53:
                break
        return first, second, math.ldexp(1.0, -2 * places - levels)

    def encode_many(self, images: NDArray[np.uint8]) -> Tensor:
        """Codes (n, h w C) float64 of public images (n, H, W, C)."""
        return torch.from_numpy(self.encode_rows(images))

    def decode(self, codes: Tensor) -> Tensor:
        """Pixels (n, H, W, C), about in [0, 1], of codes (n, h w C): the inverse, details zero."""
        band = codes.double().view(len(codes), *self.band)
        rows, columns = torch.from_numpy(self.rows), torch.from_numpy(self.columns)
        canvas = torch.einsum("hH,wW,nhwc->nHWc", rows, columns, band)
        top, left = self.corner
        return canvas[:, top : top + self.shape[0], left : left + self.shape[1]] / 255.0

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What `geometry.safetensors` keeps of it: no later PyWavelets can change a code."""
        return {"rows": self.rows, "columns": self.columns}


def wavelet_codec(space: Representation, image: ImageShape) -> WaveletCodec:
    """The codec that a plan declares, its filters from PyWavelets."""
    name, levels = _declared(space)
    sides = canvas_of(image.height, image.width, levels, space.padded)
    rows, columns = (low_pass(name, side, levels) for side in sides)
    return _placed(rows, columns, space, image)


def stored_codec(
    rows: NDArray[np.generic],
    columns: NDArray[np.generic],
    space: Representation,
    image: ImageShape,
) -> WaveletCodec:
    """The codec of a geometry file.

    Raises:
        ValueError: its filters have not the sizes that the plan declares.
    """
    _, levels = _declared(space)
    sides = canvas_of(image.height, image.width, levels, space.padded)
    kept = [np.ascontiguousarray(given, dtype=np.float64) for given in (rows, columns)]
    if [given.shape for given in kept] != [(side >> levels, side) for side in sides]:
        raise ValueError("filters")
    if not all(np.isfinite(given).all() for given in kept):
        raise ValueError("finite")
    return _placed(kept[0], kept[1], space, image)


def _placed(rows: Array, columns: Array, space: Representation, image: ImageShape) -> WaveletCodec:
    """The image in the middle of a declared canvas, else at its beginning."""
    shape = (image.height, image.width, image.channels)
    if space.padded is None:
        return WaveletCodec(rows, columns, shape)
    margins = (space.padded.height - image.height, space.padded.width - image.width)
    return WaveletCodec(rows, columns, shape, (margins[0] // 2, margins[1] // 2))


def low_pass(name: str, side: int, levels: int) -> Array:
    """A (side / 2^levels, side): approximation coefficients of a signal, periodic at its ends.

    >>> low_pass("haar", 4, 1).round(4).tolist()
    [[0.7071, 0.7071, 0.0, 0.0], [0.0, 0.0, 0.7071, 0.7071]]
    """
    import pywt

    found = np.eye(side)
    for _ in range(levels):
        found, _ = pywt.dwt(found, name, mode="periodization", axis=0)
    return np.ascontiguousarray(found)


def _declared(space: Representation) -> tuple[str, int]:
    if space.wavelet is None or space.levels is None:
        raise ValueError("wavelet")
    return space.wavelet, space.levels


def _levels(filters: Array) -> int:
    rows, canvas = filters.shape
    return int(canvas // rows).bit_length() - 1


def _mirrored(filters: Array, side: int, before: int) -> Array:
    """A P (h, side) of filters A (h, canvas): each canvas pixel mirrors one of the image."""
    canvas = filters.shape[1]
    source = np.pad(np.arange(side), (before, canvas - side - before), mode="symmetric")
    found = np.zeros((len(filters), side))
    for place, origin in enumerate(source.tolist()):
        found[:, origin] += filters[:, place]
    return found
