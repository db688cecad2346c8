"""The steps of one charged chunk of DP-SGD: Poisson batch, clipped sum, noise, optimiser."""

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpsynth.accounting.statistics import BucketedGradientSums
from dpsynth.artifacts.files import storage_error, write_all
from dpsynth.artifacts.lock import Slot
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError
from dpsynth.models.flow import drop_labels, interpolate
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread
from dpsynth.planning.allocation import LATEST
from dpsynth.planning.training import Train
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.engine import GRID, ClippedSum, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.together import gathered
from dpsynth.private.training_state import TrainingState

if TYPE_CHECKING:
    from dpsynth.private.task import Work

NOISE_GRID = 2.0**-30
"""What a noisy sum is rounded to, in standard deviations of its noise."""

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""codes z (B, d), labels y (B,), times t (B, K), flow noise xi (B, K, d).

For units of several images z is (B, K, d) and y (B, K): each of a unit's K draws has an image."""


@dataclass(frozen=True)
class PrivateCodes:
    """Private codes float32 (n, d) on the clip's grid, labels int64 (n,); dies in `train`.

    Of spectral tokens: ids int64 (n, t).

    sizes (u,) int64: images of each unit, side by side; None where each record is a unit.
    captions (n,): where these are free; a label is then a record's own place.
    """

    codes: Tensor
    labels: Tensor
    sizes: Tensor | None = None
    captions: tuple[str, ...] | None = None

    def sampled(
        self, noise: NoiseSource, rate: float, draws: int, source: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Codes and labels of a Poisson batch: every unit by a coin of its own.

        Of a unit of several images, `draws` of them in turn from a random one on: (B, draws, d)
        and (B, draws). Privacy does not rest on which ones (docs/maths/units.md, U9).
        """
        if self.sizes is None:
            chosen = torch.from_numpy(noise.coins(len(self.codes), rate))
            return self.codes[chosen], self.labels[chosen]
        chosen = torch.from_numpy(noise.coins(len(self.sizes), rate))
        sizes, starts = self.sizes[chosen], (self.sizes.cumsum(0) - self.sizes)[chosen]
        first = (torch.rand(sizes.shape, generator=source, dtype=torch.float64) * sizes).long()
        turn = (first[:, None] + torch.arange(draws)) % sizes[:, None]
        images = starts[:, None] + turn
        return self.codes[images], self.labels[images]


def collected(
    chunks: Iterable[UnitCodes], examples_of: Callable[[UnitCodes], Tensor]
) -> PrivateCodes:
    """All units of one chunk or more, in memory; `examples_of`: a chunk's rows (n, ...)."""
    rows, labels, sizes = list[Tensor](), list[Tensor](), list[Tensor]()
    captions: tuple[str, ...] | None = None
    for chunk in chunks:
        rows.append(examples_of(chunk))
        labels.append(torch.from_numpy(chunk.labels))
        if chunk.sizes is not None:
            sizes.append(torch.from_numpy(chunk.sizes))
        if chunk.captions is not None:
            captions = (*(captions or ()), *chunk.captions)
    found = torch.cat(labels) if captions is None else torch.arange(len(captions))
    return PrivateCodes(torch.cat(rows), found, torch.cat(sizes) if sizes else None, captions)


@dataclass(frozen=True)
class Workload:
    """What a step of the flow needs that is declared: nothing comes from the private data."""

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

    def times(self, draws: tuple[int, ...], step: int, source: torch.Generator) -> Tensor:
        """Times of a step's draws: uniform in its bucket, or logit-normal on (0, 1).

        The logit is standard normal (Esser et al. 2024, section 3.1).
        """
        if self.settings.times == "logit-normal":
            return torch.randn(draws, generator=source).sigmoid()
        low, high = self.bucket(step)
        return low + (high - low) * torch.rand(draws, generator=source)

    def batch(
        self,
        data: PrivateCodes,
        *,
        rate: float,
        step: int,
        noise: NoiseSource,
        source: torch.Generator,
    ) -> Batch:
        """A step's batch, see `draw_batch`."""
        return draw_batch(data, self, rate=rate, step=step, noise=noise, source=source)


@one_thread()
def run_chunk(
    slot: Slot,
    data: PrivateCodes,
    work: "Work",
    state: TrainingState,
    *,
    clipper: PerExampleClipper,
    noise: NoiseSource,
    advance: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> list[dict[str, Any]]:
    """Take the slot's steps; every one is taken, also on an empty batch.

    In a slot with a clip for each time bucket every step has its bucket's own, by the statistic
    that was charged; the noise is the same in all of them.

    Call after the slot's charge, in each process of `ranks` with its own shard as `data` and a
    `noise` of its own, of which the main one's alone is added. Returns a line a step, for the
    curator's room alone; [] but in the main process.
    """
    if slot.rate is None or slot.steps is None:
        raise PlanError(f"slot {slot.name} is no training slot: it has no rate or no steps")
    source, first = generator(noise.torch_seed()), state.step + 1
    divisor, std = slot.rate * work.capacity, slot.noise_std
    weights = {name: p.detach() for name, p in state.model.named_parameters() if p.requires_grad}
    seen, clips = list[ClippedSum](), list[float]()
    for number in range(slot.steps):
        if isinstance(slot.statistic, BucketedGradientSums):
            clipper.set_clip(slot.statistic.clip_of(number))
        clips.append(clipper.clip)
        batch = work.batch(data, rate=slot.rate, step=state.step, noise=noise, source=source)
        found = clipper.clipped_sum(*batch)
        total = replace(found, gradients=ranks.sum_on_grid(found.gradients, clipper.clip * GRID))
        noisy = noisy_mean(total, std, divisor, noise) if ranks.is_main else {}  # once on the sum
        state.apply(ranks.spread(noisy, weights))
        seen.append(replace(found, gradients={}))
        advance()
    whole = _of_all(seen, ranks)
    lines = zip(whole, clips, strict=False)  # none of them but in the main process
    return [_line(step, found, clip) for step, (found, clip) in enumerate(lines, start=first)]


def _of_all(seen: list[ClippedSum], ranks: Ranks) -> list[ClippedSum]:
    """Norms and losses of each step over all processes; [] but in the main one."""
    if ranks.world == 1:
        return seen
    norms = gathered([found.norms.double().cpu().numpy() for found in seen], ranks)
    losses = gathered([found.losses.double().cpu().numpy() for found in seen], ranks)
    pairs = zip(norms, losses, strict=True)
    return [ClippedSum({}, torch.from_numpy(n), torch.from_numpy(v)) for n, v in pairs]


def draw_batch(
    data: PrivateCodes,
    work: Workload,
    *,
    rate: float,
    step: int,
    noise: NoiseSource,
    source: torch.Generator,
) -> Batch:
    """A Poisson batch: each unit by a coin of its own; K times and flow noises a unit.

    Coins come from `noise`; times, flow noise and dropped labels, on which privacy does not
    rest, from `source`.
    """
    codes, labels = data.sampled(noise, rate, work.settings.multiplicity, source)
    draws = (len(codes), work.settings.multiplicity)
    t = work.times(draws, step, source)
    xi = torch.randn((*draws, codes.shape[-1]), generator=source)
    return codes, drop_labels(labels, work.settings.label_dropout, work.classes, source), t, xi


def flow_losses(module: nn.Module, z: Tensor, y: Tensor, t: Tensor, xi: Tensor) -> Tensor:
    """One loss a unit (B,): ||v(x_t, t, y) - (z - xi)||^2 / d, averaged over its K draws."""
    codes = z if z.ndim == xi.ndim else z[:, None].expand_as(xi)
    predicted = module(interpolate(codes, xi, t), t, y)
    losses: Tensor = (predicted - (codes - xi)).square().mean(dim=(1, 2))
    return losses


def noisy_mean(
    found: ClippedSum, noise_std: float, divisor: float, noise: NoiseSource
) -> dict[str, Tensor]:
    """(sum + N(0, noise_std^2)) / divisor, float64, every entry's noise drawn afresh.

    The noisy sum is rounded to a power of two near noise_std * NOISE_GRID: post-processing that
    hides the low bits, in which floating-point noise may show what it was added to.
    """
    shapes = {name: tuple(total.shape) for name, total in found.gradients.items()}
    drawn = noise.gaussian_like(shapes, noise_std)
    grid = 2.0 ** math.floor(math.log2(noise_std * NOISE_GRID))
    return {
        name: drawn[name].to(total.device).add_(total).mul_(1 / grid).round_().mul_(grid / divisor)
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
