"""The emoji table, and who wins by how much, pair by pair."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.wavelet.plans import BUDGETS, NAMES

Scores = Sequence[Mapping[str, Any]]
MEASURES = {"fd": "FD", "distance": "distance by caption", "agreement": "label agreement"}


def gathered(scores: Scores, measure: str) -> dict[tuple[str, str], list[float]]:
    """Values by method and budget, in the order of the runs."""
    found: dict[tuple[str, str], list[float]] = {}
    for score in sorted(scores, key=lambda score: int(score["number"])):
        values = found.setdefault((score["method"], score["budget"]), [])
        values.append(score["scores"][measure])
    return found


def pairs(scores: Scores, measure: str = "fd") -> list[str]:
    """DP-Wavelet against each baseline at epsilon 1 and 10, run by run.

    >>> one = {"method": "wavelet", "budget": "1", "number": 0, "scores": {"fd": 2.0}}
    >>> pairs([one, one | {"method": "raster", "scores": {"fd": 3.0}}])
    ['epsilon 1: DP-Wavelet 2.00, raster order, all 3.00: lower in 1 of 1 runs']
    """
    found, told = gathered(scores, measure), []
    for budget in ("1", "10"):
        ours = found.get(("wavelet", budget), [])
        for method in ("raster", "ldm"):
            theirs = found.get((method, budget), [])
            both = list(zip(ours, theirs, strict=False))
            if both:
                won = sum(one < other for one, other in both)
                told.append(
                    f"epsilon {budget}: {NAMES['wavelet']} {spread([a for a, _ in both])}, "
                    f"{NAMES[method]} {spread([b for _, b in both])}: "
                    f"lower in {won} of {len(both)} runs"
                )
    return told


def spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation where there are several.

    >>> spread([2.0]), spread([1.0, 3.0])
    ('2.00', '2.00 ± 1.41')
    """
    own = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{own}"


def show(scores: Scores, bounds: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table a measure: methods down, budgets across."""
    from dpsynth.console import render, table

    for measure, title in MEASURES.items():
        found = gathered(scores, measure)
        rows = [
            (name, *(spread(found[method, b]) if (method, b) in found else "" for b in BUDGETS))
            for method, name in NAMES.items()
        ]
        limits = ", ".join(f"{name} {own[measure]:.2f}" for name, own in bounds.items()
                           if measure in own)  # fmt: skip
        columns = ("method", *(b if b in ("pretrained",) else _budget(b) for b in BUDGETS))
        render(table(columns, rows, title=f"{title} to private emoji ({limits})"))
    for line in pairs(scores):
        print(f"FD, {line}")
    for line in pairs(scores, "distance"):
        print(f"distance, {line}")


def _budget(name: str) -> str:
    return "no noise" if name == "none" else f"epsilon {name}"
