"""Probe accuracy: what a classifier learns from some images, tested on held-out real ones.

Two fixed protocols. LeNet (`probe_score`) chooses nothing: three networks, each taken after its
last step. The wide residual network (`wide_score`) chooses its epoch on a tenth of the very images
that it is trained on. No checkpoint, seed or setting is ever picked by a score on real records.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.assess.confusion import Confusion, confusion_of
from dpsynth.errors import UsageError
from dpsynth.models import wide_resnet
from dpsynth.models.lenet import Images, Labels, predict, train_probe
from dpsynth.models.seeding import generator
from dpsynth.models.wide_resnet import predict_wide, train_wide, wide_steps

Pair = tuple[Images, Labels]

SEEDS = (0, 1, 2)
PROTOCOL = (
    "mean of 3 LeNet probes, last step, no selection; Adam 1e-3 with cosine decay, batch 128, "
    "cross-entropy, no augmentation; images resized to 28x28"
)
WIDE_SEEDS = (0,)
WIDE_EPOCHS = 5
WIDE_MOST = 60_000
WIDE_LEAST = 10
WIDE_PROTOCOL = (
    "wide residual network (Zagoruyko and Komodakis 2016) on at most 60,000 images, a fixed random "
    "subset of more; SGD, Nesterov momentum 0.9, learning rate 0.1 with cosine decay to 0, weight "
    "decay 5e-4, batch 128, cross-entropy, no augmentation; the best of the epochs on a fixed "
    "random tenth of the images that it is given, which it is not trained on (the latest of "
    "equals); images at their own size, at most 64 pixels a side"
)


@dataclass(frozen=True, eq=False)
class ProbeScore:
    """What the probes score on held-out records.

    Attributes:
        mean: accuracy, averaged over the probes.
        spread: standard deviation over the probes' seeds; None for a single probe.
        confusion: of all probes together, (Y, Y).
        hits: share of the probes (m,) that were right about each held-out record.
    """

    mean: float
    spread: float | None
    confusion: Confusion
    hits: NDArray[np.float64]

    def to_json(self) -> dict[str, Any]:
        """Plain values of all but `hits`."""
        return {"mean": self.mean, "spread": self.spread, "confusion": self.confusion.to_json()}


@dataclass(frozen=True, eq=False)
class WideScore(ProbeScore):
    """As `ProbeScore`, with what was trained and which epochs were chosen.

    Attributes:
        network: its name, such as "WRN-16-2".
        n_train: images that it was trained on.
        n_split: images that chose the epoch.
        epochs: the chosen epoch of each probe, from 1.
        accuracies: of each probe on the split, after each epoch.
    """

    network: str
    n_train: int
    n_split: int
    epochs: tuple[int, ...]
    accuracies: tuple[tuple[float, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values of all but `hits`."""
        return {
            **super().to_json(),
            "network": self.network,
            "n_train": self.n_train,
            "n_split": self.n_split,
            "epochs": list(self.epochs),
            "accuracies": [list(values) for values in self.accuracies],
        }


def probe_score(
    train: Pair,
    held_out: Pair,
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
    found = [
        predict(
            train_probe(*train, classes, steps=steps, seed=seed, progress=progress), held_out[0]
        )
        for seed in SEEDS
    ]
    return ProbeScore(*_scored(found, held_out[1], classes))


def wide_score(
    train: Pair,
    held_out: Pair,
    classes: int,
    *,
    epochs: int = WIDE_EPOCHS,
    full: bool = False,
    seeds: Sequence[int] = WIDE_SEEDS,
    device: torch.device | None = None,
    progress: Callable[[int], None] | None = None,
) -> WideScore:
    """Train wide residual networks on `train`, test each on `held_out`; see `WIDE_PROTOCOL`.

    Args:
        train: images uint8 (n, H, W, C) of 8x8 pixels or more, and labels (n,).
        held_out: real images and labels that neither training nor the choice of an epoch sees.
        classes: declared number of classes.
        epochs: passes over the training images, see `wide_total`.
        full: WRN-40-4, the public benchmark's size, in place of WRN-16-2.
        seeds: one probe each.
        device: where to train; None is the CPU.
        progress: called with 1 after each of the `wide_total` steps.

    Raises:
        UsageError: fewer than 10 images, a label outside the declared classes, images that are
            too small, or no epoch or seed.
    """
    if len(train[0]) < WIDE_LEAST or epochs < 1 or not seeds:
        raise UsageError(
            f"the wide probe was given {len(train[0])} images, {epochs} epochs and {len(seeds)} "
            f"seeds; it needs {WIDE_LEAST} images or more, and one or more of both others"
        )
    kept, split = _parts(train)
    size = wide_resnet.FULL if full else wide_resnet.SMALL
    chosen = [
        train_wide(
            kept,
            split,
            classes,
            epochs=epochs,
            size=size,
            seed=seed,
            device=device,
            progress=progress,
        )
        for seed in seeds
    ]
    found = [predict_wide(probe.net, held_out[0]) for probe in chosen]
    return WideScore(
        *_scored(found, held_out[1], classes),
        chosen[0].net.name,
        len(kept[0]),
        len(split[0]),
        tuple(probe.epoch for probe in chosen),
        tuple(probe.accuracies for probe in chosen),
    )


def wide_total(count: int, epochs: int = WIDE_EPOCHS, seeds: Sequence[int] = WIDE_SEEDS) -> int:
    """Optimiser steps that `wide_score` takes on `count` images, over all probes.

    >>> wide_total(60_000), wide_total(1_000_000)
    (2105, 2105)
    """
    count = min(count, WIDE_MOST)
    return len(seeds) * wide_steps(count - count // WIDE_LEAST, epochs)


def majority(labels: NDArray[np.int64], classes: int) -> float:
    """Share of the most frequent class: what a constant answer scores.

    >>> majority(np.array([0, 1, 1, 2]), 4)
    0.5
    """
    return float(np.bincount(labels, minlength=classes).max() / len(labels))


def _parts(pair: Pair) -> tuple[Pair, Pair]:
    """What is trained on, and the tenth that chooses the epoch: the same for every seed."""
    images, labels = pair
    order = torch.randperm(len(images), generator=generator(0)).numpy()[:WIDE_MOST]
    split, kept = np.split(order, [len(order) // WIDE_LEAST])
    return (images[kept], labels[kept]), (images[split], labels[split])


def _scored(
    found: list[Labels], labels: Labels, classes: int
) -> tuple[float, float | None, Confusion, NDArray[np.float64]]:
    """Fields of a `ProbeScore` from each probe's predictions (m,) of records with `labels` (m,)."""
    right = [predicted == labels for predicted in found]
    scores = [float(np.mean(one)) for one in right]
    matrix, *others = (confusion_of(labels, predicted, classes) for predicted in found)
    spread = statistics.stdev(scores) if len(scores) > 1 else None
    hits: NDArray[np.float64] = np.stack(right).mean(axis=0, dtype=np.float64)
    return statistics.fmean(scores), spread, sum(others, matrix), hits
