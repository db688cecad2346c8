"""Calibrations on public codes: the clip radius, and tau by the cosine knee (StraightDP, 3.1).

Both cost utility when they transfer badly, never privacy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import write_atomic
from dpsynth.models.field import AnalyticField
from dpsynth.models.lifted import LiftedField
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread

GRID = tuple(round(0.05 * step, 2) for step in range(1, 20))
PROBES = 256
POINTS = 2_000
LEAST = 50
_NUMBERS = 2**23


@dataclass(frozen=True)
class TauCurve:
    """Mean cosines between the moment model's field and the empirical one, at times `t`.

    `conditional` is the worst class's; `worst` the smaller of it and `unconditional`; `weighted`
    the time average of `worst` over [0, t], which is what the knee is read from.
    """

    t: tuple[float, ...]
    unconditional: tuple[float, ...]
    conditional: tuple[float, ...]
    worst: tuple[float, ...]
    weighted: tuple[float, ...]

    def to_json(self) -> dict[str, list[float]]:
        """Plain lists for `calibration.json`."""
        return {key: [round(v, 6) for v in values] for key, values in vars(self).items()}


def clip_radius(codes: Tensor, quantile: float) -> float:
    """The clip radius R: this quantile of the norms of public codes (n, d)."""
    return float(np.quantile(code_norms(codes), quantile))


def code_norms(codes: Tensor) -> NDArray[np.float64]:
    """The norm (n,) of each of codes (n, d)."""
    norms = [part.double().norm(dim=1) for part in torch.split(codes, _rows(codes))]
    found: NDArray[np.float64] = torch.cat(norms).numpy()
    return found


def _rows(codes: Tensor) -> int:
    """Rows to take at once: 2^23 numbers, at least one row."""
    return max(1, _NUMBERS // max(1, codes.shape[1]))


def class_gaussians(
    codes: Tensor, labels: Tensor, *, shared: bool, rank: int | None, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (Y,), means (Y, d), covariances (Y or 1, d, d) of public codes, all float64.

    Eigenvalues past `rank` and below `floor` become `floor`, as in the private estimate.
    """
    classes = int(labels.max()) + 1
    groups = [codes[labels == y].double() for y in range(classes)]
    weights = torch.tensor([len(group) for group in groups], dtype=torch.float64) / len(codes)
    means = torch.stack([group.mean(0) for group in groups])
    each = torch.stack(
        [
            (group - mean).T @ (group - mean) / len(group)
            for group, mean in zip(groups, means, strict=True)
        ]
    )
    if shared:
        each = (weights[:, None, None] * each).sum(0, keepdim=True)
    values, vectors = torch.linalg.eigh(each)  # ascending
    if rank is not None and rank < values.shape[-1]:
        values[:, :-rank] = floor
    return weights, means, (vectors * values.clamp_min(floor)[:, None]) @ vectors.mT


def empirical_velocity(points: Tensor, x: Tensor, t: float) -> Tensor:
    """Velocity (B, d) at x (B, d) of the flow whose data are `points` (n, d) themselves.

    Remark B.5 at h -> 0: E[z | x_t = x] weighs the points by exp(-|x - t z|^2 / (2 (1 - t)^2)),
    and v = (E[z | x_t = x] - x) / (1 - t) by equation 2.
    """
    distance = torch.cdist(x, t * points).square()
    weights = torch.softmax(-distance / (2.0 * (1.0 - t) ** 2), dim=1)
    return (weights @ points - x) / (1.0 - t)


@one_thread()
def tau_curve(
    codes: Tensor, labels: Tensor, field: AnalyticField | LiftedField, *, seed: int
) -> TauCurve:
    """Compare `field`, fitted to public codes (n, d) with labels (n,), with the empirical field.

    Points x_t = (1 - t) xi + t z start from public codes z of the compared class.
    """
    source = generator(seed)
    conditional: list[list[float]] = []
    for label in range(int(labels.max()) + 1):
        own = codes[labels == label]
        if len(own) >= LEAST:
            conditional.append(_cosines(_draw(own, source), field, label, source))
    unconditional = _cosines(_draw(codes, source), field, None, source)
    worst_class = np.min(np.array(conditional or [unconditional]), axis=0)
    worst = np.minimum(worst_class, np.array(unconditional))
    return TauCurve(
        GRID,
        tuple(unconditional),
        tuple(float(v) for v in worst_class),
        tuple(float(v) for v in worst),
        tuple(time_weighted(np.array(GRID), worst).tolist()),
    )


