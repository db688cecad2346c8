"""What all velocity models share: their axes, the unit-Gaussian skip, and the time's features."""

import math
from typing import Any

import torch
from torch import Tensor, nn

FREQUENCIES = 16
HEAD_WIDTH = 32


class PreconditionedVelocity(nn.Module):
    """The axes of noise draws, and the unit-Gaussian skip around a network's own part.

    Codes have about unit variance, so x_t / sqrt((1 - t)^2 + t^2) does too, and the field of
    N(0, I), v = (2 t - 1) / ((1 - t)^2 + t^2) x, is added to the output: the network learns the
    rest and starts at zero (the preconditioning of EDM, for rectified flow).
    """

    def __init__(self, dim: int, classes: int, width: int) -> None:
        super().__init__()
        self.dim, self.classes, self.width = dim, classes, width

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Velocity of x's shape at x (B, d) or (B, K, d), t and y (B,) or (B, K)."""
        draws = x if x.ndim == 3 else x[:, None]
        times = (t if t.ndim == 2 else t[:, None]).to(x.dtype)  # (B, K)
        variance = ((1 - times).square() + times.square())[..., None]
        learned = self.network(draws / variance.sqrt(), times, y)
        skip = (2 * times[..., None] - 1) / variance * draws
        return (skip + learned).view_as(x)

    def network(self, x: Tensor, times: Tensor, y: Tensor) -> Tensor:
        """The network's own part, (B, K, d), of x (B, K, d), times (B, K), y (B,) or (B, K)."""
        raise NotImplementedError


def time_features(t: Tensor) -> Tensor:
    """Sinusoidal features (..., 2 * FREQUENCIES) of times t (...) in [0, 1]."""
    frequencies = torch.exp(
        torch.linspace(math.log(0.5), math.log(64.0), FREQUENCIES, device=t.device, dtype=t.dtype)
    )
    angles = t[..., None] * frequencies * math.pi
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def most_heads(width: int) -> int:
    """The most heads that divide the width, of HEAD_WIDTH numbers or more each.

    >>> most_heads(192), most_heads(64), most_heads(40)
    (6, 2, 1)
    """
    most = max(1, width // HEAD_WIDTH)
    return next(heads for heads in range(most, 0, -1) if width % heads == 0)


def zeroed(layer: nn.Linear) -> nn.Linear:
    """The layer with its weight and bias set to zero."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def tensor(value: Any) -> Tensor:
    """Give a module's untyped output its type."""
    return value  # type: ignore[no-any-return]
