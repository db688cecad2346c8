"""Probe accuracy: what a classifier learns from some images, tested on held-out real ones.

The protocol is fixed and chooses nothing: three LeNets from seeds 0, 1, 2, each taken after its
last step. No checkpoint, seed or setting is ever picked by a score on real records.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.models.lenet import Images, Labels, accuracy, train_probe

SEEDS = (0, 1, 2)
PROTOCOL = (
    "mean of 3 LeNet probes, last step, no selection; Adam 1e-3 with cosine decay, batch 128, "
    "cross-entropy, no augmentation; images resized to 28x28"
)


@dataclass(frozen=True)
class ProbeScore:
    """Accuracy of the probes: their mean, and the standard deviation over probe seeds."""

    mean: float
    spread: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def probe_score(
    train: tuple[Images, Labels],
    held_out: tuple[Images, Labels],
    classes: int,
    steps: int,
    progress: Callable[[int], None] | None = None,
) -> ProbeScore:
    """Train the probes on `train`, test each on `held_out`; see `PROTOCOL`.

    Args:
        train: images uint8 (n, H, W, C) and labels (n,).
        held_out: real images and labels that no training saw.
        classes: declared number of classes.
        steps: optimiser steps of each probe.
        progress: called with 1 after each step.

    Raises:
        UsageError: `train` is empty or has a label outside the declared classes.
    """
    scores = [
        accuracy(train_probe(*train, classes, steps=steps, seed=seed, progress=progress), *held_out)
        for seed in SEEDS
    ]
    return ProbeScore(statistics.fmean(scores), statistics.stdev(scores))


def majority(labels: NDArray[np.int64], classes: int) -> float:
    """Share of the most frequent class: what a constant answer scores.

    >>> majority(np.array([0, 1, 1, 2]), 4)
    0.5
    """
    return float(np.bincount(labels, minlength=classes).max() / len(labels))
