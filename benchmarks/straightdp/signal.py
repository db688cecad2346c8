"""`--signal`: what a gradient stage could gain on a stronger release, and what its noise hides.

MNIST is public, so nothing here is noised: velocity MLPs of three widths are distilled from the
exact class Gaussians of the latent codes, as after a release without noise.

1. The ceiling: Frechet distance and accuracy of the distilled model, and after training on the
   codes themselves without privacy.
2. The signal: per-record gradients of the distilled model at clip 1 for K noise draws. With g_i a
   clipped gradient and m the mean of n of them, E|m|^2 = |E g|^2 + tr Cov(g) / n, so that

       |E g|^2 ~ (n |m|^2 - mean |g_i|^2) / (n - 1)

   is the squared length of what all records agree on.
3. The noise in the same units: a whole run of T steps adds sigma sqrt(P) / (q N sqrt(T)) to the
   average of its T mean gradients of P weights.
"""

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.straightdp.plans import CAPACITY, plan_of
from benchmarks.straightdp.rows import LATENT
from benchmarks.straightdp.runs import Runs
from benchmarks.straightdp.score import Judge, real
from benchmarks.straightdp.sizes import SIZES
from dpsynth.artifacts.rooms import RunDir
from dpsynth.models.flow import drop_labels, euler, flow_loss
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.allocation import LATEST
from dpsynth.planning.calibrated import calibrate, composition_delta
from dpsynth.planning.schema import Plan
from dpsynth.planning.training import Distillation
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.steps import flow_losses
from dpsynth.public.representation import Representation, load_representation
from dpsynth.released.distill import teach
from dpsynth.released.estimate import ClassGaussians, as_mixtures
from dpsynth.released.gaussians import ReleasedMixture

WIDTHS, DEPTH = (32, 96, 256), 3
DRAWS = (1, 4, 16, 64)
EPSILONS = (1.0, 3.0)
TAU = 0.25
"""Where private training begins in the tables' latent rows."""
PROBED, PASSES = 600, 4_800  # records, and most record-draws at a time
DISTIL = Distillation(steps=3_000, batch=256, learning_rate=2e-3, horizon=1.0)
TRAIN_STEPS, TRAIN_BATCH, TRAIN_RATE, DROPOUT, EMA = 3_000, 512, 1e-3, 0.1, 0.998
SAMPLES, EULER_STEPS = 10_000, 25


def main(runs: Runs, widths: tuple[int, ...] = WIDTHS) -> None:
    """Measure every width that is not measured yet; print, and write `signal.json`."""
    path = runs.work / "signal.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    bench = None
    for width in widths:
        if str(width) in found:
            continue
        bench = bench or Bench.of(runs)
        found[str(width)] = measured(bench, width)
        path.write_text(json.dumps(found, indent=1))
    show([found[str(width)] for width in widths], runs)


class Bench:
    """Latent codes of real digits, the exact Gaussians of their classes, and the judge."""

    def __init__(self, representation: Representation, judge: Judge, work: Path) -> None:
        images, labels = real("mnist", "train", work)
        codes = representation.encode(images)
        lengths = codes.norm(dim=1, keepdim=True)
        self.codes = codes * (representation.radius / lengths).clamp(max=1.0)
        self.labels = torch.from_numpy(labels)
        self.mixture = gaussians(self.codes, self.labels)
        self.representation, self.judge = representation, judge

    @classmethod
    def of(cls, runs: Runs) -> "Bench":
        """The code space of the tables' latent rows, and their judge."""
        plan = Plan.model_validate(plan_of(LATENT[0], 1.0, runs.work, size=runs.size))
        representation = load_representation(RunDir(runs.room(LATENT[0])), plan)
        return cls(representation, Judge.kept(runs.work), runs.work)

    def score(self, model: nn.Module, seed: int = 5) -> dict[str, float]:
        """Accuracy and Frechet distance of samples without guidance."""
        labels = torch.arange(SAMPLES) % 10
        start = torch.randn(SAMPLES, self.codes.shape[1], generator=generator(seed))
        parts = zip(start.split(500), labels.split(500), strict=True)
        drawn = [euler(model, x, y, null=10, steps=EULER_STEPS, guidance=1.0) for x, y in parts]
        images = self.representation.decode(torch.cat(drawn))
        return self.judge.score(images, labels.numpy(), whole=False)


def gaussians(codes: Tensor, labels: Tensor) -> ReleasedMixture:
    """The exact moments of each class, as a release without noise would have them."""
    parts = [codes[labels == y].double().numpy() for y in range(10)]
    shares = np.array([len(part) for part in parts]) / len(codes)
    means = np.stack([part.mean(0) for part in parts])
    floor = 1e-3 * np.eye(codes.shape[1])
    covariances = np.stack([np.cov(part, rowvar=False) + floor for part in parts])
    return ReleasedMixture(as_mixtures(ClassGaussians(shares, means, covariances)))


