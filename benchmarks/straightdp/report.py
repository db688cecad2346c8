"""Tables of the runs' scores: mean and spread, the paper's value beside, ceiling and floor."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.straightdp import paper
from benchmarks.straightdp.rows import SENTENCE
from benchmarks.straightdp.sizes import RATES_FROM, SIZES

Scores = Sequence[Mapping[str, Any]]
Values = dict[str, list[float]]

MEASURES = {
    "1": ("accuracy", "fd"),
    "2": ("accuracy", "fd"),
    "4": ("accuracy", "fd", "class", "quadrant", "stroke"),
    "5": ("class_fd", "consistency", "domain"),
    "7": ("precision", "recall"),
    "gradient": ("accuracy", "fd"),
}
NAMES = {
    "accuracy": "accuracy",
    "fd": "FD",
    "class_fd": "FD by class",
    "consistency": "label cons.",
    "domain": "domain",
    "precision": "precision",
    "recall": "recall",
    "class": "class",
    "quadrant": "quadrant",
    "stroke": "stroke",
}


def gathered(runs: Scores) -> dict[tuple[str, float], Values]:
    """Values of each measure by row and epsilon, in the order of the runs."""
    found: dict[tuple[str, float], Values] = {}
    for run in runs:
        own = found.setdefault((run["row"], run["epsilon"]), {})
        for measure, value in run["scores"].get("", {}).items():
            own.setdefault(measure, []).append(value)
    return found


def spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation where there are several.

    >>> spread([0.5, 0.7]), spread([25.0])
    ('0.600 ± 0.141', '25.0')
    """
    mean = statistics.fmean(values)
    digits = 3 if abs(mean) < 10 else 1
    own = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{own}"


def show(name: str, runs: Scores, bounds: Mapping[str, Mapping[str, float]]) -> None:
    """Print one table."""
    from dpsynth.console import render, table

    measures = MEASURES[name]
    lines = [
        (
            row,
            f"{epsilon:g}",
            *(spread(values[m]) if m in values else "" for m in measures),
            theirs(name, row, epsilon),
        )
        for (row, epsilon), values in gathered(runs).items()
    ]
    for bound, known in bounds.items():
        cells = (f"{known[m]:.3g}" if m in known else "" for m in measures)
        lines.append((bound, "", *cells, ""))
    columns = ("row", "epsilon", *(NAMES[m] for m in measures), f"paper: {paper.COLUMNS[name]}")
    seconds = sum(run["seconds"] for run in runs)
    render(table(columns, lines, title=f"Table {name} ({seconds / 60:.0f} process minutes)"))


def theirs(name: str, row: str, epsilon: float) -> str:
    """The paper's values for a row, in the order of `paper.COLUMNS`; empty where it has none.

    >>> theirs("1", "latent: planned + moments", 1.0), theirs("1", "latent: planned + moments", 2.0)
    ('0.811 / 56.5', '')
    """
    values = paper.values(name, row, epsilon)
    return " / ".join(f"{value:g}" for value in values)


def notes(found: Mapping[str, Scores], size: str) -> list[str]:
    """What the tables leave out, and where their settings come from."""
    told = [
        f"size: {size}; a mean over one run has no spread",
        "FID: blank, there are no Inception weights here; FD: Frechet distance in features of a "
        "LeNet trained on real digits, not comparable with the paper's FID",
        f"DP-SGD's learning rates: {rates(size)}",
    ]
    rows = {run["row"] for run in found.get("4", ())}
    if "4" in found and SENTENCE not in rows:
        told.append(f"{SENTENCE}: left out, it needs --encoder DIR or --encoder minilm")
    return told


def rates(size: str) -> str:
    """Each space's learning rates, and where they come from."""
    parts = [
        f"{space} {kind} {rate:g}"
        for space, own in SIZES[size].items()
        for kind, rate in own.rates.items()
    ]
    return f"{', '.join(parts)} ({'the paper, Table 9' if size == 'full' else RATES_FROM})"


def keep(
    found: Mapping[str, Scores], bounds: Mapping[str, Mapping[str, float]], path: Path
) -> None:
    """Everything that was measured, as JSON; tables of earlier calls stay."""
    known = json.loads(path.read_text())["tables"] if path.exists() else {}
    path.write_text(json.dumps({"tables": known | found, "bounds": bounds}, indent=1))
