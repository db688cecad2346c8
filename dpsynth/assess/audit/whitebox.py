"""Gradient canaries for an adversary who sees every noisy gradient of DP-SGD.

A canary is a unit whose gradient is zero but at one weight of its own (a Dirac canary: Nasr et al.
2023, section 4; Steinke, Nasr and Jagielski 2023, section 6). It takes part as any unit does: a
coin of the step's own Poisson sampling, per-example clipping by the real engine, the sum, the
noise, all through `dpsynth.private`; so that a fault in any of these shows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsynth.assess.audit.controls import clip_bound
from dpsynth.assess.audit.worlds import Array, Control, Mask
from dpsynth.errors import UsageError
from dpsynth.planning.training import Train
from dpsynth.private.engine import DEFAULT, ClippedSum, EngineSettings, PerExampleClipper
from dpsynth.private.steps import PrivateCodes, flow_losses
from dpsynth.private.training_state import TrainingState

STEEP = 100.0
"""Norm of a canary's gradient before the clip, in clips: a clip that fails is seen at once."""


@dataclass(frozen=True)
class Coordinates:
    """One weight for each canary: the tensor's name and the place in it, flat; all different."""

    names: tuple[str, ...]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, tensors: Mapping[str, Tensor]) -> Array:
        """The entries (m,) of tensors of the weights' shapes."""
        pairs = zip(self.names, self.places.tolist(), strict=True)
        return np.array([float(tensors[name].reshape(-1)[place]) for name, place in pairs])

    def masks(
        self, rows: Sequence[int], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """One-hot (B, *shape) of canaries `rows` (B,), for every tensor that any canary has."""
        found = {name: torch.zeros(len(rows), math.prod(shapes[name])) for name in set(self.names)}
        for example, row in enumerate(rows):
            found[self.names[row]][example, int(self.places[row])] = 1.0
        return {name: found[name].view(-1, *shapes[name]) for name in sorted(found)}


def spread_coordinates(model: nn.Module, count: int, seed: int = 0) -> Coordinates:
    """A weight for each of `count` canaries, in every trainable tensor while there are enough.

    Every tensor has its share of the canaries, at least one, so that noise that is missing from
    any of them would be seen.

    Raises:
        UsageError: fewer trainable weights than canaries.
    """
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    total = sum(sizes.values())
    if total < count:
        raise UsageError(
            f"{count} gradient canaries need a weight each, and private training moves {total}",
            hint=f"--canaries {total} or fewer",
        )
    source = np.random.default_rng(seed)
    pairs = [
        (name, place)
        for name, share in _shares(sizes, count).items()
        for place in source.choice(sizes[name], share, replace=False).tolist()
    ]
    order = source.permutation(count).tolist()  # no class of canaries lies in one tensor alone
    return Coordinates(
        tuple(pairs[i][0] for i in order), np.array([pairs[i][1] for i in order], dtype=np.int64)
    )


def _shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Canaries of each tensor: one, then in proportion to its size, never more than it has."""
    shares = dict.fromkeys(sorted(sizes, key=lambda name: -sizes[name])[:count], 1)
    weights = sum(sizes[name] for name in shares)
    left = count - len(shares)
    for name in shares:
        shares[name] += min(sizes[name] - 1, left * sizes[name] // weights)
    for name in shares:  # what rounding left, to the largest that have room
        room = min(sizes[name] - shares[name], count - sum(shares.values()))
        shares[name] += max(0, room)
    return shares


@dataclass(frozen=True)
class Planted:
    """Private codes with the included canaries as further units, told apart by a code of no record.

    `unit`: a power of two above twice the radius; canary i has the code (unit (i + 1), 0, ...),
    which is exact in float32 and lies outside the ball, where no record does.
    """

    data: PrivateCodes
    unit: float

    @classmethod
    def among(cls, data: PrivateCodes, included: Mask, radius: float) -> "Planted":
        """The records of `data`, and after them the included ones of the canaries (m,)."""
        unit = 2.0 ** (math.ceil(math.log2(radius)) + 1)
        rows = torch.from_numpy(np.flatnonzero(included))
        codes = torch.zeros(len(rows), data.codes.shape[1])
        codes[:, 0] = unit * (rows + 1).float()
        sizes = None
        if data.sizes is not None:
            sizes = torch.cat([data.sizes, torch.ones(len(rows), dtype=data.sizes.dtype)])
        labels = torch.cat([data.labels, torch.zeros(len(rows), dtype=data.labels.dtype)])
        return cls(PrivateCodes(torch.cat([data.codes, codes]), labels, sizes), unit)

    def rows(self, z: Tensor) -> Tensor:
        """Which canary each of a batch's codes (B, ...) is, from 0 (B,); -1 for a record."""
        first = z.reshape(len(z), -1)[:, 0]
        return torch.where(first >= self.unit, first / self.unit - 1, -1.0).round().long()


class PlantedClipper(PerExampleClipper):
    """The engine's clipper, for batches among whose units are Dirac canaries.

    Records go through the engine under the flow's loss, canaries through a second one under a loss
    whose gradient is Dirac; both clip to the same C, and their sums add up. What records alone add
    at the canaries' weights is kept, step by step: the adversary knows it.
    """

    def __init__(
        self,
        module: nn.Module,
        planted: Planted,
        coordinates: Coordinates,
        settings: Train,
        *,
        control: Control | None = None,
        engine: EngineSettings = DEFAULT,
    ) -> None:
        """Take the model, who is planted where, and the plan's train stage."""
        self._control, self._planted, self._coordinates = control, planted, coordinates
        self._known: list[Array] = []
        self._dirac = _Dirac(coordinates, module)
        self._canaries = PerExampleClipper(module, self._dirac.losses, settings.clip)
        super().__init__(module, flow_losses, settings.clip, settings=engine)

    def set_clip(self, clip: float) -> None:
        """As of the engine, for both kinds of units; raised out of reach without a clip."""
        bound = clip_bound(self._control, clip)
        self._dirac.steep = STEEP * clip
        self._canaries.set_clip(bound)
        super().set_clip(bound)

    def clipped_sum(self, *batch: Tensor) -> ClippedSum:
        """As of the engine: over records (z, y, t, xi) and canaries together."""
        rows = self._planted.rows(batch[0])
        records = super().clipped_sum(*(part[rows < 0] for part in batch))
        canaries = self._canaries.clipped_sum(rows[rows >= 0])
        self._known.append(self._coordinates.read(records.gradients))
        return ClippedSum(
            {name: total + canaries.gradients[name] for name, total in records.gradients.items()},
            torch.cat([records.norms.double(), canaries.norms.double()]),
            torch.cat([records.losses.double(), canaries.losses.double()]),
        )

    @property
    def known(self) -> Array:
        """What records alone added to each step's sum at the canaries' weights (T, m)."""
        return np.stack(self._known) if self._known else np.zeros((0, len(self._coordinates)))


class _Dirac:
    """Losses (B,) that are steep in one weight each, and flat in all others."""

    def __init__(self, coordinates: Coordinates, module: nn.Module) -> None:
        self._coordinates, self.steep = coordinates, 0.0
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}

    def losses(self, module: nn.Module, rows: Tensor) -> Tensor:
        """`steep` times the weight of each canary (B,)."""
        total = torch.zeros(len(rows))
        for name, mask in self._coordinates.masks(rows.tolist(), self._shapes).items():
            total = total + (mask * _weight(module, name)).flatten(1).sum(1)
        return total * self.steep


def _weight(module: nn.Module, name: str) -> Any:
    """The weight as the module holds it now: inside the engine, the one that it watches."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


class WatchedState(TrainingState):
    """A training state that keeps what each step's noisy sum says at the canaries' weights."""

    def __init__(
        self,
        model: nn.Module,
        settings: Train,
        noise: float,
        *,
        coordinates: Coordinates,
        divisor: float,
    ) -> None:
        """`divisor`: q N, by which a step divides its noisy sum."""
        super().__init__(model, settings, noise)
        self._coordinates, self._divisor = coordinates, divisor
        self._seen: list[Array] = []

    def apply(self, gradients: Mapping[str, Tensor]) -> None:
        """As of the base class; nothing of the step changes."""
        self._seen.append(self._coordinates.read(gradients) * self._divisor)
        super().apply(gradients)

    @property
    def seen(self) -> Array:
        """The noisy sums (T, m) so far."""
        return np.stack(self._seen) if self._seen else np.zeros((0, len(self._coordinates)))
