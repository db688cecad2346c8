"""The rounds of a cell release: which there are, and each one's share of the noise budget.

A round tells about the records what its 1/sigma^2 says; those of a stage sum to that of one
Gaussian (docs/maths/accounting.md, equation A16). What a plan leaves out follows from its
public facts by the rule below, never from the records.
"""

import math
from dataclasses import dataclass

from dpsynth.errors import PlanError
from dpsynth.planning.release import Cells, RoundShares
from dpsynth.planning.schema import Plan

FIRST = "moments"
"""Name of the first round: class moments."""
LAST = "cells"
"""Name of the last round: cell moments."""

PRECISION = 13.0
"""c of the rule: an average cell's mean must be known to about 1/c of the clip radius."""
MOST = 16
"""More cells than this are never chosen by the rule; a plan may declare them."""
SHARES = RoundShares(first=0.3, lloyd=0.1, last=0.6)

# A round with less of the budget than this releases noise alone, beyond what the sampler draws.
_LEAST_SHARE = 1e-6
_WHOLE = 2**53  # beyond it a declared whole number is no exact float


@dataclass(frozen=True)
class Rounds:
    """What one moments stage with cells releases.

    `most`: cells of a class at most; `lloyd`: DP-Lloyd rounds. `first`, `each_lloyd` and `last`
    are shares of 1/sigma^2: first + lloyd * each_lloyd + last = 1.
    """

    most: int
    lloyd: int
    first: float
    each_lloyd: float
    last: float

    @property
    def lloyd_names(self) -> tuple[str, ...]:
        """Names of the DP-Lloyd rounds, counted from 1."""
        return tuple(f"cells-lloyd-{number}" for number in range(1, self.lloyd + 1))

    @property
    def releases(self) -> tuple[tuple[str, float], ...]:
        """Name and share of each release, in order.

        >>> Rounds(4, 1, 0.5, 0.1, 0.4).releases
        (('moments', 0.5), ('cells-lloyd-1', 0.1), ('cells', 0.4))
        """
        moved = ((name, self.each_lloyd) for name in self.lloyd_names)
        return ((FIRST, self.first), *moved, (LAST, self.last))


def rounds_of(plan: Plan) -> Rounds | None:
    """The rounds that a plan's moments stage makes; None where it declares no cells.

    Raises PlanError for declared shares so unequal that a round is left without budget. The
    rule itself holds for any plan: tiny N, huge codes, any epsilon.
    """
    moments = plan.stages.moments
    if moments is None or moments.cells is None:
        return None
    cells = moments.cells
    most = cells.most or cells_worth(
        plan.private.capacity,
        plan.private.conditions,
        moments.projection or plan.representation.code,
        plan.budget.epsilon,
        plan.budget.delta,
    )
    lloyd = lloyd_rounds(most) if cells.lloyd is None else cells.lloyd
    return _shared(cells, most, lloyd)


def cells_worth(capacity: int, classes: int, dim: int, epsilon: float, delta: float) -> int:
    """Cells a class is worth, from public facts: most = N / (Y c s sqrt(d)) in [1, 16].

    s = sqrt(2 ln(1.25/delta)) / epsilon is about the noise multiplier of the whole budget. A
    cell of n records knows its mean with an error of norm about s sqrt(d) / n in units of the
    clip radius (times what the round's share and blocks make of s): a cell is worth having
    where the average one, of N / (Y most) records, makes that 1/c. N, Y, d: declared records,
    classes and code size. The quotient is rounded to the nearest whole number.

    >>> [cells_worth(60_000, 10, 48, epsilon, 1e-5) for epsilon in (0.03, 0.1, 0.3, 1.0)]
    [1, 1, 4, 14]
    >>> cells_worth(1_500, 10, 16, 3.0, 1e-5), cells_worth(10, 10, 512, 1e-9, 1e-9)
    (2, 1)
    """
    noise = math.sqrt(2 * (math.log(1.25) - math.log(delta))) / epsilon
    # Divided one by one: a product of extremes could overflow or vanish.
    worth = min(capacity, _WHOLE) / PRECISION / classes / math.sqrt(min(dim, _WHOLE)) / noise
    return round(min(max(worth, 1.0), float(MOST)))


def lloyd_rounds(most: int) -> int:
    """DP-Lloyd rounds for `most` cells a class: one, for a second one costs more than it moves.

    >>> [lloyd_rounds(most) for most in (1, 2, 16)]
    [0, 1, 1]
    """
    return 1 if most >= 2 else 0


def _shared(cells: Cells, most: int, lloyd: int) -> Rounds:
    """Rounds with normalised shares; without Lloyd rounds the others have their share."""
    given = cells.shares or SHARES
    parts = (given.first, given.lloyd if lloyd else 0.0, given.last)
    largest = max(parts)  # first, so that huge shares do not overflow
    total = sum(part / largest for part in parts)
    first, moved, last = (part / largest / total for part in parts)
    each = moved / lloyd if lloyd else 0.0
    if min(first, each if lloyd else last, last) < _LEAST_SHARE:
        raise PlanError(
            f"stages.moments.cells.shares leaves a round less than {_LEAST_SHARE:g} of the budget",
            hint="write shares nearer to one another, such as "
            "`shares: {first: 0.3, lloyd: 0.1, last: 0.6}`",
        )
    return Rounds(most, lloyd, first, each, last)
