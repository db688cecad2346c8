"""The steps of one charged chunk of DP-SGD: Poisson batch, clipped sum, noise, Adam."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsynth.artifacts.files import storage_error, write_all
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError
from dpsynth.models.flow import drop_labels, interpolate
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread
from dpsynth.planning.schema import Train
from dpsynth.private.clipping import ClippedSum, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.training_state import TrainingState

LATEST = 1 - 1e-3
"""End of the last time bucket: at t = 1 only the noise of the target is left to learn."""

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""codes z (B, d), labels y (B,), times t (B, K), flow noise xi (B, K, d)."""


@dataclass(frozen=True)
class PrivateCodes:
    """Private codes float32 (n, d) on the clip's grid, labels int64 (n,); dies in `train`."""

    codes: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Workload:
    """What a step needs that is declared: nothing here comes from the private data."""

    settings: Train
    capacity: int
    classes: int
    low: float

    def bucket(self, step: int) -> tuple[float, float]:
        """Time interval of step `step` (from 0): equal buckets on [low, LATEST], in turn.

        >>> work = Workload(Train(rate=0.1, steps=9, buckets=3), 100, 10, 0.099)
        >>> [tuple(round(edge, 3) for edge in work.bucket(step)) for step in (0, 2, 3)]
        [(0.099, 0.399), (0.699, 0.999), (0.099, 0.399)]
        """
        width = (LATEST - self.low) / self.settings.buckets
        index = step % self.settings.buckets
        return self.low + index * width, self.low + (index + 1) * width


@one_thread()
def run_chunk(
    slot: Slot,
    data: PrivateCodes,
    work: Workload,
    state: TrainingState,
    *,
    clipper: PerExampleClipper,
    noise: NoiseSource,
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Take the slot's steps; every one is taken, also on an empty batch.

    Call after the slot's charge. Returns a line a step for the curator's room alone.
    """
    if slot.rate is None or slot.steps is None:
        raise PlanError(f"slot {slot.name} is no training slot: it has no rate or no steps")
    source = generator(noise.torch_seed())
    log = []
    for _ in range(slot.steps):
        batch = draw_batch(data, work, rate=slot.rate, step=state.step, noise=noise, source=source)
        found = clipper.clipped_sum(*batch)
        state.apply(noisy_mean(found, slot.noise_std, slot.rate * work.capacity, noise))
        log.append(_line(state.step, found, clipper.clip))
        advance()
    return log


def draw_batch(
    data: PrivateCodes,
    work: Workload,
    *,
    rate: float,
    step: int,
    noise: NoiseSource,
    source: torch.Generator,
) -> Batch:
    """A Poisson batch: each record by a coin of its own; K times and flow noises a record.

    Coins come from `noise`; times, flow noise and dropped labels, on which privacy does not
    rest, from `source`.
    """
    chosen = torch.from_numpy(noise.coins(len(data.codes), rate))
    codes, labels = data.codes[chosen], data.labels[chosen]
    draws = (len(codes), work.settings.multiplicity)
    low, high = work.bucket(step)
    t = low + (high - low) * torch.rand(draws, generator=source)
    xi = torch.randn((*draws, codes.shape[1]), generator=source)
    return codes, drop_labels(labels, work.settings.label_dropout, work.classes, source), t, xi


def flow_losses(module: nn.Module, z: Tensor, y: Tensor, t: Tensor, xi: Tensor) -> Tensor:
    """One loss a record (B,): ||v(x_t, t, y) - (z - xi)||^2 / d, averaged over its K draws."""
    codes = z[:, None].expand_as(xi)
    predicted = module(interpolate(codes, xi, t), t, y)
    losses: Tensor = (predicted - (codes - xi)).square().mean(dim=(1, 2))
    return losses


def noisy_mean(
    found: ClippedSum, noise_std: float, divisor: float, noise: NoiseSource
) -> dict[str, Tensor]:
    """(sum + N(0, noise_std^2)) / divisor, float64, every entry's noise drawn afresh."""
    return {
        name: (total + torch.from_numpy(noise.gaussian(tuple(total.shape), noise_std))) / divisor
        for name, total in found.gradients.items()
    }


def append_log(path: Path, lines: list[dict[str, Any]]) -> None:
    """Append diagnostics to a file of the curator's room, readable by its owner alone."""
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            write_all(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(path, error) from error


def _line(step: int, found: ClippedSum, clip: float) -> dict[str, Any]:
    finite = found.norms.isfinite()
    norms, losses = found.norms[finite], found.losses[finite]
    none = len(norms) == 0
    return {
        "step": step,
        "batch": len(found.norms),
        "not_finite": int((~finite).sum()),
        "loss": None if none else float(losses.double().mean()),
        "norm_median": None if none else float(norms.median()),
        "clipped": None if none else float((norms > clip).double().mean()),
    }
