"""Public calibration of feature maps: bandwidths, pixel pairs and centre from public images.

All of it costs utility when it transfers badly, never privacy: norms are at most 1 for any of it.
"""

from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.artifacts.embedding import MapRecipe
from dpsynth.errors import UsageError
from dpsynth.models.embeddings.build import recipe_of
from dpsynth.models.seeding import generator
from dpsynth.planning.embedding import Embedding

PROBES = 2_000
"""Public images whose distances the median heuristic looks at."""

Images = NDArray[np.uint8]


def calibrate_map(images: Images, settings: Embedding, seed: int) -> MapRecipe:
    """The recipe of a plan's feature map.

    Args:
        images: public, uint8 (n, H, W, C) of the private records' shape; 2 or more.
        settings: of the plan.
        seed: the plan's public seed.

    Raises:
        UsageError: too few images, or images that are all the same.
    """
    if images.ndim != 4 or len(images) < 2:
        raise UsageError(f"a feature map is calibrated on 2 public images or more: {images.shape}")
    shape = (images.shape[1], images.shape[2], images.shape[3])
    numbers: dict[str, float]
    arrays: dict[str, NDArray[np.generic]] = {}
    if settings.kind == "fourier":
        bandwidth = settings.bandwidth or median_distance(images, seed)
        numbers = {"features": settings.features, "bandwidth": bandwidth}
    elif settings.kind == "hermite":
        length = settings.length or median_difference(images, seed)
        numbers = {
            "length": length,
            "order": settings.order,
            "pair_order": settings.pair_order,
            "alpha": settings.alpha,
        }
        arrays["pairs"] = pixel_pairs(images, settings.pairs, seed)
    else:
        numbers = {"width": settings.width}
        mean = np.rint(images.mean(axis=0)).astype(np.uint8)
        arrays["centre"] = mean if settings.centred else np.zeros_like(mean)
    return recipe_of(settings.kind, shape, seed, numbers, arrays)


def median_distance(images: Images, seed: int) -> float:
    """Median Euclidean distance of two public images, pixels in [0, 1] (the median heuristic).

    Raises UsageError where it is 0.
    """
    rows = _probes(images, seed)
    return _above_zero(float(torch.nn.functional.pdist(rows).median()))


def median_difference(images: Images, seed: int) -> float:
    """Median over pairs of images of the root mean square difference in the pixels that vary most.

    Those are the ones of more than the mean variance. Pixels in [0, 1]; raises UsageError at 0.
    """
    rows = _probes(images, seed)
    spread = rows.var(dim=0)
    rows = rows[:, spread >= spread.mean()]
    distance = float(torch.nn.functional.pdist(rows).median())
    return _above_zero(distance / rows.shape[1] ** 0.5)


def pixel_pairs(images: Images, count: int, seed: int) -> NDArray[np.int64]:
    """Pairs (count, 2) of different places, drawn in proportion to their public variance.

    No pair comes twice, in either order. Where too few places vary, others come after them; there
    are fewer only where the image has no more.
    """
    if count == 0:
        return np.zeros((0, 2), np.int64)
    spread = _probes(images, seed).var(dim=0)
    spread = spread / spread.sum() if float(spread.sum()) > 0 else torch.ones(len(spread))
    source = generator(seed + 1)
    found: dict[tuple[int, int], None] = {}
    for _ in range(64):
        draws = torch.multinomial(spread, 4 * count, replacement=True, generator=source)
        ordered = draws.view(-1, 2).sort(dim=1).values.tolist()
        found.update(((first, second), None) for first, second in ordered if first != second)
        if len(found) >= count:
            break
    for pair in combinations(range(len(spread)), 2):
        if len(found) >= count:
            break
        found[pair] = None
    return np.array(list(found)[:count], np.int64).reshape(-1, 2)


def _probes(images: Images, seed: int) -> torch.Tensor:
    """Pixels (m, H W C) in [0, 1] of at most `PROBES` random images."""
    order = torch.randperm(len(images), generator=generator(seed))[:PROBES].numpy()
    return torch.from_numpy(images[order].reshape(len(order), -1).astype(np.float32) / 255)


def _above_zero(value: float) -> float:
    if not value > 0:
        raise UsageError(
            "the public images have a median distance of 0: no bandwidth follows from them",
            hint="write the bandwidth (or length) into the plan, or declare other public images",
        )
    return value
