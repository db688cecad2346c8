"""Velocity models v(x, t, y) on codes: a residual MLP and a compact transformer.

Built from Linear, LayerNorm and Embedding alone, each fed tensors whose first axis is the
example, so that per-example gradients can be taken by hooks. An axis of noise draws may follow
it: the transformer folds that axis into the tokens around each layer, never into the examples.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import UsageError
from dpsynth.planning.velocity import Velocity

FORMAT = "dpsynth-velocity-1"
FREQUENCIES = 16
TOKENS = 8
HEAD_WIDTH = 32


def build_velocity(settings: Velocity, dim: int, classes: int) -> nn.Module:
    """Build the plan's velocity model for codes of `dim` numbers and `classes` labels.

    `forward(x, t, y)` takes x (B, d) with t (B,), or x (B, K, d) with t (B, K) for K noise draws
    an example; y (B,) holds labels, or y (B, K) one a draw, `classes` being the null label; it
    returns the shape of x.
    """
    kind = MlpVelocity if settings.kind == "mlp" else TransformerVelocity
    return kind(dim, classes, settings.width, settings.depth)


class _Conditioned(nn.Module):
    """What both models share: time and label conditioning, and the unit-Gaussian skip.

    Codes have about unit variance, so x_t / sqrt((1 - t)^2 + t^2) does too, and the field of
    N(0, I), v = (2 t - 1) / ((1 - t)^2 + t^2) x, is added to the output: the network learns the
    rest and starts at zero (the preconditioning of EDM, for rectified flow).
    """

    def __init__(self, dim: int, classes: int, width: int) -> None:
        super().__init__()
        self.dim, self.classes, self.width = dim, classes, width
        self.label = nn.Embedding(classes + 1, width)
        self.time_in = nn.Linear(2 * FREQUENCIES, width)
        self.time_out = nn.Linear(width, width)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Velocity of x's shape at x (B, d) or (B, K, d), t and y (B,) or (B, K)."""
        draws = x if x.ndim == 3 else x[:, None]
        times = (t if t.ndim == 2 else t[:, None]).to(x.dtype)  # (B, K)
        time = self.time_out(functional.silu(self.time_in(time_features(times))))
        label = self.label(y) if y.ndim == 2 else self.label(y)[:, None]
        condition = functional.silu(time + label)  # (B, K, width)
        variance = ((1 - times).square() + times.square())[..., None]
        learned = self.learned(draws / variance.sqrt(), condition)
        skip = (2 * times[..., None] - 1) / variance * draws
        return (skip + learned).view_as(x)

    def learned(self, x: Tensor, condition: Tensor) -> Tensor:
        """The network's own part, (B, K, d), of x (B, K, d) and condition (B, K, width)."""
        raise NotImplementedError


class MlpVelocity(_Conditioned):
    """Residual MLP; each block is scaled and shifted by time and label."""

    def __init__(self, dim: int, classes: int, width: int, depth: int) -> None:
        super().__init__(dim, classes, width)
        self.enter = nn.Linear(dim, width)
        self.blocks = nn.ModuleList(_MlpBlock(width) for _ in range(depth))
        self.leave = _zeroed(nn.Linear(width, dim))

    def learned(self, x: Tensor, condition: Tensor) -> Tensor:
        """See the base class."""
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return _tensor(self.leave(hidden))


class _MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.modulate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulate(condition).chunk(2, dim=-1)
        inner = self.up(self.norm(hidden)) * (1 + scale) + shift
        return hidden + _tensor(self.down(functional.silu(inner)))


