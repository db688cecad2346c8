"""The two-dimensional mixture control (StraightDP, figure 6), through the real commands.

    python -m benchmarks.mixture [--epsilons 0.1 0.3 1 3 10] [--seeds 3] [--json]
                                 [--picture PNG] [--work DIR]

The private records are points of a known labelled mixture, four Gaussian modes a class, stored as
images of two pixels. The commands of the tool release them by one Gaussian a class and by cells, at
each epsilon and seed (a seed draws the records; noise is always fresh); `evaluate` is left out, for
two pixels are no image. Figures are Wasserstein-2 distances in units of the square's side, exact
between as many fresh true draws and samples of a class, root mean square over classes; the true
draws have every mode equally often. Beside them: the ceiling (true draws against true draws) and
the floor (the public points). Resumable: finished runs in the work folder are kept.
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
KINDS = {"one Gaussian a class": "{}", "cells": "{cells: {template: false}}"}
# A template needs images with room for strokes; two pixels have none.
PLAN = """\
version: 1
name: {name}
budget: {{epsilon: {epsilon}, delta: 1e-5}}
private:
  source: {{kind: npz, path: {work}/private-{seed}.npz}}
  public: true
  capacity: {records}
  image: {{height: 1, width: 2}}
  classes: ["0", "1", "2"]
  held_out: {{by: source, source: {{kind: npz, path: {work}/held-out.npz}}}}
public: [{{kind: npz, path: {work}/public.npz}}]
representation: {{kind: pca, code: 2}}
stages: {{moments: {moments}}}
prior: {{steps: 1}}
sampling: {{method: release, count: {count}}}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.1, 0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/mixture"))
    parser.add_argument("--picture", type=Path, help="default: mixture.png in the work folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    found = measure(work, options.epsilons, options.seeds)
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


def measure(work: Path, epsilons: Sequence[float], seeds: int) -> dict[str, Any]:
    """Every kind of plan at every epsilon over the seeds; ceiling and floor beside."""
    work.mkdir(parents=True, exist_ok=True)
    save(work / "public.npz", public(RECORDS // CLASSES))
    save(work / "held-out.npz", truth(2, A_CLASS))
    for seed in range(seeds):
        save(work / f"private-{seed}.npz", truth(100 + seed, RECORDS // CLASSES))
    rows = [
        {"samples": kind, "epsilon": epsilon}
        | summary([score(work, kind, epsilon, seed) for seed in range(seeds)])
        for kind in KINDS
        for epsilon in epsilons
    ]
    fresh = [reference(seed) for seed in range(seeds)]
    ceiling = [distance(truth(300 + seed, A_CLASS), fresh[seed]) for seed in range(seeds)]
    floor = [distance(public(A_CLASS), points) for points in fresh]
    return {"seeds": seeds, "rows": rows, "ceiling": summary(ceiling), "floor": summary(floor)}


def score(work: Path, kind: str, epsilon: float, seed: int) -> float:
    """W2 of one run's samples to fresh true draws; makes the run where it is not finished."""
    run = run_folder(work, kind, epsilon, seed)
    if not (run / "released/manifest.json").exists():
        text = PLAN.format(
            name=run.name, epsilon=epsilon, work=work, seed=seed, records=RECORDS,
            moments=KINDS[kind], count=A_CLASS * CLASSES,
        )  # fmt: skip
        plan = work / f"{run.name}.yaml"
        plan.write_text(text)
        make(plan, run, work)
    return distance(released(run), reference(seed))


def make(plan: Path, run: Path, work: Path) -> None:
    """All commands of one run, from what is there; the public room comes from a run before."""
    from dpsynth.artifacts.rooms import RunDir
    from dpsynth.planning.steps import status

    made = sorted(path.parent.parent for path in work.glob("*/public/calibration.json"))
    share_public(plan, next(iter(made), None), run)
    fresh = not (run / "transcript.jsonl").exists()  # what was copied is looked at again
    for command in ("check", "pretrain", "release-moments", "sample", "replay"):
        step = status(RunDir(run)).step(command)
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
    """Truth, samples of both kinds at the middle epsilon, and the sweep, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 + len(KINDS))
    epsilons = sorted({row["epsilon"] for row in found["rows"]})
    middle = epsilons[len(epsilons) // 2]
    shown = {"truth": reference(0)} | {
        f"{kind}, epsilon {middle:g}": released(run_folder(work, kind, middle, 0)) for kind in KINDS
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
    for kind in KINDS:
        rows = [row for row in found["rows"] if row["samples"] == kind]
        x, y = [row["epsilon"] for row in rows], [row["mean"] for row in rows]
        axes.errorbar(x, y, [row["std"] or 0.0 for row in rows], marker="o", capsize=3, label=kind)
    for name, style in (("ceiling", ":"), ("floor", "--")):
        axes.axhline(found[name]["mean"], color="black", linestyle=style, linewidth=0.8, label=name)
    axes.set(xscale="log", yscale="log", xlabel="epsilon", title="Wasserstein-2 to the truth")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
