"""Wide residual networks: the larger classifier that public benchmarks train on synthetic images.

Zagoruyko and Komodakis, "Wide residual networks" (2016), table 1: WRN-d-k has d convolutions and
groups of width 16 k, 32 k and 64 k, with pre-activation blocks of two 3x3 convolutions, without
dropout. Images enter at their own size: grey or colour, of 8x8 pixels or more.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models.lenet import Images, Labels, to_tensor
from dpsynth.models.seeding import batches, generator, seeded_initialisation

SMALL, FULL = (16, 2), (40, 4)
"""Depth and widening factor: by default, and of the public benchmark."""
LEAST_SIDE, MOST_SIDE = 8, 64
BATCH = 128
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
LEAST_STEPS = 500
_PREDICTED = 500


class Block(nn.Module):
    """BN, ReLU, 3x3, BN, ReLU, 3x3, added to the input (1x1 where width or stride changes)."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(entering)
        self.first = nn.Conv2d(entering, leaving, 3, stride, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(leaving)
        self.second = nn.Conv2d(leaving, leaving, 3, padding=1, bias=False)
        same = entering == leaving and stride == 1
        self.shortcut = None if same else nn.Conv2d(entering, leaving, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, entering, h, w) to (B, leaving, h / stride, w / stride)."""
        active = functional.relu(self.first_norm(x))
        found = self.second(functional.relu(self.second_norm(self.first(active))))
        beside: Tensor = x if self.shortcut is None else self.shortcut(active)
        summed: Tensor = found + beside
        return summed


class WideResNet(nn.Module):
    """WRN-depth-factor.

    Args:
        classes: number of declared classes Y.
        channels: 1 (grey) or 3 (RGB).
        depth: 6 n + 4 for n blocks a group.
        factor: how many times wider than a plain residual network, k.

    Raises:
        UsageError: a depth that is not 6 n + 4 for some n of 1 or more.
    """

    def __init__(
        self, classes: int, channels: int = 1, depth: int = SMALL[0], factor: int = SMALL[1]
    ) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            raise UsageError(f"a wide residual network of depth {depth}: expected 10, 16, 22, ...")
        self.classes, self.name = classes, f"WRN-{depth}-{factor}"
        layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False)]
        width = 16
        for group, wide in enumerate((16 * factor, 32 * factor, 64 * factor)):
            for block in range(blocks):
                layers.append(Block(width, wide, 2 if group and block == 0 else 1))
                width = wide
        self.body = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, images: Tensor) -> Tensor:
        """Averages (B, 64 k) of the last maps of images (B, C, H, W) in [0, 1].

        Raises:
            UsageError: images smaller than 8x8.
        """
        # Channels last: half as long again is what convolutions take on CPUs otherwise.
        entering = (2 * _entering(images) - 1).contiguous(memory_format=torch.channels_last)
        maps: Tensor = self.body(entering)
        return maps.mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, Y) of images (B, C, H, W) in [0, 1]."""
        logits: Tensor = self.head(self.features(images))
        return logits


@dataclass(frozen=True, eq=False)
class Chosen:
    """A trained network as it was after its chosen epoch.

    Attributes:
        net: in evaluation mode.
        epoch: the chosen one, from 1.
        accuracies: on the split, after each epoch.
    """

    net: WideResNet
    epoch: int
    accuracies: tuple[float, ...]


def wide_steps(count: int, epochs: int) -> int:
    """Optimiser steps on `count` images: whole batches of 128, 500 steps at least.

    A multiple of `epochs`, so that all epochs are equally long.

    >>> wide_steps(54_000, 5), wide_steps(300, 5), wide_steps(300, 7)
    (2105, 500, 504)
    """
    least = math.ceil(LEAST_STEPS / epochs)
    return epochs * max(least, count // BATCH)


def train_wide(
    train: tuple[Images, Labels],
    split: tuple[Images, Labels],
    classes: int,
    *,
    epochs: int,
    size: tuple[int, int] = SMALL,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[int], None] | None = None,
) -> Chosen:
    """Train a fresh network by the one fixed protocol; keep the epoch that is best on `split`.

    SGD with Nesterov momentum 0.9, learning rate 0.1 falling to 0 along a cosine over all epochs,
    weight decay 5e-4, batches of 128 (what is left over at the end of a pass is dropped),
    cross-entropy, no augmentation. The best epoch: highest accuracy on `split`, the latest of
    equals.

    Args:
        train: images uint8 (n, H, W, C) and labels (n,), each in [0, classes).
        split: what chooses the epoch; never real records.
        classes: declared number of classes, never counted from labels.
        epochs: `wide_steps(n, epochs)` steps are taken in as many equal parts.
        size: depth and widening factor.
        seed: fixes initial weights and shuffles.
        device: where to train; None is the CPU. Another device rounds otherwise.
        progress: called with 1 after each step.

    Raises:
        UsageError: no image on a side, a label outside [0, classes), or images below 8x8.
    """
    for images, labels in (train, split):
        if len(images) == 0 or labels.min() < 0 or labels.max() >= classes:
            raise UsageError(f"a probe needs images with labels in [0, {classes})")
    with seeded_initialisation(seed):
        net = WideResNet(classes, train[0].shape[3], *size)
    net = net.to(device=device).to(memory_format=torch.channels_last)
    steps = wide_steps(len(train[0]), epochs)
    best, chosen, accuracies = copy.deepcopy(net), 0, list[float]()
    for epoch, _ in enumerate(_passes(net, train, steps, epochs, seed=seed, progress=progress), 1):
        accuracies.append(float(np.mean(predict_wide(net, split[0]) == split[1])))
        if accuracies[-1] >= max(accuracies):
            best, chosen = copy.deepcopy(net), epoch
    return Chosen(best.eval(), chosen, tuple(accuracies))


def predict_wide(net: WideResNet, images: Images) -> Labels:
    """Most likely class (n,) of images uint8 (n, H, W, C); leaves `net` in evaluation mode."""
    net.eval()
    found, device = [np.empty(0, np.int64)], net.head.weight.device
    with torch.no_grad():
        # A fixed batch size: a result must not depend on the machine's memory.
        for start in range(0, len(images), _PREDICTED):
            batch = to_tensor(images[start : start + _PREDICTED]).to(device)
            found.append(net(batch).argmax(dim=1).cpu().numpy())
    return np.concatenate(found)


def _passes(
    net: WideResNet,
    train: tuple[Images, Labels],
    steps: int,
    epochs: int,
    *,
    seed: int,
    progress: Callable[[int], None] | None,
) -> Iterator[None]:
    """Train; yield after each of the `epochs` equal parts of `steps`."""
    optimiser = torch.optim.SGD(
        net.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    device, order = net.head.weight.device, _shuffles(len(train[0]), seed)
    targets = torch.from_numpy(train[1])
    for step in range(1, steps + 1):
        index = next(order)
        net.train()
        optimiser.zero_grad(set_to_none=True)
        logits = net(to_tensor(train[0][index.numpy()]).to(device))
        torch.autograd.backward(functional.cross_entropy(logits, targets[index].to(device)))
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(1)
        if step % (steps // epochs) == 0:
            yield


def _shuffles(count: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of indices (128,), or of all where there are fewer."""
    source = generator(seed)
    while True:
        yield from batches(count, BATCH, source)


def _entering(images: Tensor) -> Tensor:
    """Images (B, C, H, W), the longer side brought down to 64 pixels where it is longer."""
    height, width = images.shape[2:]
    if min(height, width) < LEAST_SIDE:
        raise UsageError(
            f"a wide residual network takes images of {LEAST_SIDE}x{LEAST_SIDE} pixels or more, "
            f"these are {height}x{width}"
        )
    longer = max(height, width)
    if longer <= MOST_SIDE:
        return images
    size = [max(LEAST_SIDE, round(side * MOST_SIDE / longer)) for side in (height, width)]
    return functional.interpolate(
        images, size=size, mode="bilinear", align_corners=False, antialias=True
    )
