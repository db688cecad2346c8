"""The tables of guidance: shares of the gap by mean and by the level that sampling starts at."""

import statistics
from typing import Any

from benchmarks.frozen.plans import MEANS, SIGMA
from benchmarks.frozen.runs import PRIVATE, STAND_IN, Runs

NUMBERS = (0, 1, 2)
ASKED = 0.5
"""Share of the gap that samples of the released mean are to close."""
Score = dict[str, float]


def means_table(runs: Runs, sigma: float) -> dict[str, Any]:
    """Every mean at one level over three runs, with floor and ceiling."""
    rows = {
        mean: summary([runs.guided(PRIVATE, number, sigma, mean) for number in NUMBERS])
        for mean in MEANS
    }
    beside = {"floor": runs.unguided(PRIVATE), "ceiling": runs.ceiling(PRIVATE)}
    if sigma == SIGMA:
        rows["exact moments"] = summary([runs.exact(PRIVATE, number) for number in NUMBERS])
    return {"sigma": sigma, "means": rows, "beside": beside}


def sweep(runs: Runs, style: str, sigmas: tuple[float, ...]) -> dict[str, Score]:
    """The released mean by level, one run of a style."""
    return {f"{sigma:g}": runs.guided(style, 0, sigma, "released") for sigma in sigmas}


def chosen(stand_in: dict[str, Score]) -> float:
    """The highest level at which the public stand-in's gap is half closed.

    The prior does the more the higher it is. The paper's where none does.

    >>> chosen({"0.7": {"latents along": 0.9}, "0.9": {"latents along": 0.6},
    ...         "0.95": {"latents along": 0.3}})
    0.9
    """
    enough = [float(s) for s, score in stand_in.items() if score["latents along"] >= ASKED]
    return max(enough, default=SIGMA)


def summary(scores: list[Score]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation over runs, by measure."""
    return {
        name: (
            statistics.fmean(score[name] for score in scores),
            statistics.stdev(score[name] for score in scores) if len(scores) > 1 else 0.0,
        )
        for name in scores[0]
    }


def show_means(found: dict[str, Any]) -> None:
    """Print one level's table."""
    lines = [
        (mean, *(f"{value:.2f} ± {spread:.2f}" for value, spread in row.values()))
        for mean, row in found["means"].items()
    ]
    for name, score in found["beside"].items():
        lines.append((name, *(f"{value:.2f}" for value in score.values())))
    _show(lines, list(found["beside"]["floor"]), f"share of the gap from sigma {found['sigma']:g}")


def show_sweep(style: str, found: dict[str, Score]) -> None:
    """Print the levels of one style."""
    lines = [(s, *(f"{value:.2f}" for value in score.values())) for s, score in found.items()]
    what = {PRIVATE: "private", STAND_IN: "public stand-in"}[style]
    _show(lines, list(next(iter(found.values()))), f"by start, released mean, {what}")


def _show(lines: list[Any], names: list[str], title: str) -> None:
    from dpsynth.console import render, table

    render(table(("", *names), lines, title=title))
