"""The two-dimensional mixture control (StraightDP, figure 6), through the real commands.

    python -m benchmarks.mixture [--epsilons 0.1 0.3 1 3 10] [--seeds 3] [--train] [--json]
                                 [--picture PNG] [--work DIR]

The private records are points of a known labelled mixture, four Gaussian modes a class, stored as
images of two pixels. The commands of the tool release them by one Gaussian a class and by cells, at
each epsilon and seed (a seed draws the records; noise is always fresh); `evaluate` is left out, for
two pixels are no image. `--train` adds what the paper compares: a class-conditional flow from the
public points, under uniform DP-SGD with the whole budget, and distilled from the paper's release
(shared covariance) before DP-SGD with the rest of it.

Figures are Wasserstein-2 distances in units of the square's side, exact between as many fresh true
draws and samples of a class, root mean square over classes; the true draws have every mode equally
often. Beside them: the ceiling (true draws against true draws) and the floor (the public points).
Resumable: finished runs in the work folder are kept.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results import dpsynth, share_public, spread

Points = NDArray[np.float64]
"""Points (Y, n, 2) of the unit square: as many of each class."""

CLASSES, MODES, WIDTH = 3, 4, 0.035
RECORDS = 6000
A_CLASS = 1200  # points of a class in a comparison
KINDS: dict[str, dict[str, Any]] = {
    "one Gaussian a class": {"stages": {"moments": {}}},
    # A template needs images with room for strokes; two pixels have none.
    "cells": {"stages": {"moments": {"cells": {"template": False}}}},
}
"""What each kind of plan has beside `base`."""
_TRAIN = {
    "rate": 0.05, "steps": 300, "chunk": 60, "multiplicity": 8, "buckets": 4,
    "learning_rate": 3e-3, "ema": 0.98,
}  # fmt: skip
_FLOW = {
    "velocity": {"kind": "mlp", "width": 48, "depth": 2},
    "prior": {"steps": 1500},
    "sampling": {"method": "flow", "guidance": 1.0, "count": A_CLASS * CLASSES},
}
TRAINED: dict[str, dict[str, Any]] = {
    "uniform DP-SGD": {"stages": {"train": _TRAIN}, **_FLOW},
    "moments + DP-SGD": {
        "stages": {
            "moments": {"weight": 0.2, "covariance": "shared", "sensitivity": "paper"},
            "train": {"weight": 0.65, **_TRAIN},
        },
        "split": "epsilon",
        "distillation": {"steps": 1500},
        **_FLOW,
    },
}
"""Kinds of `--train`: the rows of the paper's Figure 6."""


def base(work: Path, name: str, epsilon: float, seed: int) -> dict[str, Any]:
    """What all plans have in common; the flow is not drawn from unless a kind says so."""
    return {
        "version": 1,
        "name": name,
        "budget": {"epsilon": epsilon, "delta": 1e-5},
        "private": {
            "source": _archive(work, f"private-{seed}"),
            "public": True,
            "capacity": RECORDS,
            "image": {"height": 1, "width": 2},
            "classes": [str(y) for y in range(CLASSES)],
            "held_out": {"by": "source", "source": _archive(work, "held-out")},
        },
        "public": [_archive(work, "public")],
        "representation": {"kind": "pca", "code": 2},
        "prior": {"steps": 1},
        "sampling": {"method": "release", "count": A_CLASS * CLASSES},
    }


