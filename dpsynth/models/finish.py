"""Sharpening of decoded images, by a gain that public images set.

A decoder blurs. An unsharp mask gives edges back; its gain is the one with which decoded images
have the gradient energy of given ones (which, is decided where the gain is measured).
"""

import torch
from torch import Tensor
from torch.nn import functional

MOST = 4.0
"""Largest gain."""
_HALVINGS = 20  # of [0, MOST]: to 4e-6
_BINOMIAL = (0.25, 0.5, 0.25)


def sharpen(images: Tensor, gain: float) -> Tensor:
    """Unsharp mask x + gain (x - blur x), clamped; images (n, C, H, W) in [0, 1]."""
    if gain == 0.0:
        return images
    return (images + gain * (images - _blur(images))).clamp(0.0, 1.0)


def gradient_energy(images: Tensor) -> float:
    """Mean squared forward difference along both axes of images (n, C, H, W); 0 without any."""
    total, count = 0.0, 0
    for axis in (-2, -1):
        steps = images.diff(dim=axis)
        total, count = total + float(steps.double().square().sum()), count + steps.numel()
    return total / count if count else 0.0


def gain_for(decoded: Tensor, images: Tensor) -> float:
    """The gain in [0, MOST] that gives `decoded` the gradient energy of `images`.

    Both (n, C, H, W) in [0, 1]; they need not be of the same pictures, nor as many: only their
    energies are compared. By bisection: energy grows with the gain. 0 where the decoded
    images are as sharp already, MOST where no gain is enough.
    """
    wanted = gradient_energy(images)
    low, high = 0.0, MOST
    if gradient_energy(decoded) >= wanted:
        return low
    if gradient_energy(sharpen(decoded, high)) <= wanted:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if gradient_energy(sharpen(decoded, middle)) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _blur(images: Tensor) -> Tensor:
    """3 by 3 binomial blur of each channel, borders repeated."""
    line = torch.tensor(_BINOMIAL, dtype=images.dtype)
    kernel = (line[:, None] * line).expand(images.shape[1], 1, 3, 3)
    padded = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    return functional.conv2d(padded, kernel, groups=images.shape[1])
