"""The least noise that meets a budget, rounded towards privacy and verified.

A search over one scale on a coarse grid, from a first guess by the central limit theorem;
then the scale is rounded up and verified by `compose.epsilon`, the accountant of record.
"""

import decimal
import math
from collections.abc import Callable, Iterable

from dpsynth.accounting import checks, gaussian
from dpsynth.accounting.compose import checked_delta, coarse_epsilon, epsilon
from dpsynth.accounting.events import Event
from dpsynth.accounting.merging import merge
from dpsynth.errors import BudgetError

DIGITS = 5
_TOLERANCE = 2e-6  # of the scale, well under its five digits
_CORRECTIONS = 4
_STEPS_UP = 40

EventsAt = Callable[[float], Iterable[Event]]


def smallest_scale(
    events_at: EventsAt, budget: float, delta: float, *, low: float = 1e-2, high: float = 1e6
) -> float:
    """Smallest scale, of five significant digits, whose events meet `budget` at `delta`.

    `events_at(scale)` gives the events; their epsilon must fall as the scale grows. The
    result is rounded up and `epsilon(events_at(result), delta).pessimistic <= budget` holds.

    Raises:
        BudgetError: not even `high` meets the budget.
        AccountingError: a budget or delta out of range.

    >>> from dpsynth.accounting.events import GaussianEvent
    >>> smallest_scale(lambda s: [GaussianEvent(s)], 1.0, 1e-5)
    3.7307
    """
    budget = checks.positive("epsilon", budget)
    delta = checked_delta(delta)
    if not coarse_epsilon(events_at(high), delta) <= budget:
        raise BudgetError(
            f"no noise scale up to {high:g} meets epsilon {budget:g} at delta {delta:g}",
            hint="declare a larger epsilon or delta, fewer steps, or a lower rate",
        )
    guess = _guess(events_at, budget, delta, low, high)
    aim, found = budget, guess
    for _ in range(_CORRECTIONS):  # aim the coarse grid at what the fine one makes of the budget
        found = _search(events_at, aim, delta, found, (low, high))
        coarse = coarse_epsilon(events_at(found), delta)
        fine = epsilon(events_at(found), delta).pessimistic
        if abs(fine - budget) <= 1e-5 * budget or not coarse > 0 or not fine > 0:
            break
        aim = coarse * budget / fine
    return _verified(events_at, budget, delta, found, high)


def round_up(value: float, digits: int = DIGITS) -> float:
    """The next number with `digits` significant digits: more noise, never less.

    >>> round_up(3.730612), round_up(0.25)
    (3.7307, 0.25)
    """
    exact = decimal.Decimal(repr(float(value)))  # so that a rounded number stays as it is
    step = decimal.Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return float(exact.quantize(step, rounding=decimal.ROUND_CEILING))


def _guess(events_at: EventsAt, budget: float, delta: float, low: float, high: float) -> float:
    """Where the composed loss is as wide as that of one Gaussian that meets the budget."""
    wanted = 1 / gaussian.sigma(budget, delta)
    bottom, top = math.log(low), math.log(high)
    for _ in range(40):
        middle = 0.5 * (bottom + top)
        if merge(events_at(math.exp(middle))).spread() > wanted:
            bottom = middle
        else:
            top = middle
    return math.exp(top)


def _search(
    events_at: EventsAt, aim: float, delta: float, start: float, ends: tuple[float, float]
) -> float:
    """A scale whose coarse epsilon is at most `aim`, within _TOLERANCE of the smallest.

    Secant steps in log-log, where epsilon is close to a power of the scale, inside a bracket
    that halves whenever they leave it.
    """
    low, high = (math.log(end) for end in ends)
    x, slope = min(max(math.log(start), low), high), -1.0
    last: tuple[float, float] | None = None
    while high - low > _TOLERANCE:
        value = coarse_epsilon(events_at(math.exp(x)), delta)
        low, high = (low, x) if value <= aim else (x, high)
        miss = math.log(value / aim) if 0 < value < math.inf else math.nan
        if last is not None and math.isfinite(miss) and last[0] != x:
            slope = (miss - last[1]) / (x - last[0])
        last = (x, miss) if math.isfinite(miss) else None
        if abs(miss) < 0.4 * _TOLERANCE and value <= aim:
            break
        step = x - miss / slope if slope < 0 else math.nan
        # A nudge past the root, so that both ends of the bracket close in.
        step += math.copysign(0.2 * _TOLERANCE, miss) if value > aim else 0.0
        x = step if low < step < high else 0.5 * (low + high)
    return math.exp(high)


def _verified(events_at: EventsAt, budget: float, delta: float, found: float, high: float) -> float:
    """Round up, then step up by units of the last digit until the accountant agrees."""
    scale = round_up(found)
    for step in range(_STEPS_UP):
        if epsilon(events_at(scale), delta).pessimistic <= budget:
            return scale
        scale = round_up(scale * (1 + 10.0 ** (1 - DIGITS) * 1.2**step * 0.1))
        if scale > high:
            break
    raise BudgetError(
        f"no noise scale near {found:.5g} could be verified for epsilon {budget:g}",
        hint="declare a slightly larger epsilon or delta",
    )
