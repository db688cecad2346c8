"""The figures: geometry (2), accuracy by epsilon (3), starts of guidance (4), the mixture (6)."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.straightdp import paper, report
from benchmarks.straightdp.plans import Row
from benchmarks.straightdp.rows import EPSILONS, LATENT, Cell, table
from benchmarks.straightdp.runs import Runs

STARTS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
BY_START = Row("guided, by start", "latent", port="guide")


def draw(name: str, runs: Runs) -> Path:
    """Make one figure; returns its PNG."""
    path = runs.work / f"figure-{name}.png"
    {"2": geometry, "3": by_epsilon, "4": starts, "6": mixture}[name](runs, path)
    return path


def geometry(runs: Runs, path: Path) -> None:
    """Figure 2: cosines of the released and the empirical field, and the clips' shapes; public."""
    facts = json.loads((runs.room(LATENT[3]) / "public/calibration.json").read_text())
    figure, (left, right) = _panels(2)
    for key, values in facts["tau_curve"].items():
        if key != "t":
            left.plot(facts["tau_curve"]["t"], values, label=key)
    left.axvline(facts["tau"], color="black", linewidth=0.8, linestyle=":", label="tau")
    left.set(xlabel="t", ylabel="cosine", title="released against empirical field")
    left.legend(fontsize=7)
    for beta, (edges, clips) in shapes(facts).items():
        right.stairs(clips, edges, baseline=None, label=f"beta {beta:g}")
    right.set(xlabel="t", ylabel="clip", yscale="log", title="shape family")
    right.legend(fontsize=7)
    _save(figure, path)


def shapes(calibration: dict[str, Any]) -> dict[float, tuple[list[float], list[float]]]:
    """By beta: edges (K + 1,) of the time buckets and their clips (K,), at reference clip 1."""
    from dpsynth.planning.allocation import SHAPES, clips_of, profile_in

    profile = profile_in(calibration)
    if profile is None:
        return {}
    return {beta: (list(profile.edges), list(clips_of(profile, beta, 1.0))) for beta in SHAPES}


def by_epsilon(runs: Runs, path: Path) -> None:
    """Figure 3: accuracy by epsilon of the rows of Table 1, the paper's dashed."""
    found = report.gathered(runs.made(table("1", full=runs.size == "full")))
    figure, panels = _panels(2)
    for axes, space in zip(panels, ("pixel", "latent"), strict=True):
        for row in dict.fromkeys(row for row, _ in found if row.startswith(f"{space}: ")):
            values = [found[row, epsilon]["accuracy"] for epsilon in EPSILONS]
            bars = [statistics.stdev(own) if len(own) > 1 else 0.0 for own in values]
            means = [statistics.fmean(own) for own in values]
            line = axes.errorbar(EPSILONS, means, bars, marker="o", capsize=3, label=row)
            known = [paper.values("1", row, epsilon)[0] for epsilon in EPSILONS]
            axes.plot(EPSILONS, known, linestyle="--", linewidth=0.7, color=line[0].get_color())
        axes.set(xlabel="epsilon", ylabel="accuracy", xscale="log", ylim=(0, 1))
        axes.set(title=f"{space}: ours solid, the paper dashed")
        axes.legend(fontsize=6)
    _save(figure, path)


def starts(runs: Runs, path: Path) -> None:
    """Figure 4: guidance from t0 of a model that was trained without distillation."""
    (found,) = runs.made([Cell(BY_START, 1.0, 0)], whole=False, starts=STARTS, model="model")
    scores = {float(t0): score for t0, score in found["scores"].items()}
    figure, panels = _panels(2)
    for axes, measure in zip(panels, ("accuracy", "fd"), strict=True):
        axes.plot(list(scores), [score[measure] for score in scores.values()], marker="o")
        axes.set(xlabel="start t0", ylabel=report.NAMES[measure])
    _save(figure, path)


def mixture(runs: Runs, path: Path) -> None:
    """Figure 6: the two-dimensional mixture, by its own benchmark."""
    from benchmarks import mixture as control

    work = runs.work / "mixture"
    epsilons = ["--epsilons", "0.1", "0.3", "1"]
    control.main(["--work", str(work), "--picture", str(path), "--train", *epsilons])


def _panels(count: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * count, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120, metadata={"Software": None})