def _archive(work: Path, name: str) -> dict[str, str]:
    return {"kind": "npz", "path": str(work / f"{name}.npz")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.1, 0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", action="store_true", help="rows with DP-SGD, too (Figure 6)")
    parser.add_argument("--work", type=Path, default=Path("runs/mixture"))
    parser.add_argument("--picture", type=Path, help="default: mixture.png in the work folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    kinds = KINDS | (TRAINED if options.train else {})
    found = measure(work, options.epsilons, options.seeds, kinds)
    picture = options.picture or work / "mixture.png"
    draw(found, work, picture)
    if options.json:
        print(json.dumps(found | {"picture": str(picture)}, indent=1))
    else:
        print_table(found)
        print(f"picture: {picture}")


def modes() -> NDArray[np.float64]:
    """Means (Y, M, 2) on a grid whose neighbours belong to different classes."""
    means = np.zeros((CLASSES, MODES, 2))
    for row in range(CLASSES):
        for column in range(MODES):
            means[(row + column) % CLASSES, column] = 0.14 + 0.24 * column, 0.2 + 0.3 * row
    return means


def truth(seed: int, each: int, *, even: bool = False) -> Points:
    """`each` fresh draws of every class; modes are equally likely, or equally often if `even`."""
    source = np.random.default_rng(seed)
    chosen = source.integers(MODES, size=(CLASSES, each))
    if even:
        chosen[:] = np.arange(each) % MODES
    centres = np.take_along_axis(modes(), chosen[..., None], axis=1)
    points: Points = centres + WIDTH * source.standard_normal(centres.shape)
    return points


def reference(seed: int) -> Points:
    """The fresh true draws that a seed's samples are compared with."""
    return truth(200 + seed, A_CLASS, even=True)


def public(each: int) -> Points:
    """The public domain: uniform on the square, the same for every class."""
    return np.random.default_rng(1).uniform(size=(CLASSES, each, 2))


def save(path: Path, points: Points) -> None:
    """Points as images (n, 1, 2) of bytes with their labels."""
    images = (points.reshape(-1, 1, 2).clip(0.0, 1.0) * 255).round().astype(np.uint8)
    np.savez(path, images=images, labels=np.repeat(np.arange(CLASSES), points.shape[1]))


def released(run: Path) -> Points:
    """The samples of a run, as points of each class."""
    from dpsynth.artifacts.samples import read_samples

    images, labels = read_samples(run / "released/samples", [str(y) for y in range(CLASSES)])
    points = images.reshape(-1, 2) / 255.0
    return np.stack([points[labels == y] for y in range(CLASSES)])


def distance(first: Points, second: Points) -> float:
    """W2 of equally many points of each class by optimal assignment, rms over classes."""
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    squares = []
    for a, b in zip(first, second, strict=True):
        cost = cdist(a, b, "sqeuclidean")
        squares.append(cost[linear_sum_assignment(cost)].mean())
    return float(np.sqrt(np.mean(squares)))


def measure(
    work: Path, epsilons: Sequence[float], seeds: int, kinds: dict[str, dict[str, Any]] = KINDS
) -> dict[str, Any]:
    """Every kind of plan at every epsilon over the seeds; ceiling and floor beside."""
    work.mkdir(parents=True, exist_ok=True)
    save(work / "public.npz", public(RECORDS // CLASSES))
    save(work / "held-out.npz", truth(2, A_CLASS))
    for seed in range(seeds):
        save(work / f"private-{seed}.npz", truth(100 + seed, RECORDS // CLASSES))
    rows = [
        {"samples": kind, "epsilon": epsilon}
        | summary([score(work, kind, epsilon, seed, changes) for seed in range(seeds)])
        for kind, changes in kinds.items()
        for epsilon in epsilons
    ]
    fresh = [reference(seed) for seed in range(seeds)]
    ceiling = [distance(truth(300 + seed, A_CLASS), fresh[seed]) for seed in range(seeds)]
    floor = [distance(public(A_CLASS), points) for points in fresh]
    return {"seeds": seeds, "rows": rows, "ceiling": summary(ceiling), "floor": summary(floor)}


def score(work: Path, kind: str, epsilon: float, seed: int, changes: dict[str, Any]) -> float:
    """W2 of one run's samples to fresh true draws; makes the run where it is not finished."""
    run = run_folder(work, kind, epsilon, seed)
    if not (run / "released/manifest.json").exists():
        plan = work / f"{run.name}.yaml"
        plan.write_text(json.dumps(base(work, run.name, epsilon, seed) | changes, indent=1))
        make(plan, run, work)
    return distance(released(run), reference(seed))


def make(plan: Path, run: Path, work: Path) -> None:
    """All commands of one run, from what is there; the public room comes from a run before."""
    from dpsynth.artifacts.rooms import RunDir
    from dpsynth.planning.steps import status

    made = sorted(path.parent.parent for path in work.glob("*/public/calibration.json"))
    share_public(plan, next(iter(made), None), run)
    fresh = not (run / "transcript.jsonl").exists()  # what was copied is looked at again
    for command in ("check", "pretrain", "release-moments", "train", "sample", "replay"):
        step = status(RunDir(run)).step(command)
        if step is None and command != "replay":
            continue  # a stage that the plan does not have
        if fresh or step is None or not step.done:
            dpsynth(command, run)


def run_folder(work: Path, kind: str, epsilon: float, seed: int) -> Path:
    return work / f"{kind.split(maxsplit=1)[0]}-eps-{epsilon:g}-seed-{seed}"


def summary(values: Sequence[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "values": list(values)}


def print_table(found: dict[str, Any]) -> None:
    from dpsynth.console import render, table

    lines = [(row["samples"], f"{row['epsilon']:g}", spread(row)) for row in found["rows"]]
    lines.append(("ceiling: fresh true draws", "", spread(found["ceiling"])))
    lines.append(("floor: public points", "", spread(found["floor"])))
    title = f"W2 to the true mixture: mean and standard deviation over {found['seeds']} seeds"
    render(table(("samples", "epsilon", "W2"), lines, title=title))


def draw(found: dict[str, Any], work: Path, path: Path) -> None:
    """Truth, samples of every kind at the middle epsilon, and the sweep, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row["samples"] for row in found["rows"]))
    figure = Figure(figsize=(3.8 * (2 + len(kinds)), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 + len(kinds))
    epsilons = sorted({row["epsilon"] for row in found["rows"]})
    middle = epsilons[len(epsilons) // 2]
    shown = {"truth": reference(0)} | {
        f"{kind}, epsilon {middle:g}": released(run_folder(work, kind, middle, 0)) for kind in kinds
    }
    for axes, (title, points) in zip(panels, shown.items(), strict=False):
        for own in points:
            axes.scatter(*own.T, s=3)
        axes.set(title=title, xlim=(0, 1), ylim=(0, 1), aspect="equal")
    _sweep(panels[-1], found)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _sweep(axes: Any, found: dict[str, Any]) -> None:
    """W2 by epsilon, with bars of one standard deviation."""
    for kind in dict.fromkeys(row["samples"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["samples"] == kind]
        x, y = [row["epsilon"] for row in rows], [row["mean"] for row in rows]
        axes.errorbar(x, y, [row["std"] or 0.0 for row in rows], marker="o", capsize=3, label=kind)
    for name, style in (("ceiling", ":"), ("floor", "--")):
        axes.axhline(found[name]["mean"], color="black", linestyle=style, linewidth=0.8, label=name)
    axes.set(xscale="log", yscale="log", xlabel="epsilon", title="Wasserstein-2 to the truth")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
