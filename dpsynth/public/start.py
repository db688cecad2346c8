"""When guided sampling starts: t0 at the edge of a public plateau (StraightDP 4.4, figure 4).

A public rehearsal: Gaussians of public classes stand for the release, and the public prior is
started from their tilted marginal at t0. "Guidance accuracy is flat [...] and public FID degrades
sharply beyond it, so we use the plateau edge." A choice that transfers badly costs utility, never
privacy.

Distances are between features of a small classifier of public codes: a Frechet distance of the
codes themselves compares means and covariances, which the Gaussians have by construction, so that
it could only fall with t0 and would not see that draws become Gaussian.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.models.flow import VelocityField, euler, interpolate
from dpsynth.models.seeding import batches, generator, seeded_initialisation
from dpsynth.models.threads import one_thread
from dpsynth.planning.release import Moments
from dpsynth.planning.schema import Plan
from dpsynth.public.calibrate import class_gaussians, saved_figure
from dpsynth.public.projection import Projection

GRID = tuple(round(0.05 * step, 2) for step in range(1, 13))
DRAWS = 400
"""Codes drawn for each t0: the same Gaussian draws and the same noise for all of them."""
MOST_PUBLIC = 8_000
TOLERANCE = 0.05
NOISES = 2.0
"""A plateau may rise by 5% of its lowest point, or by two deviations of public resamples."""
RESAMPLES = 12
_HIDDEN, _FEATURES = 128, 32
_FITTING, _BATCH, _RATE = 400, 256, 2e-3


@dataclass(frozen=True)
class StartCurve:
    """What was measured at each t0: all of public data and of draws that start from it.

    `accuracy`: share of draws that the public classifier takes for the label that was asked for;
    `frechet`: Frechet distance of features of draws and of public codes, labels as public codes
    have them; `noise`: standard deviation of that distance over resamples of public codes of the
    same size; `codes`: the distance of the codes, for comparison alone.
    """

    t: tuple[float, ...]
    accuracy: tuple[float, ...]
    frechet: tuple[float, ...]
    codes: tuple[float, ...]
    noise: float

    def to_json(self) -> dict[str, Any]:
        """Plain values for `calibration.json`."""
        lists = {k: [round(v, 6) for v in getattr(self, k)] for k in ("accuracy", "frechet")}
        rest = {"codes": [round(v, 6) for v in self.codes], "noise": round(self.noise, 6)}
        return {"t": list(self.t), **lists, **rest}


def plateau_edge(t: NDArray[np.float64], frechet: NDArray[np.float64], noise: float = 0.0) -> float:
    """The largest t up to which the distance stays within a tolerance of the best before it.

    Going up the grid, the plateau ends before the first t with

        F(t) > best + max(TOLERANCE best, NOISES noise),   best = min of F over smaller t.

    What comes back within the tolerance later is not of the plateau. A distance that never rises
    has its edge at the end.

    >>> plateau_edge(np.array([0.1, 0.2, 0.3, 0.4]), np.array([10.0, 10.2, 14.0, 10.0]))
    0.2
    """
    best = float(frechet[0])
    for before, value in enumerate(frechet[1:].tolist()):
        if value > best + max(TOLERANCE * best, NOISES * noise):
            return float(t[before])
        best = min(best, value)
    return float(t[-1])


class _Classifier(nn.Module):
    """Public class of a code: two hidden layers, of which the second holds the features."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(dim, _HIDDEN), nn.SiLU(), nn.Linear(_HIDDEN, _FEATURES), nn.SiLU()
        )
        self.head = nn.Linear(_FEATURES, classes)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits (n, classes) of codes (n, d)."""
        logits: Tensor = self.head(self.body(codes))
        return logits

    @torch.no_grad()
    def features(self, codes: Tensor) -> Tensor:
        """Features (n, 32) float64 of codes (n, d)."""
        features: Tensor = self.body(codes).double()
        return features


def fit_classifier(codes: Tensor, labels: Tensor, classes: int, seed: int) -> _Classifier:
    """A classifier of public codes (n, d) with labels (n,) in [0, classes), in eval mode."""
    source = generator(seed)
    with seeded_initialisation(seed):
        model = _Classifier(codes.shape[1], classes)
    optimiser = torch.optim.AdamW(model.parameters(), lr=_RATE)
    steps = 0
    while steps < _FITTING:
        for chosen in batches(len(codes), _BATCH, source):
            optimiser.zero_grad()
            functional.cross_entropy(model(codes[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps += 1
            if steps == _FITTING:
                break
    return copy.deepcopy(model).eval().requires_grad_(False)


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What guided sampling is rehearsed with: public values alone.

    codes (n, d) and labels (n,) in [0, conditions), as the prior was taught them; drawn (m, d):
    draws of the public moment model, with the labels asked (m,) they were drawn for; `prior` and
    the sampler's steps and guidance.
    """

    codes: Tensor
    labels: Tensor
    drawn: Tensor
    asked: Tensor
    prior: VelocityField
    conditions: int
    steps: int
    guidance: float


