"""Domain rate: how many samples look like private records rather than like public images.

"The fraction of samples a real MNIST-vs-KMNIST classifier assigns to the private domain"
(StraightDP, D.1, Table 5): the classifier is trained on real private training records against the
plan's public images. Curator-only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.assess.features import lenet_space
from dpsynth.errors import UsageError
from dpsynth.models.lenet import Images, LeNet, predict
from dpsynth.models.seeding import generator

STEPS = 500
MOST = 10_000
ASIDE = 10
"""One public image in so many is not trained on: the floor."""
PUBLIC, PRIVATE = 0, 1
PROTOCOL = (
    f"one LeNet of 2 classes, {STEPS} steps of the probe's protocol, on equally many real training "
    f"records and public images (fixed random subsets, at most {MOST:,} of each); ceiling: "
    "held-out real records; floor: a tenth of the public images that it was not trained on"
)


@dataclass(frozen=True, eq=False)
class DomainRate:
    """Shares that the classifier assigns to the private domain.

    Attributes:
        synthetic: of the samples.
        ceiling: of held-out real records.
        floor: of public images that it was not trained on.
        hits: of each sample (n,), whether it was.
        counts: images behind each share, and `train`, of each domain.
    """

    synthetic: float
    ceiling: float
    floor: float
    hits: NDArray[np.bool_]
    counts: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain values of all but `hits`."""
        return {
            "synthetic": self.synthetic,
            "ceiling": self.ceiling,
            "floor": self.floor,
            "n": dict(self.counts),
        }


def domain_rate(
    samples: Images,
    train: Images,
    held_out: Images,
    public: Images,
    *,
    cache: Path | None,
    progress: Callable[[int], None] | None = None,
) -> DomainRate:
    """Train the classifier (`PROTOCOL`) and ask it about samples, held-out and public images.

    Args:
        samples: uint8 (n, H, W, C).
        train: real private training records of the same shape.
        held_out: real records that it is not trained on.
        public: public images of the same shape.
        cache: folder in the curator's room; None keeps nothing.
        progress: called with 1 after each of `STEPS` steps.

    Raises:
        UsageError: a side without an image, or fewer than 10 public images.
    """
    if not (len(samples) and len(train) and len(held_out)) or len(public) < ASIDE:
        raise UsageError(
            f"a domain rate needs samples, real records of both sides and {ASIDE} public images; "
            f"it was given {len(samples)} samples and {len(public)} public images"
        )
    order = _order(len(public))
    aside, kept = order[: len(public) // ASIDE], order[len(public) // ASIDE :]
    each = min(MOST, len(kept), len(train))
    both = np.concatenate([public[kept[:each]], train[_order(len(train))[:each]]])
    domains = np.repeat(np.array([PUBLIC, PRIVATE]), each)
    _, net = lenet_space(both, domains, 2, steps=STEPS, cache=cache, progress=progress)
    hits, real = _private(net, samples), _private(net, held_out)
    floor = _private(net, public[aside[:MOST]])
    counts = {"synthetic": len(hits), "ceiling": len(real), "floor": len(floor), "train": each}
    return DomainRate(float(hits.mean()), float(real.mean()), float(floor.mean()), hits, counts)


def _private(net: LeNet, images: Images) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = predict(net, images) == PRIVATE
    return found


def _order(count: int) -> NDArray[np.int64]:
    """A fixed random order."""
    return torch.randperm(count, generator=generator(0)).numpy()