class TransformerVelocity(_Conditioned):
    """The code cut into at most eight tokens, with attention between them."""

    def __init__(self, dim: int, classes: int, width: int, depth: int) -> None:
        super().__init__(dim, classes, width)
        self.patch = math.ceil(dim / TOKENS)
        self.tokens = math.ceil(dim / self.patch)
        self.enter = nn.Linear(self.patch, width)
        self.position = nn.Embedding(self.tokens, width)
        self.blocks = nn.ModuleList(_AttentionBlock(width, self.tokens) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.leave = _zeroed(nn.Linear(width, self.patch))

    def learned(self, x: Tensor, condition: Tensor) -> Tensor:
        """See the base class. Inside, tokens lie as (B, K * T, width)."""
        batch, draws, dim = x.shape
        padded = functional.pad(x, (0, self.tokens * self.patch - dim))
        hidden = self.enter(padded.view(batch, draws * self.tokens, self.patch))
        index = torch.arange(self.tokens, device=x.device).expand(batch, self.tokens)
        hidden = hidden + self.position(index).repeat(1, draws, 1)
        for block in self.blocks:
            hidden = block(hidden, condition)
        out = self.leave(self.norm(hidden)).view(batch, draws, self.tokens * self.patch)
        return _tensor(out[..., :dim])


class _AttentionBlock(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.heads = _heads(width)
        self.modulate = nn.Linear(width, 4 * width)
        self.norm_mix, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulate(condition).repeat_interleave(self.tokens, dim=1).chunk(4, dim=-1)
        scale_mix, shift_mix, scale_up, shift_up = parts
        hidden = hidden + self._mix(self.norm_mix(hidden) * (1 + scale_mix) + shift_mix)
        inner = self.up(self.norm_up(hidden) * (1 + scale_up) + shift_up)
        return hidden + _tensor(self.down(functional.silu(inner)))

    def _mix(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.mix_in(hidden).view(-1, self.tokens, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B * K, heads, T, width / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return _tensor(self.mix_out(mixed.transpose(1, 2).reshape(batch, length, width)))


def time_features(t: Tensor) -> Tensor:
    """Sinusoidal features (..., 2 * FREQUENCIES) of times t (...) in [0, 1]."""
    frequencies = torch.exp(
        torch.linspace(math.log(0.5), math.log(64.0), FREQUENCIES, device=t.device, dtype=t.dtype)
    )
    angles = t[..., None] * frequencies * math.pi
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def save_velocity(
    model: nn.Module, path: Path, settings: Velocity, *, room: str, **facts: str
) -> None:
    """Write the weights atomically as safetensors; `facts` are more metadata (such as hashes)."""
    dim, classes = _sizes(model)
    tensors = {
        name: value.detach().cpu().contiguous().numpy()
        for name, value in model.state_dict().items()
    }
    save_tensors(path, tensors, {**facts, **_metadata(settings, dim, classes), "room": room})


def load_velocity(
    path: Path, settings: Velocity, dim: int, classes: int
) -> tuple[nn.Module, dict[str, str]]:
    """Read a velocity model in eval mode, and its metadata.

    Raises:
        MissingError: no such file (from `load_tensors`).
        UsageError: the file holds another model than the plan's.
    """
    tensors, metadata = load_tensors(path)
    expected = _metadata(settings, dim, classes)
    found = {key: metadata.get(key) for key in expected}
    if found != expected:
        raise UsageError(
            f"{path.name} holds the velocity model {found}; the plan expects {expected}",
            hint="the plan's velocity section changed: start a new run folder with --run",
        )
    model = build_velocity(settings, dim, classes)
    _fill(model, tensors, path.name)
    return model.eval(), metadata


def _fill(model: nn.Module, tensors: dict[str, Any], name: str) -> None:
    wanted = model.state_dict()
    if {key: tuple(value.shape) for key, value in wanted.items()} != {
        key: tuple(value.shape) for key, value in tensors.items()
    }:
        raise UsageError(f"{name} does not hold the arrays that its own metadata declares")
    model.load_state_dict(
        {key: torch.from_numpy(np.array(value, copy=True)) for key, value in tensors.items()}
    )


def _metadata(settings: Velocity, dim: int, classes: int) -> dict[str, str]:
    return {
        "format": FORMAT,
        "kind": settings.kind,
        "width": str(settings.width),
        "depth": str(settings.depth),
        "dim": str(dim),
        "classes": str(classes),
    }


def _sizes(model: nn.Module) -> tuple[int, int]:
    if not isinstance(model, _Conditioned):
        raise UsageError(f"{type(model).__name__} is no velocity model of dpsynth")
    return model.dim, model.classes


def _heads(width: int) -> int:
    """The most heads that divide the width, of HEAD_WIDTH numbers or more each."""
    most = max(1, width // HEAD_WIDTH)
    return next(heads for heads in range(most, 0, -1) if width % heads == 0)


def _zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _tensor(value: Any) -> Tensor:
    """Give a module's untyped output its type."""
    return value  # type: ignore[no-any-return]
