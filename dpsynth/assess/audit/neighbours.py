"""Attacks on samples alone: does an image lie closer to the output than it should?

Distances of Hilprecht, Haerterich and Bernau (2019) and of Chen, Yu, Zhang and Fritz (2020,
"GAN-Leaks", section 5: the full black-box attack and its calibration): the nearest sample,
relative to the nearest image of a reference set that had no part in training.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from dpsynth.errors import UsageError

Array = NDArray[np.float64]
Images = NDArray[np.uint8]

COPY = 2.0
"""Root mean square distance in grey levels (of 255) below which an image counts as copied."""
# Numbers of a block of distances.
_BLOCK = 2**22
# In pixel units of [0, 1]: a distance of zero has a logarithm.
_LEAST = 1e-6


def nearest(images: Images, others: Images, *, apart: bool = False) -> Array:
    """Root mean square distance (n,) of each image to its nearest other, pixels in [0, 1].

    Exact: differences are taken before they are squared, so that a copy has distance 0.

    Args:
        images: uint8 (n, H, W, C).
        others: uint8 (k, H, W, C).
        apart: both are one and the same set, and an image's own place does not count.

    Raises:
        UsageError: no other image, or images of several shapes.
    """
    if images.shape[1:] != others.shape[1:] or len(others) <= apart:
        raise UsageError(
            f"nearest images of {images.shape} among {others.shape}: expected one shape, and "
            f"{1 + apart} or more to choose from"
        )
    rows, columns = _flat(images), _flat(others)
    found = np.empty(len(rows))
    step = max(1, _BLOCK // len(columns))
    for start in range(0, len(rows), step):
        squares = cdist(rows[start : start + step], columns, "sqeuclidean")
        if apart:
            place = np.arange(len(squares))
            squares[place, start + place] = np.inf
        found[start : start + step] = squares.min(axis=1)
    rms: Array = np.sqrt(found / max(1, rows.shape[1]))
    return rms


def neighbour_scores(images: Images, samples: Images, reference: Images | None = None) -> Array:
    """Log of (distance to the nearest reference image / distance to the nearest sample) (n,).

    Higher: closer to the output than to what is like it. None: the images are one another's
    reference, by the nearest other one of them.

    Args:
        images: candidates, uint8 (n, H, W, C).
        samples: the output, uint8 (k, H, W, C).
        reference: images that were not trained on, uint8 (r, H, W, C).
    """
    own = reference is None
    if reference is None:
        reference = images
    usual = np.ones(len(images))
    if len(reference) > own:
        usual = nearest(images, reference, apart=own)
    found: Array = np.log(usual + _LEAST) - np.log(nearest(images, samples) + _LEAST)
    return found


def copied(images: Images, samples: Images) -> NDArray[np.bool_]:
    """Which images (n,) the output holds, up to `COPY` grey levels of root mean square distance."""
    found: NDArray[np.bool_] = nearest(images, samples) * 255.0 <= COPY
    return found


def _flat(images: Images) -> Array:
    return images.reshape(len(images), -1).astype(np.float64) / 255.0