@one_thread()
def start_curve(given: Rehearsal, *, seed: int) -> StartCurve:
    """Start the prior at each t0 of the grid, and measure what it ends at."""
    source = generator(seed)
    chosen = torch.randperm(len(given.codes), generator=source)[:MOST_PUBLIC]
    codes, labels = given.codes[chosen], given.labels[chosen]
    classifier = fit_classifier(codes, labels, given.conditions, seed)
    known = classifier.features(codes)
    noise = torch.randn(given.drawn.shape, generator=source)
    found: list[tuple[float, float, float]] = []
    for t0 in GRID:
        start = interpolate(given.drawn, noise, torch.full(given.asked.shape, t0))
        ended = euler(
            given.prior,
            start,
            given.asked,
            null=given.conditions,
            steps=given.steps,
            guidance=given.guidance,
            start_time=t0,
        )
        right = (classifier(ended).argmax(1) == given.asked).double().mean()
        measured = classifier.features(ended)
        found.append((float(right), frechet(measured, known), frechet(ended.double(), codes)))
    accuracy, distance, plain = zip(*found, strict=True)
    return StartCurve(GRID, accuracy, distance, plain, _noise(known, len(ended), source))


def _noise(known: Tensor, size: int, source: torch.Generator) -> float:
    """Spread of the distance of as many public codes as there are draws, over resamples."""
    resamples = [
        frechet(known[torch.randint(len(known), (size,), generator=source)], known)
        for _ in range(RESAMPLES)
    ]
    return float(np.std(resamples, ddof=1))


def frechet(first: Tensor, second: Tensor) -> float:
    """||m1 - m2||^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of points (n, d) and (m, d), in float64.

    Heusel et al. (2017), equation 6; the root's trace from the singular values of C2^(1/2)
    C1^(1/2), so that neither covariance need have full rank.

    >>> points = torch.randn(200, 3, generator=generator(0))
    >>> round(frechet(points, points + torch.tensor([3.0, 0.0, 4.0])), 4)
    25.0
    """
    first, second = first.double(), second.double()
    gap = first.mean(0) - second.mean(0)
    roots = []
    for points in (first, second):
        centred = (points - points.mean(0)) / max(1, len(points) - 1) ** 0.5
        values, basis = torch.linalg.eigh(centred.T @ centred)
        roots.append((basis * values.clamp_min(0).sqrt()) @ basis.T)
    traces = sum(float(root.square().sum()) for root in roots)
    cross = float(torch.linalg.svdvals(roots[0] @ roots[1]).sum())
    return max(float(gap @ gap) + traces - 2 * cross, 0.0)


def plot_start(curve: StartCurve, t0: float, path: Path) -> None:
    """Draw both curves with the chosen start as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(curve.t, curve.frechet, marker="o", label="Frechet distance (features)")
    axes.axvline(t0, color="black", linewidth=0.8, linestyle=":", label=f"t0 = {t0:g}")
    axes.set(xlabel="guidance start t0", ylabel="Frechet distance", title="public data")
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.plot(curve.t, curve.accuracy, color="tab:orange", marker="s", label="guidance accuracy")
    other.set(ylabel="accuracy", ylim=(0, 1.02))
    lines = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    names = [str(line.get_label()) for line in lines]
    figure.legend(lines, names, loc="outside lower center", ncols=3, fontsize="small")
    saved_figure(figure, path)


def public_draws(
    codes: Tensor,
    labels: Tensor,
    settings: Moments,
    projection: Projection | None,
    source: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """DRAWS codes (m, d) float32 of the public moment model, and the labels (m,) they are of.

    One Gaussian for each label that public codes (n, d) have, as the plan would estimate it from
    a release without noise; labels in turn, in an order of chance where there are more than draws.
    """
    present, own = torch.unique(labels, return_inverse=True)
    features = codes if projection is None else projection.project(codes)
    _, means, covariances = class_gaussians(
        features,
        own,
        shared=settings.covariance != "class",
        rank=settings.rank,
        floor=settings.floor,
    )
    order = torch.randperm(len(present), generator=source)
    chosen = order[torch.arange(DRAWS) % len(present)]
    values, basis = torch.linalg.eigh(covariances)
    roots = basis * values.clamp_min(0).sqrt()[:, None]
    normal = torch.randn(DRAWS, means.shape[1], generator=source, dtype=torch.float64)
    drawn = means[chosen].clone()
    for component in set(chosen.tolist()):
        rows = (chosen == component).nonzero()[:, 0]
        drawn[rows] += normal[rows] @ roots[component % len(roots)].T
    if projection is not None:
        rest = torch.randn(DRAWS, codes.shape[1], generator=source, dtype=torch.float64)
        drawn = projection.lift(drawn) + projection.fill(rest)
    return drawn.float(), present[chosen]


def uses_plateau(plan: Plan) -> bool:
    """Whether the plan guides its samples from a start that public data choose."""
    return plan.sampling.method == "guide" and plan.sampling.start == "plateau"


def start_facts(
    plan: Plan,
    codes: Tensor,
    labels: Tensor,
    projection: Projection | None,
    *,
    prior: VelocityField,
    path: Path,
) -> dict[str, Any]:
    """Rehearse, plot into `path`, and say what `calibration.json` keeps as `start`.

    codes (n, d) and labels (n,) are public; labels are taken modulo the plan's conditions, as the
    prior was taught them. t0 is the plateau edge of the Frechet distance.
    """
    conditions, seed = plan.private.conditions, plan.public_seed + 6
    settings = plan.stages.moments or Moments(covariance="shared")
    own = labels % conditions
    drawn, asked = public_draws(codes, own, settings, projection, generator(seed))
    sampling = plan.sampling
    rehearsal = Rehearsal(
        codes, own, drawn, asked, prior, conditions, sampling.steps, sampling.guidance
    )
    curve = start_curve(rehearsal, seed=seed)
    t0 = plateau_edge(np.array(curve.t), np.array(curve.frechet), curve.noise)
    plot_start(curve, t0, path)
    return {"t0": t0, "curve": curve.to_json()}
