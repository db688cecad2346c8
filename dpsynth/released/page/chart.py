"""Coordinates of the charts that the templates draw as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tick:
    """A mark on both axes of a chart whose sides have one scale."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class RocChart:
    """A chart of true against false alarms; lines as an SVG's `points`."""

    left: int
    right: int
    top: int
    bottom: int
    ticks: tuple[Tick, ...]
    curve: str
    alone: str
    guess: str
    area: str


@dataclass(frozen=True)
class Bar:
    """One bar of a chart; `total`: what all others compose to."""

    name: str
    epsilon: float
    y: int
    width: float
    total: bool = False


@dataclass(frozen=True)
class BarChart:
    """Bars of epsilon, and where the budget lies on their scale."""

    bars: tuple[Bar, ...]
    budget: float
    limit: float
    left: int
    height: int


def roc_chart(
    rates: Array, curve: Array, alone: Array, *, left: int = 58, top: int = 10, side: int = 280
) -> RocChart:
    """The chart of `curve` and `alone`, both (k,), over rates (k,) of false alarms in [0, 1]."""
    right, bottom = left + 5 * side // 4, top + side

    def line(tprs: Array) -> str:
        xs, ys = left + rates * (right - left), bottom - tprs * (bottom - top)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))

    ticks = tuple(
        Tick(left + at * (right - left), bottom - at * (bottom - top), f"{100 * at:.0f}%")
        for at in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    drawn = line(curve)
    area = f"{drawn} {right}.0,{bottom}.0 {left}.0,{bottom}.0"
    return RocChart(left, right, top, bottom, ticks, drawn, line(alone), line(rates), area)


def bar_chart(
    alone: Mapping[str, float], composed: float, budget: float, *, left: int = 150, room: int = 410
) -> BarChart:
    """Bars of each mechanism's epsilon alone and of all composed, beside the budget.

    `room`: pixels of the longest bar. What is infinite has the longest bar.
    """
    finite = [value for value in (*alone.values(), composed, budget) if np.isfinite(value)]
    scale = room / max([*finite, 1e-12])

    def bar(place: int, name: str, epsilon: float, *, total: bool = False) -> Bar:
        width = round(min(room, epsilon * scale), 1) if np.isfinite(epsilon) else float(room)
        return Bar(_short(name), epsilon, 24 + 30 * place, max(width, 1.0), total)

    names: Sequence[str] = list(alone)
    bars = [bar(place, name, alone[name]) for place, name in enumerate(names)]
    bars.append(bar(len(names), "composed", composed, total=True))
    limit = round(left + budget * scale, 1)
    return BarChart(tuple(bars), budget, limit, left, 30 * len(bars) + 28)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
