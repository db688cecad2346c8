"""The fixed classifier of every evaluation: LeNet-5 with an 84-wide penultimate layer.

LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition"
(1998), with ReLU and max pooling in place of squashing units and subsampling. The same network
is the probe (trained on synthetic images) and the feature net (trained on real ones; curator-only).
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator, seeded_initialisation

SIDE = 28
WIDTH = 84
BATCH = 128
LEARNING_RATE = 1e-3
LEAST_STEPS = 500

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


class LeNet(nn.Module):
    """LeNet-5 on images of any size: they are resized to 28x28 first (bilinear).

    Args:
        classes: number of declared classes Y.
        channels: 1 (grey) or 3 (RGB).
    """

    def __init__(self, classes: int, channels: int = 1) -> None:
        super().__init__()
        self.classes, self.channels = classes, channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, WIDTH),
            nn.ReLU(),
        )
        self.head = nn.Linear(WIDTH, classes)

    def features(self, images: Tensor) -> Tensor:
        """Penultimate activations (B, 84), after the ReLU, of images (B, C, H, W) in [0, 1]."""
        activations: Tensor = self.body(_entering(images))
        return activations

    def maps(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What both convolutions see, after the ReLU: (B, 6, 28, 28) and (B, 16, 10, 10)."""
        first = self.body[:2](_entering(images))
        return first, self.body[2:5](first)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, Y) of images (B, C, H, W) in [0, 1]."""
        logits: Tensor = self.head(self.features(images))
        return logits


def _entering(images: Tensor) -> Tensor:
    """Images (B, C, H, W) in [0, 1], resized and moved to [-1, 1]."""
    if images.shape[2:] != (SIDE, SIDE):
        images = functional.interpolate(
            images, size=(SIDE, SIDE), mode="bilinear", align_corners=False, antialias=True
        )
    return 2 * images - 1


def to_tensor(images: Images) -> Tensor:
    """uint8 (n, H, W, C) in [0, 255] to float32 (n, C, H, W) in [0, 1]."""
    # In C order: strides of a transposed array make convolutions slow.
    return torch.from_numpy(np.moveaxis(images, 3, 1).astype(np.float32, order="C")) / 255


def training_steps(count: int, epochs: int) -> int:
    """Optimiser steps of a probe on `count` images: `epochs` passes, 500 steps at least.

    >>> training_steps(10_000, 10), training_steps(300, 10)
    (790, 500)
    """
    return max(LEAST_STEPS, epochs * math.ceil(count / BATCH))


def train_probe(
    images: Images,
    labels: Labels,
    classes: int,
    *,
    steps: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> LeNet:
    """Train a fresh LeNet by the one fixed protocol and return it as the last step left it.

    Adam, learning rate 1e-3 falling to 0 along a cosine, batches of 128 from a fresh shuffle
    each pass, cross-entropy, no augmentation, no weight decay, no validation: no checkpoint is
    ever chosen.

    Args:
        images: uint8 (n, H, W, C).
        labels: (n,), each in [0, classes).
        classes: declared number of classes, never counted from `labels`.
        steps: optimiser steps, see `training_steps`.
        seed: fixes initial weights and shuffles.
        progress: called with 1 after each step.

    Raises:
        UsageError: no image, or a label outside [0, classes).
    """
    if len(images) == 0 or labels.min() < 0 or labels.max() >= classes:
        raise UsageError(f"a probe needs images with labels in [0, {classes})")
    with seeded_initialisation(seed):
        net = LeNet(classes, images.shape[3])
    optimiser = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    pixels, targets = to_tensor(images), torch.from_numpy(labels)
    net.train()
    for _, index in zip(range(steps), _shuffles(len(images), seed), strict=False):
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(functional.cross_entropy(net(pixels[index]), targets[index]))
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(1)
    return net.eval()


def predict(net: LeNet, images: Images) -> Labels:
    """Most likely class (n,) of images uint8 (n, H, W, C)."""
    return _by_batch(images, lambda batch: net(batch).argmax(dim=1)).astype(np.int64)


def features(net: LeNet, images: Images) -> NDArray[np.float64]:
    """Penultimate activations (n, 84) of images uint8 (n, H, W, C)."""
    return _by_batch(images, net.features).astype(np.float64)


def accuracy(net: LeNet, images: Images, labels: Labels) -> float:
    """Share of images uint8 (n, H, W, C) whose predicted class is their label."""
    return float(np.mean(predict(net, images) == labels))


def _by_batch(images: Images, function: Callable[[Tensor], Tensor]) -> NDArray[np.generic]:
    # A fixed batch size: a result must not depend on the machine's memory.
    with torch.no_grad():
        return np.concatenate(
            [
                function(to_tensor(images[start : start + 500])).numpy()
                for start in range(0, len(images), 500)
            ]
        )


def _shuffles(count: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of indices (up to 128,): fresh permutations, one after another."""
    source = generator(seed)
    while True:
        order = torch.randperm(count, generator=source)
        yield from torch.split(order, BATCH)
