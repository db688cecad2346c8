"""A frozen text-to-image model as a velocity model of dpsynth, v(x, t, y), on centred codes.

The model predicts xi - z at x = (1 - sigma) z + sigma xi in its own units; dpsynth's time is
t = 1 - sigma, and a code is z - m, m the public mean. So a code x is x + t m to the model, and

    v = z - m - xi = -(what the model predicts) - m.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsynth.errors import UsageError
from dpsynth.models.frozen.families import FAMILIES, Prompts
from dpsynth.models.frozen.machine import machine, on_device
from dpsynth.models.frozen.schedule import Schedule

FACTORS = (".lora_A.", ".lora_B.")
"""What names of LoRA factors have in them; all other weights are frozen."""


class FrozenVelocity(nn.Module):
    """A frozen transformer and the prompts of its labels; label `classes` is the empty prompt.

    `forward(x, t, y)` as of every velocity model: x (B, d) with t (B,), or x (B, K, d) with
    t (B, K) for K noise draws an example, which lie side by side in the transformer's batch; y
    (B,) or (B, K). It returns the shape, type and place of x, wherever the transformer is.
    """

    def __init__(
        self,
        transformer: nn.Module,
        family: str,
        shape: tuple[int, int, int],
        prompts: Mapping[str, Tensor],
        mean: Tensor,
        *,
        schedule: Schedule,
        weights_sha256: str = "",
    ) -> None:
        """Take a transformer of that family, latents' shape (C, h, w), prompts (K + 1, ...), m.

        weights_sha256: of the checkpoint, which a file of this model will name.
        """
        super().__init__()
        self.transformer = transformer
        self.family, self.shape, self.schedule = family, shape, schedule
        self.weights_sha256 = weights_sha256
        self.prompts: Prompts = dict(prompts)
        self.mean = mean.float()
        counts = {len(rows) for rows in self.prompts.values()}
        if len(counts) != 1 or self.mean.shape != (self.dim,):
            raise UsageError("prompts and mean do not fit the latents of a frozen model")
        self.classes = counts.pop() - 1

    @property
    def dim(self) -> int:
        """Numbers in a code."""
        return int(np.prod(self.shape))

    def euler_times(self, steps: int, start_time: float = 0.0) -> list[float]:
        """The times that its scheduler goes through from `start_time` to 1."""
        return self.schedule.times(steps, start_time)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """See the class."""
        if x.shape[-1] != self.dim or t.shape != x.shape[:-1]:
            raise UsageError(
                f"codes {tuple(x.shape)} at times {tuple(t.shape)}; expected (..., {self.dim})"
            )
        labels = y[:, None].expand(t.shape) if y.ndim < t.ndim else y
        rows, times, own = x.reshape(-1, self.dim), t.reshape(-1), labels.reshape(-1)
        device = on_device(self.transformer)
        size = len(rows) if torch.is_grad_enabled() else machine().batch
        parts = [
            self._velocity(rows[at : at + size], times[at : at + size], own[at : at + size], device)
            for at in range(0, len(rows), max(1, size))
        ]
        return torch.cat(parts).view(x.shape) if parts else torch.zeros_like(x)

    def _velocity(self, x: Tensor, t: Tensor, y: Tensor, device: torch.device) -> Tensor:
        """Velocity (b, d) at codes x (b, d), times t (b,) and labels y (b,)."""
        mean, kind = self.mean.to(x), self._kind
        latents = (x + t[:, None] * mean).view(-1, *self.shape)
        index = y.to("cpu")
        prompts = {name: rows[index].to(device, kind) for name, rows in self.prompts.items()}
        sigma = (1.0 - t).to(device, torch.float32)
        found = FAMILIES[self.family].predict(
            self.transformer, latents.to(device, kind), sigma, prompts
        )
        return -found.reshape(len(x), -1).to(x) - mean

    @property
    def _kind(self) -> torch.dtype:
        """The type of the frozen weights; LoRA factors are float32 in any case."""
        frozen = (p for name, p in self.transformer.named_parameters() if not is_factor(name))
        return next(frozen).dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenVelocity":
        """A copy with factors of its own; the frozen weights, prompts and mean are shared."""
        shared = FrozenVelocity.__new__(FrozenVelocity)
        memo[id(self)] = shared
        own = {"transformer": shared_copy(self.transformer, memo)}
        shared.__dict__ = {**self.__dict__, "_modules": own}
        return shared


def is_factor(name: str) -> bool:
    """Whether a parameter of that name is a LoRA factor."""
    return any(part in name for part in FACTORS)


def shared_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a module whose weights are the same tensors, but for its LoRA factors."""
    memo = {} if memo is None else memo
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if not is_factor(name):
            memo[id(value)] = value
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied
