"""`curator/audit/audit.png`: each attack's ROC curve under the accountant's, and bounds as bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.assess.audit import roc
from dpsynth.assess.audit.verdict import Seen
from dpsynth.public.calibrate import saved_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

_PLAN, _FAULT, _ABOVE = "#1f5fa8", "#b9b9b9", "#b3261e"


@dataclass(frozen=True)
class Curve:
    """One attack's scores (n,) on the plan as it is, and which candidates are members (n,)."""

    name: str
    scores: Array
    member: NDArray[np.bool_]


def draw(
    path: Path,
    curves: Sequence[Curve],
    promise: tuple[Array, Array],
    results: Sequence[Seen],
    *,
    public: bool = False,
) -> Path:
    """Draw the picture, for its owner alone, and return where it is.

    Left: TPR over FPR, both logarithmic, which is where low error rates show (Carlini et al.
    2022). No attack's true curve is above the promise; of few canaries the curve seen strays, by
    as much as the dashed line says. Right: every attack's lower bound on
    epsilon beside what its world's plan promises.

    Args:
        path: of the PNG.
        curves: attacks on the plan as it is.
        promise: the accountant's curve: FPR (p,) and the largest TPR (p,) that the plan allows.
        results: of all worlds, controls too.
        public: whether public data stood in for the private records.
    """
    figure = _figure(curves, promise, results, public)
    saved_figure(figure, path, "public" if public else "curator-only")
    path.chmod(0o600)
    return path


def _figure(
    curves: Sequence[Curve], promise: tuple[Array, Array], results: Sequence[Seen], public: bool
) -> "Figure":
    from matplotlib.figure import Figure

    height = max(5.5, 1.5 + 0.24 * len(results))
    figure = Figure(figsize=(12.0, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, curves, promise)
    _bars(right, results)
    # Beneath both: within the axes it would hide a curve.
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside lower left", ncols=4)
    figure.suptitle("Audit on public data" if public else "Audit: curator only")
    return figure


def _curves(axes: Any, curves: Sequence[Curve], promise: tuple[Array, Array]) -> None:
    least = min([1e-2, *(_smallest(curve) for curve in curves)])
    for number, curve in enumerate(curves):
        accused, found = roc.curve(curve.scores, curve.member)
        axes.plot(accused, found, color=f"C{number}", lw=1.3, label=curve.name)
    fine = np.geomspace(least, 1.0, 200)
    allowed = np.interp(fine, *promise)
    axes.plot(fine, allowed, color="black", lw=1.5, label="the most that the plan allows")
    axes.fill_between(fine, allowed, 1.0, color="black", alpha=0.06, lw=0)
    if curves:
        axes.plot(
            *strayed(promise, curves[0].member),
            color="black", lw=1.0, ls="--", label="so far chance may carry such a curve (97.5%)",
        )  # fmt: skip
    axes.plot(fine, fine, color="grey", lw=0.8, ls=":", label="chance")
    axes.set(xscale="log", yscale="log", xlim=(least, 1.0), ylim=(least, 1.05))
    axes.set(xlabel="share of others accused (FPR)", ylabel="share of members found (TPR)")
    axes.set_title("The plan as it is", fontsize=11)


def strayed(promise: tuple[Array, Array], member: NDArray[np.bool_]) -> tuple[Array, Array]:
    """FPR and TPR (n,) below which 97.5% of empirical curves lie whose truth is the promise itself.

    At each number k of the n others accused, pointwise: the threshold is then the (k + 1)-th
    highest score of an other, its true FPR a Beta(k + 1, n - k) number, and members are found by
    coins of the TPR that is allowed there. By 2,000 draws of a fixed seed.
    """
    members, others = int(member.sum()), int((~member).sum())
    source, accused = np.random.default_rng(0), np.arange(others)
    true = source.beta(accused + 1, others - accused, size=(2000, others))
    found = source.binomial(members, np.clip(np.interp(true, *promise), 0.0, 1.0)) / members
    return accused / others, np.quantile(found, 0.975, axis=0)


def _smallest(curve: Curve) -> float:
    """The smallest rate above 0 that so many candidates can show."""
    return 0.7 / max(1, int((~curve.member).sum()), int(curve.member.sum()))


def _bars(axes: Any, results: Sequence[Seen]) -> None:
    names = [f"{one.world}: {one.attack}" for one in results]
    figures = [value for one in results for value in (one.bound, one.promised)]
    most = 1.3 * max([1.0, *(value for value in figures if math.isfinite(value))])
    for place, one in enumerate(results):
        fault = one.control is not None
        colour = _FAULT if fault else _ABOVE if one.leaks else _PLAN
        reached = min(one.bound, most)  # an infinite bound fills the row
        axes.barh(place, reached, color=colour, height=0.7)
        axes.plot([one.promised] * 2, [place - 0.45, place + 0.45], color="black", lw=1.5)
        note = f" {one.bound:.2f}" + (" copies found" if one.copies and one.copies.included else "")
        axes.text(min(reached, 0.85 * most), place, note, va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlim=(0.0, most), xlabel="epsilon: lower bound (bar) and promise (line)")
    axes.set_title("Bounds; planted faults in grey", fontsize=11)
