"""What public codes say of each time bucket: the profile that the planner shapes clips by.

StraightDP, section 3.2 and appendix B.5, figure 2b; derivations in docs/maths/planner.md. A
profile that transfers badly costs utility, never privacy: every plan made of it is composed.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.accounting.trace import midpoints, posterior_trace, velocity_trace
from dpsynth.models.trainable import train_only
from dpsynth.models.velocity import load_for
from dpsynth.planning.allocation import Profile, bucket_edges, clips_of, trains_from
from dpsynth.planning.schema import Plan
from dpsynth.public.calibrate import saved_figure

PROFILE_PLOT = "allocation.png"
_VERSION = 1
_CURVE = 400
_LEAST = 1e-12  # of an eigenvalue: what rounding leaves of a direction without variance


def uses_profile(plan: Plan) -> bool:
    """Whether the plan's time buckets have clips of their own: only then is a profile made."""
    return plan.stages.train is not None and plan.stages.train.allocation is not None


def profile_recipe(plan: Plan) -> list[Any]:
    """Settings that decide the profile beside the calibration's own; [] for plans without one."""
    train = plan.stages.train
    if train is None or train.allocation is None:
        return []
    taught = plan.distillation
    reach = None if taught is None else [taught.horizon, taught.cap]
    return ["profile", _VERSION, train.buckets, list(train.allocation.family), reach,
            train.parameters]  # fmt: skip


def profile_facts(
    plan: Plan, codes: Tensor, labels: Tensor, tau: float, *, prior: Path, room: Path
) -> dict[str, Any]:
    """The calibration's `profile` of public codes (n, d) with labels (n,); the plot goes to `room`.

    Buckets begin where private training will; the loss weighting w(t) is 1, that of the flow loss.
    Covariances are those of public classes, or their average where the plan's release has one, in
    all directions: what a truncated release leaves out is for training to learn.
    """
    train, moments = plan.stages.train, plan.stages.moments
    assert train is not None
    shared = moments is None or moments.covariance != "class"
    weights, spectra = class_spectra(codes, labels, shared=shared)
    edges = bucket_edges(trains_from(plan.distillation, tau), train.buckets)
    times = [midpoints(a, b) for a, b in pairwise(edges)]
    profile = Profile(
        tau=tau,
        edges=edges,
        variance=tuple(float(posterior_trace(t, weights, spectra).mean()) for t in times),
        weight=(1.0,) * train.buckets,
        importance=tuple(float(velocity_trace(t, weights, spectra).mean()) for t in times),
        weights=_trained_weights(plan, prior),
    )
    plot_shapes(plan, profile, weights, spectra, room / PROFILE_PLOT)
    return profile.to_json()


def class_spectra(
    codes: Tensor, labels: Tensor, *, shared: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shares (Y,) of the classes and eigenvalues (Y, d) of their covariances, (1, d) if `shared`.

    Codes (n, d), labels (n,); classes without codes are left out.
    """
    groups = [codes[labels == y].double() for y in torch.unique(labels).tolist()]
    weights = np.array([len(group) for group in groups]) / len(codes)
    dim, spectra = codes.shape[1], []
    pooled = torch.zeros(dim, dim, dtype=torch.float64)
    for group, weight in zip(groups, weights, strict=True):
        residuals = group - group.mean(0)
        covariance = residuals.T @ residuals / len(group)
        if shared:
            pooled += float(weight) * covariance
        else:
            spectra.append(_spectrum(covariance))
    return weights, np.stack([_spectrum(pooled)] if shared else spectra)


def _spectrum(covariance: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = torch.linalg.eigvalsh(covariance).clamp_min(_LEAST).numpy()
    return found


def _trained_weights(plan: Plan, prior: Path) -> int:
    """How many weights private training moves."""
    model, _ = load_for(prior, plan)
    if plan.stages.train is not None:
        train_only(model, plan.stages.train.parameters)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def plot_shapes(
    plan: Plan,
    profile: Profile,
    weights: NDArray[np.float64],
    spectra: NDArray[np.float64],
    path: Path,
) -> None:
    """Draw the shape family over t and what it is in each bucket, as a PNG (figure 2b)."""
    from matplotlib.figure import Figure

    settings = plan.stages.train
    family = settings.allocation.family if settings and settings.allocation else (0.0,)
    t = np.linspace(profile.edges[0], profile.edges[-1], _CURVE)
    curve = np.sqrt(velocity_trace(t, weights, spectra) / np.mean(profile.importance))
    figure = Figure(figsize=(5.5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for beta in family:
        clips = clips_of(profile, beta, 1.0)
        (line,) = axes.plot(t, curve**beta, linewidth=0.8)
        axes.stairs(clips, profile.edges, color=line.get_color(), label=f"beta = {beta:g}",
                    linewidth=2, baseline=None)  # fmt: skip
    axes.set(xlabel="t", ylabel="clip / reference", title="public data", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(title="thin: before buckets")
    saved_figure(figure, path)