def time_weighted(t: NDArray[np.float64], cosine: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average of the cosine over [0, t], by trapezes; at t = 0 the fields agree (equation 2).

    >>> time_weighted(np.array([0.5, 1.0]), np.array([1.0, 0.0])).tolist()
    [1.0, 0.75]
    """
    times, values = np.concatenate([[0.0], t]), np.concatenate([[cosine[0]], cosine])
    areas = np.cumsum(np.diff(times) * (values[1:] + values[:-1]) / 2.0)
    average: NDArray[np.float64] = areas / t
    return average


def knee(t: NDArray[np.float64], curve: NDArray[np.float64]) -> float:
    """The time at which a falling curve leaves its plateau: the knee tau.

    Both axes are scaled to [0, 1]; the knee is the point furthest above the chord from the first
    point to the last (Satopaa et al. 2011). A curve that does not fall has its knee at the end.

    >>> knee(np.array([0.0, 0.25, 0.5, 0.75, 1.0]), np.array([1.0, 1.0, 0.7, 0.4, 0.1]))
    0.25
    """
    drop = curve[0] - curve[-1]
    if drop <= 1e-3:
        return float(t[-1])
    across = (t - t[0]) / (t[-1] - t[0])
    return float(t[int(np.argmax((curve - curve[-1]) / drop - (1.0 - across)))])


def plot_tau(curve: TauCurve, tau: float, path: Path) -> None:
    """Draw the curve with the chosen horizon as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for name in ("unconditional", "conditional", "weighted"):
        label = "worst class" if name == "conditional" else name.replace("weighted", "time average")
        axes.plot(curve.t, getattr(curve, name), label=label)
    axes.axvline(tau, color="black", linewidth=0.8, linestyle=":", label=f"tau = {tau:g}")
    axes.set(xlabel="t", ylabel="cosine of the two fields", title="public data", ylim=(None, 1.01))
    axes.legend()
    saved_figure(figure, path)


def plot_radius(norms: dict[str, NDArray[np.float64]], radii: dict[str, float], path: Path) -> None:
    """Draw a histogram of public norms (n,) for each space, with its clip radius, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(norms.items()):
        radius, colour = radii[name], f"C{number}"
        shown = np.minimum(values, 2.0 * radius)
        axes.hist(shown, bins=60, histtype="step", color=colour, label=f"norms of {name}")
        label = f"radius {radius:.4g} ({float(np.mean(values > radius)):.2%} beyond)"
        axes.axvline(radius, color=colour, linewidth=0.8, linestyle=":", label=label)
    axes.set(xlabel="norm", ylabel="public images, altered ones too", title="public data")
    axes.legend()
    saved_figure(figure, path)


def saved_figure(figure: Any, path: Path, stamp: str | None = None) -> None:
    """Write a matplotlib figure as a PNG, atomically, with nothing of this machine in it.

    `stamp`: its text field "dpsynth", which says who may see it.
    """
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None, "dpsynth": stamp})
    write_atomic(path, buffer.getvalue())


def _draw(codes: Tensor, source: torch.Generator) -> Tensor:
    return codes[torch.randperm(len(codes), generator=source)[:POINTS]]


def _cosines(
    points: Tensor, field: AnalyticField | LiftedField, label: int | None, source: torch.Generator
) -> list[float]:
    """Mean cosine at each time of the grid; `label` None compares the unconditional fields."""
    cosines = []
    for t in GRID:
        start = points[torch.randint(len(points), (PROBES,), generator=source)]
        x = (1.0 - t) * torch.randn(start.shape, generator=source) + t * start
        times = torch.full((PROBES,), t)
        if label is None:
            model = field.unconditional(x, times)
        else:
            model = field.conditional(x, times, torch.full((PROBES,), label))
        exact = empirical_velocity(points, x, t)
        cosines.append(float(torch.cosine_similarity(model, exact, dim=1).mean()))
    return cosines
