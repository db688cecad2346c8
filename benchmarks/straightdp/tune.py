"""`--tune`: the learning rates of DP-SGD, chosen on public data alone.

Ten letters stand in for the private records and Fashion-MNIST is the public domain, so that the
step from one to the other is like that of the tables. Each candidate runs the whole plan at
epsilon 1; its score is the accuracy, on held-out letters, of a LeNet trained on its samples, and
beside it their Frechet distance. MNIST is never opened. What is printed goes into `sizes.py`.
"""

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.straightdp.plans import Row
from benchmarks.straightdp.rows import Cell
from benchmarks.straightdp.runs import Runs, Score

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
KINDS = ("uniform", "moments")
SPACES = ("latent", "pixel")
EPSILON = 1.0


def main(runs: Runs, spaces: Sequence[str] | None = None) -> None:
    """Score every rate of every kind of row; print, and write `tune.json`."""
    candidates = rows(spaces or SPACES)
    cells = [Cell(row, EPSILON, 0) for row in candidates]
    scores = runs.made(cells, whole=False)
    found = [
        {"space": row.space, "kind": kind_of(row), "rate": row.rate, **score["scores"][""]}
        for row, score in zip(candidates, scores, strict=True)
    ]
    report = {"size": runs.size, "rates": found, "best": best(found), "seconds": seconds(scores)}
    (runs.work / "tune.json").write_text(json.dumps(report, indent=1))
    show(report)


def rows(spaces: Sequence[str]) -> list[Row]:
    """One row a space, kind and rate."""
    return [
        Row(
            f"tune {space} {kind} {rate:g}",
            space,
            release="paper" if kind == "moments" else None,
            train="uniform",
            rate=rate,
            data="letters",
        )
        for space in spaces
        for kind in KINDS
        for rate in RATES
    ]


def kind_of(row: Row) -> str:
    """Which of the sizes' rates a row's rate would be."""
    return "moments" if row.release else "uniform"


def best(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The rate of highest accuracy by space and kind.

    >>> best([{"space": "latent", "kind": "uniform", "rate": r, "accuracy": a}
    ...     for r, a in ((0.1, 0.5), (0.2, 0.7), (0.4, 0.6))])
    {'latent': {'uniform': 0.2}}
    """
    chosen: dict[str, dict[str, float]] = {}
    for one in sorted(found, key=lambda row: float(row["accuracy"])):
        chosen.setdefault(one["space"], {})[one["kind"]] = one["rate"]
    return chosen


def seconds(scores: Sequence[Score]) -> float:
    """Wall seconds of all runs together."""
    return float(sum(score["seconds"] for score in scores))


def show(report: dict[str, Any]) -> None:
    """Print the scores and what they choose."""
    from dpsynth.console import render, table

    lines = [
        (
            one["space"],
            one["kind"],
            f"{one['rate']:g}",
            f"{one['accuracy']:.3f}",
            f"{one['fd']:.1f}",
        )
        for one in report["rates"]
    ]
    columns = ("space", "rows", "learning rate", "accuracy", "FD")
    title = "DP-SGD's learning rate on letters, Fashion-MNIST public, epsilon 1"
    render(table(columns, lines, title=title))
    print(f"for sizes.py: {json.dumps(report['best'])}")
