"""The nearest record of each image, in pixels or features: all pairs, by blocked matrix products.

Squared distances are |q|^2 - 2 q.r + |r|^2 in float32, which decides who is nearest; the distance
to that record is then taken from the difference itself, in float64, so that an exact copy has
distance 0. 10,000 images against 60,000 records of 784 numbers are 0.94 * 10^12 operations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from dpsynth.errors import UsageError

Images = NDArray[np.uint8]
Vectors = NDArray[np.float32]

QUERIES, RECORDS = 2_048, 8_192
"""Rows of a product's two sides: 64 MB of float32."""
MOST_SIDE = 32


@dataclass(frozen=True)
class Space:
    """Where distances are taken.

    Attributes:
        name: in words, for the report.
        embed: images uint8 (n, H, W, C) to float32 (n, d), each image by itself.
    """

    name: str
    embed: Callable[[Images], Vectors]


@dataclass(frozen=True, eq=False)
class Nearest:
    """Of each query the nearest record: its `index` int64 (n,) and its `distance` float64 (n,)."""

    index: NDArray[np.int64]
    distance: NDArray[np.float64]


def nearest(
    queries: Images,
    records: Images,
    space: Space,
    *,
    own: NDArray[np.int64] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Nearest:
    """The nearest record of each query; of equally near ones the first.

    Args:
        queries: images uint8 (n, H, W, C).
        records: images uint8 (m, H, W, C) of the same shape.
        space: where distances are taken.
        own: (n,), of each query which record it is itself, and so no neighbour; -1 for none.
        progress: called with the number of queries times records compared, after each block.

    Raises:
        UsageError: no record to compare with, or images of another shape.
    """
    if len(records) < 1 + (own is not None) or queries.shape[1:] != records.shape[1:]:
        raise UsageError(
            f"nearest records of images {queries.shape[1:]} among records {records.shape[1:]}: "
            "there must be some, of the same shape"
        )
    sought = np.concatenate([space.embed(part) for part in _parts(queries)])
    # Centred, the products lose fewer digits; distances do not change.
    centre = sought.mean(axis=0, dtype=np.float64).astype(np.float32)
    centred = sought - centre
    index = np.zeros(len(queries), np.int64)
    least = np.full(len(queries), np.inf, np.float32)
    for start in range(0, len(records), RECORDS):
        vectors = space.embed(records[start : start + RECORDS]) - centre
        squares = np.einsum("nd,nd->n", vectors, vectors)
        for first in range(0, len(centred), QUERIES):
            rows = slice(first, first + QUERIES)
            # |q|^2 is left out: it does not change which record is nearest.
            scores = centred[rows] @ vectors.T
            scores *= -2
            scores += squares
            if own is not None:
                _leave_out(scores, own[rows] - start)
            best = scores.argmin(axis=1)
            value = scores[np.arange(len(best)), best]
            nearer = value < least[rows]
            least[rows] = np.where(nearer, value, least[rows])
            index[rows] = np.where(nearer, best + start, index[rows])
            if progress is not None:
                progress(len(best) * len(vectors))
    return Nearest(index, _lengths(sought, records, index, space))


def pixel_space(shape: tuple[int, int, int]) -> Space:
    """Euclidean distance of pixels in [0, 1]; images above 32 pixels a side are averaged down."""
    return Space(f"pixels{_reduced(shape)}", _pixels)


def aligned_space(shape: tuple[int, int, int]) -> Space:
    """Distance that neither brightness, nor contrast, nor a shift of the motif changes.

    Each image is rolled until the centre of mass of what differs from its border's median grey
    lies in the middle, its mean is taken away, and it is divided by its length.
    """
    return Space(f"pixels, centred, of unit contrast{_reduced(shape)}", _aligned)


def _pixels(images: Images) -> Vectors:
    flat: Vectors = _small(images).reshape(len(images), -1) / np.float32(255)
    return flat


def _aligned(images: Images) -> Vectors:
    flat = _small(_rolled(images)).reshape(len(images), -1)
    flat = flat - flat.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    unit: Vectors = flat / np.maximum(lengths, np.float32(1e-6))
    return unit


def _rolled(images: Images) -> Images:
    """Images (n, H, W, C), the motif's centre of mass brought to the middle by whole pixels."""
    grey = images.mean(axis=3, dtype=np.float32)
    rim = np.concatenate(
        [grey[:, [0, -1]].reshape(len(grey), -1), grey[:, 1:-1, 0], grey[:, 1:-1, -1]], 1
    )
    mass = np.abs(grey - np.median(rim, axis=1)[:, None, None])
    total = np.maximum(mass.sum(axis=(1, 2)), np.float32(1e-6))
    places = []
    for axis, side in ((2, images.shape[1]), (1, images.shape[2])):
        at = (mass.sum(axis=axis) @ np.arange(side, dtype=np.float32)) / total
        shift = np.rint(at - (side - 1) / 2).astype(np.int64)
        places.append((np.arange(side) + shift[:, None]) % side)
    each = np.arange(len(images))[:, None, None]
    found: Images = images[each, places[0][:, :, None], places[1][:, None, :]]
    return found


def _factor(shape: tuple[int, ...]) -> int:
    """Pixels a side of the blocks that are averaged: 1 for images of up to 32 pixels."""
    return -(-max(shape[0], shape[1]) // MOST_SIDE)


def _reduced(shape: tuple[int, int, int]) -> str:
    factor = _factor(shape)
    return "" if factor == 1 else f", averaged over about {factor}x{factor}"


def _small(images: Images) -> Vectors:
    """float32 (n, h, w, C) with h and w at most 32: means over blocks of pixels."""
    factor = _factor(images.shape[1:])
    if factor == 1:
        return images.astype(np.float32)
    tensor = torch.from_numpy(np.moveaxis(images, 3, 1).astype(np.float32))
    size = (-(-images.shape[1] // factor), -(-images.shape[2] // factor))
    return np.moveaxis(functional.adaptive_avg_pool2d(tensor, size).numpy(), 1, 3)


def _parts(images: Images) -> Iterator[Images]:
    """Blocks of images, one or more."""
    for start in range(0, max(1, len(images)), RECORDS):
        yield images[start : start + RECORDS]


def _leave_out(scores: Vectors, own: NDArray[np.int64]) -> None:
    """Make each row's own record infinitely far: column `own` (n,) of this block, if it is here."""
    here = np.flatnonzero((own >= 0) & (own < scores.shape[1]))
    scores[here, own[here]] = np.inf


def _lengths(
    sought: Vectors, records: Images, index: NDArray[np.int64], space: Space
) -> NDArray[np.float64]:
    """Distances (n,) of each query to the record at its index, from the differences."""
    found = np.empty(len(sought))
    for start in range(0, len(sought), RECORDS):
        rows = slice(start, start + RECORDS)
        gaps = sought[rows].astype(np.float64) - space.embed(records[index[rows]])
        found[rows] = np.linalg.norm(gaps, axis=1)
    return found
