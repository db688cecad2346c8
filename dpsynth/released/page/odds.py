"""What a run's spend means to an attacker, for a page: rates, a table, and a curve to draw.

From the lock's slots and the transcript's charges alone; the bounds are `accounting.tradeoff`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting import tradeoff
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.planning.units import read_unit
from dpsynth.released.page.chart import RocChart, roc_chart

Array = NDArray[np.float64]

RATES = (0.001, 0.01, 0.05, 0.1, 0.25)
"""Rates of false alarms that the table shows."""


@dataclass(frozen=True)
class Rate:
    """At most `tpr` of the members are found with `fpr` false alarms.

    `alone`: what epsilon and delta say of it by themselves. `even`, `rare`: belief after an alarm,
    at most, of an attacker who held membership for as likely as not, or for one in a hundred.
    """

    fpr: float
    tpr: float
    alone: float
    even: float
    rare: float

    @property
    def one_in(self) -> int:
        """One member in so many is found at most, rounded towards more of them."""
        return max(1, int(1 / self.tpr)) if self.tpr else 0


@dataclass(frozen=True)
class Odds:
    """Bounds on every attack; `missing` says why there are none. `basis`: what they are of."""

    unit: str
    epsilon: float
    delta: float
    basis: str = ""
    missing: str = ""
    advantage: float | None = None
    rows: tuple[Rate, ...] = ()
    chart: RocChart | None = field(default=None, repr=False)

    @property
    def accuracy(self) -> float:
        """Most right answers about one unit that is there as likely as not: (1 + advantage) / 2."""
        return (1 + (self.advantage or 0.0)) / 2

    @property
    def low(self) -> Rate | None:
        """The rate with the fewest false alarms."""
        return self.rows[0] if self.rows else None


def odds_of(lock: Lock, slots: Sequence[Slot], *, planned: bool = False) -> Odds:
    """Bounds for these slots of a lock together; `planned`: none of them is spent yet."""
    unit = read_unit(lock.budget["unit"])
    said = "record" if unit is None else unit.column
    epsilon, delta = float(lock.budget["epsilon"]), float(lock.budget["delta"])
    if not slots:
        return Odds(said, epsilon, delta, missing="Nothing was spent yet: there is nothing to see.")
    curve = tradeoff.curve([slot.event() for slot in slots], lock.delta_slack)
    alone = tradeoff.stated(epsilon, delta)
    rows = tuple(_rate(one, alone) for one in tradeoff.odds(curve, RATES))
    points = np.concatenate([np.geomspace(1e-5, 0.02, 40), np.linspace(0.025, 1.0, 60)])
    points = np.concatenate([[0.0], points])
    basis = (
        "If everything planned is spent, an attacker can do no better than this:"
        if planned
        else "Whatever the attack, it can do no better than this:"
    )
    chart = roc_chart(points, _worse(curve, points), _worse(alone, points))
    found = tradeoff.advantage(curve)
    return Odds(said, epsilon, delta, basis, "", found, rows, chart)


def _rate(found: tradeoff.Odds, alone: tradeoff.Curve) -> Rate:
    (by_itself,) = _worse(alone, np.array([found.fpr]))
    even, rare = found.posteriors
    return Rate(found.fpr, found.tpr, float(by_itself), even, rare)


def _worse(curve: tradeoff.Curve, rates: Array) -> Array:
    """The larger bound of the two claims, that the unit is there and that it is not."""
    worse: Array = np.maximum(
        tradeoff.tprs(curve, rates, "present"), tradeoff.tprs(curve, rates, "absent")
    )
    return worse
