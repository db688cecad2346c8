"""What private training asks of the thing that it trains: one small interface, two kinds of it.

A task knows its model, its loss, how private units become examples and what is written at the end.
It never clips, adds noise or charges: `dpsgd` and `steps` do that, the same for every task.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpsynth.private.coding import CodeSpace
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.engine import Losses
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes


class Work(Protocol):
    """What a step needs that is declared, and how it makes a batch of it and private units."""

    @property
    def capacity(self) -> int:
        """N, the declared number of units."""

    def batch(
        self,
        data: PrivateCodes,
        *,
        rate: float,
        step: int,
        noise: NoiseSource,
        source: torch.Generator,
    ) -> tuple[Tensor, ...]:
        """Tensors (B, ...) of a Poisson batch, one row a unit, as the task's losses take them.

        Each unit is in by a coin of its own from `noise`, at `rate`; whatever privacy does not
        rest on comes from `source`. `step` counts from 0.
        """


class Task(Protocol):
    """One thing to train privately: the flow (`flow_task`) or spectral tokens (`token_task`)."""

    @property
    def space(self) -> CodeSpace:
        """What private records are encoded with, each by itself."""

    @property
    def model(self) -> nn.Module:
        """The start weights, from public or released files; trainable is what steps move."""

    @property
    def losses(self) -> Losses:
        """One loss a unit, (B,), of the model and a batch, whatever its draws or images are."""

    @property
    def work(self) -> Work:
        """How batches are made. Ask after `take`: free captions become part of it."""

    @property
    def facts(self) -> dict[str, str]:
        """What a checkpoint says beside its weights, for closing a run without torch."""

    def take(self, chunks: Iterable[UnitCodes]) -> PrivateCodes:
        """Private units in memory; from now on labels mean these records' captions, if free."""

    def trial(self) -> tuple[Tensor, ...] | None:
        """A batch without private numbers, to see before a charge that the engine takes the model.

        None where the model is dpsynth's own, which its tests have shown.
        """

    def save(self, model: nn.Module, path: Path) -> None:
        """Write `model`, the average of trained weights, as the run releases it. The last call."""

    def report(self) -> dict[str, Any]:
        """What the command says of the training beside its steps: declared or released facts."""