def measured(bench: Bench, width: int) -> dict[str, Any]:
    """Ceiling and signal of one width."""
    settings = Velocity(kind="mlp", width=width, depth=DEPTH)
    with seeded_initialisation(0):
        model = build_velocity(settings, bench.codes.shape[1], 10)
    taught = teach(model, model, bench.mixture, DISTIL, horizon=1.0, source=generator(1))
    trained = trained_on(taught, bench.codes, bench.labels)
    return {
        "width": width,
        "weights": sum(p.numel() for p in taught.parameters()),
        "distilled": bench.score(taught),
        "not private": bench.score(trained),
        "signal": {str(draws): signal_of(bench, taught, draws) for draws in DRAWS},
    }


def trained_on(model: nn.Module, codes: Tensor, labels: Tensor) -> nn.Module:
    """The EMA of `model` after Adam on the flow loss of the codes: no clip, no noise."""
    student, averaged, source = deepcopy(model).train(), deepcopy(model), generator(2)
    optimiser = torch.optim.Adam(student.parameters(), TRAIN_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, TRAIN_STEPS)
    for step in range(TRAIN_STEPS):
        chosen = torch.randint(len(codes), (TRAIN_BATCH,), generator=source)
        dropped = drop_labels(labels[chosen], DROPOUT, 10, source)
        optimiser.zero_grad()
        torch.autograd.backward(flow_loss(student, codes[chosen], dropped, generator=source))
        optimiser.step()
        schedule.step()
        decay = min(EMA, (step + 1) / (step + 10))
        with torch.no_grad():
            for mean, value in zip(averaged.parameters(), student.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
    return averaged.eval()


def signal_of(bench: Bench, model: nn.Module, draws: int) -> dict[str, float]:
    """Median norm of per-record gradients; length of the mean clipped one, its error removed."""
    total, norms = torch.zeros(()), list[Tensor]()
    with PerExampleClipper(model, flow_losses, 1.0) as clipper:
        for batch in batches(bench, draws):
            found = clipper.clipped_sum(*batch)
            total = total + torch.cat([part.flatten() for part in found.gradients.values()])
            norms.append(found.norms)
    lengths = torch.cat(norms)
    squares = float(lengths.clamp(max=1.0).square().mean())
    return {
        "norm median": float(lengths.median()),
        "agreed": agreed(float(total.norm()) / len(lengths), squares, len(lengths)),
    }


def batches(bench: Bench, draws: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Batches (z, y, t, xi) of the probed records: K draws each, t uniform from tau on."""
    source = generator(3)  # the same records for every K and width
    chosen = torch.randperm(len(bench.codes), generator=source)[:PROBED]
    for part in chosen.split(max(8, PASSES // draws)):
        t = TAU + (LATEST - TAU) * torch.rand(len(part), draws, generator=source)
        xi = torch.randn(len(part), draws, bench.codes.shape[1], generator=source)
        yield bench.codes[part], bench.labels[part], t, xi


def agreed(mean: float, squares: float, count: int) -> float:
    """Length of the expectation, from that of a mean of `count` vectors and their mean square.

    >>> agreed(0.1, 1.0, 100), round(agreed(0.2, 1.0, 101), 4)
    (0.0, 0.1744)
    """
    return math.sqrt(max(0.0, (count * mean * mean - squares) / (count - 1)))


def noise_of(weights: int, epsilon: float, size: str) -> float:
    """The noise of a whole DP-SGD run at clip 1, in units of the mean clipped gradient.

    A run that spends all of epsilon on the steps that the size's latent rows take.
    """
    own = SIZES[size]["latent"]
    divisor = own.rate * CAPACITY * math.sqrt(own.steps)
    return multiplier(epsilon, size) * math.sqrt(weights) / divisor


@cache
def multiplier(epsilon: float, size: str) -> float:
    """The noise multiplier of the size's latent rows without a release."""
    plan = Plan.model_validate(plan_of(LATENT[0], epsilon, Path("/nowhere"), size=size))
    return calibrate(plan, composition_delta(plan)[0]).multipliers["train"]


def show(found: list[dict[str, Any]], runs: Runs) -> None:
    """Print both tables."""
    from dpsynth.console import render, table

    names = ("distilled", "not private")
    ceilings = [
        (
            one["width"],
            one["weights"],
            name,
            f"{one[name]['accuracy']:.3f}",
            f"{one[name]['fd']:.1f}",
        )
        for one in found
        for name in names
    ]
    columns = ("width", "weights", "model", "accuracy", "FD")
    render(table(columns, ceilings, title="Latent velocity MLPs, exact class Gaussians"))
    lines = []
    for one in found:
        noise = [f"{noise_of(one['weights'], epsilon, runs.size):.2f}" for epsilon in EPSILONS]
        for draws, own in one["signal"].items():
            cells = (f"{own['norm median']:.2f}", f"{own['agreed']:.4f}")
            lines.append((one["width"], draws, *cells, *noise))
    columns = ("width", "draws", "gradient norm", "|mean of clipped|",
               *(f"noise at epsilon {epsilon:g}" for epsilon in EPSILONS))  # fmt: skip
    render(
        table(columns, lines, title="What records agree on, and the noise of a whole run (C = 1)")
    )
