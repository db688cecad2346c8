"""A lower bound on epsilon from one run with canaries, some of whose coins were guessed.

Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", theorem 5.2 and
the algorithm of their appendix D; derivation and rounding in docs/maths/audit.md (R1 to R6).

The setting: m canaries, each put in by a fair coin of its own, independent of everything else.
From the output alone (not the coins) r of the coins are guessed, the others are left open, and v
guesses are right. Coins drawn so that exactly half the canaries go in are outside the theorem.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from dpsynth.accounting import checks

MOST_CANARIES = 1_000_000
FEWEST_GUESSES = 8
"""Below it, all right by chance is too likely for `default_guesses` to spend confidence on."""

_HALVINGS = 6
_BISECTIONS = 60
_SLACK = 1e-13
"""Relative rounding error of a p-value, for each guess (measured: below 2e-15)."""
_ORDER_SEED = 0x6F6E655F72756E  # of the fixed order among tied scores; no coin is drawn from it

Sides = Literal["both", "included"]


@dataclass(frozen=True)
class OneRunBound:
    """What one run shows: the mechanism is not (e, delta)-private for any e below `epsilon`.

    Attributes:
        epsilon: the lower bound, rounded down; 0 where nothing is shown.
        correct: right guesses, of those that the bound rests on.
        guesses: guesses made, as many included as excluded unless one side alone was asked.
        canaries: canaries with a coin.
        delta: delta at which the bound holds.
        confidence: of the bound over the run's randomness and the coins.
        tried: numbers of guesses tried; the confidence pays for all of them.
    """

    epsilon: float
    correct: int
    guesses: int
    canaries: int
    delta: float
    confidence: float
    tried: tuple[int, ...]


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Upper bound on the chance of `correct` or more right guesses under (epsilon, delta)-DP.

    Theorem 5.2 (R1): P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i, with W binomial of r and
    e^epsilon / (1 + e^epsilon). Rounded up.

    Args:
        correct: v, 0 to r.
        guesses: r, 0 to m. Fixed beforehand.
        canaries: m, 1 to a million.
        epsilon: 0 or more, finite.
        delta: 0 or more, below 1.

    Raises:
        AccountingError: a number out of range.

    >>> round(p_value(correct=75, guesses=100, canaries=1000, epsilon=0.673, delta=1e-4), 3)
    0.05
    """
    v, r, m = _counts(correct, guesses, canaries)
    if isinstance(epsilon, bool) or not 0 <= epsilon < math.inf:
        raise checks.AccountingError(f"epsilon is {epsilon!r}; expected a finite number, 0 or more")
    return _Tail(v, r, m, _delta(delta)).p_value(float(epsilon))


def epsilon_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float
) -> float:
    """The epsilon that `correct` of `guesses` right guesses rule out, rounded down; 0 if none.

    With probability of at least `confidence`, an (epsilon, delta)-private mechanism gives at most
    its epsilon here. The number of guesses must not depend on the coins; if the best of several
    is to be taken, use `best_over_guesses`. Cost: linear in the number of guesses.

    Args:
        correct: v, right guesses, 0 to r.
        guesses: r, guesses made, 0 to m.
        canaries: m, each included by a fair coin of its own.
        delta: 0 or more, below 1.
        confidence: above 0, below 1.

    Raises:
        AccountingError: a number out of range.

    >>> round(epsilon_lower_bound(75, 100, 1000, 1e-4, 0.95), 3)  # the paper's, appendix D
    0.673
    >>> epsilon_lower_bound(55, 100, 1000, 1e-4, 0.95)
    0.0
    """
    level = 1 - checks.open_fraction("confidence", confidence)
    return _lower_bound(*_counts(correct, guesses, canaries), _delta(delta), level)


def bound_at_guesses(
    scores: ArrayLike,
    included: ArrayLike,
    guesses: int,
    delta: float,
    confidence: float,
    *,
    sides: Sides = "both",
) -> OneRunBound:
    """The bound of one attack's scores with the number of guesses FIXED beforehand.

    Args:
        scores: float (m,), higher for canaries held to be included.
        included: bool (m,), the coins.
        guesses: chosen without looking at the coins.
        delta: as in `epsilon_lower_bound`.
        confidence: as in `epsilon_lower_bound`.
        sides: see `correct_guesses`.

    Raises:
        AccountingError: a number out of range, or scores and coins that do not fit.
    """
    return best_over_guesses(scores, included, delta, confidence, (guesses,), sides=sides)


def best_over_guesses(
    scores: ArrayLike,
    included: ArrayLike,
    delta: float,
    confidence: float,
    candidates: Sequence[int] | None = None,
    *,
    sides: Sides = "both",
) -> OneRunBound:
    """The best bound over several numbers of guesses, PAID FOR by a union bound (R6).

    Each of the K candidates is tested at (1 - confidence) / K, so that all K bounds hold together
    and the largest may be taken. The candidates themselves must be chosen without the coins.

    Args:
        scores: float (m,), higher for canaries held to be included.
        included: bool (m,), the coins.
        delta: 0 or more, below 1.
        confidence: of the bound that is returned.
        candidates: numbers of guesses; by default `default_guesses(m)`. One: no price.
        sides: see `correct_guesses`.

    Raises:
        AccountingError: a number out of range, or scores and coins that do not fit.

    >>> scores = np.arange(100)
    >>> found = best_over_guesses(scores, scores >= 50, 1e-5, 0.95)
    >>> found.guesses, found.correct, round(found.epsilon, 2), found.tried
    (100, 100, 3.1, (100, 50, 25, 12))
    """
    coins = np.asarray(included)
    if coins.ndim != 1:
        raise checks.AccountingError(f"coins are {coins.shape}; expected one row of canaries")
    tried = tuple(default_guesses(len(coins)) if candidates is None else candidates)
    if not tried:
        raise checks.AccountingError("no number of guesses is given; expected one or more")
    right = correct_guesses(scores, included, tried, sides).tolist()
    level = (1 - checks.open_fraction("confidence", confidence)) / len(tried)
    bounds = [
        _lower_bound(*_counts(v, r, len(coins)), _delta(delta), level)
        for v, r in zip(right, tried, strict=True)
    ]
    best = int(np.argmax(bounds))
    return OneRunBound(
        bounds[best], right[best], tried[best], len(coins), float(delta), float(confidence), tried
    )


def default_guesses(canaries: int) -> tuple[int, ...]:
    """All canaries, half of them, a quarter and so on: at most 6 numbers, none below 8.

    >>> default_guesses(200)
    (200, 100, 50, 25, 12)
    """
    halves = (canaries >> shift for shift in range(_HALVINGS))
    return tuple(r for r in halves if r >= FEWEST_GUESSES) or (canaries,)


def correct_guesses(
    scores: ArrayLike, included: ArrayLike, guesses: Sequence[int], sides: Sides = "both"
) -> NDArray[np.int64]:
    """Right guesses of each run, for each number of guesses.

    Of r guesses the ceil(r/2) highest scores are held to be included and the floor(r/2) lowest to
    be excluded; with `sides="included"` all r highest are held to be included. Tied scores are
    taken in a fixed order that has nothing to do with the coins.

    Args:
        scores: float (..., m), no NaN.
        included: bool (..., m).
        guesses: K numbers, each 0 to m.
        sides: "both", or "included" for attacks that say nothing of who is absent.

    Returns:
        int64 (..., K).

    Raises:
        AccountingError: shapes that differ, a NaN score, coins that are no booleans.

    >>> correct_guesses([0.9, 0.1, 0.8, 0.2], [True, False, False, False], [2, 4]).tolist()
    [2, 3]
    """
    values, coins = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if values.shape != coins.shape or values.ndim < 1 or coins.dtype != np.bool_:
        raise checks.AccountingError(
            f"scores are {values.shape} and coins {coins.dtype} {coins.shape}; expected "
            "numbers and booleans of one shape"
        )
    if np.isnan(values).any():
        raise checks.AccountingError("a score is not a number (NaN); expected one for each canary")
    m = values.shape[-1]
    fixed = np.random.default_rng(_ORDER_SEED).permutation(m)
    order = np.argsort(values[..., fixed], axis=-1, kind="stable")
    ranked = np.take_along_axis(coins[..., fixed], order, axis=-1)
    # hits[..., j]: included canaries among the j lowest.
    hits = np.zeros((*values.shape[:-1], m + 1), dtype=np.int64)
    np.cumsum(ranked, axis=-1, out=hits[..., 1:])
    found = np.empty((*values.shape[:-1], len(guesses)), dtype=np.int64)
    for place, number in enumerate(guesses):
        r = _whole("guesses", number, 0, m)
        low = 0 if sides == "included" else r // 2
        top = hits[..., m] - hits[..., m - (r - low)]
        found[..., place] = top + (low - hits[..., low])
    return found


class _Tail:
    """The p-value of R1 as a function of epsilon, binomial coefficients in logarithms."""

    def __init__(self, correct: int, guesses: int, canaries: int, delta: float) -> None:
        self._correct, self._guesses = correct, guesses
        self._price = 2 * canaries * delta
        k = np.arange(guesses + 1)
        self._wrong = guesses - k
        logs = special.gammaln(k + 1) + special.gammaln(self._wrong + 1)
        self._choose = special.gammaln(guesses + 1) - logs

    def p_value(self, epsilon: float) -> float:
        """Rounded up, at most one."""
        both = self._guesses * math.log1p(math.exp(-epsilon))
        mass = np.exp(self._choose - self._wrong * epsilon - both)
        v, alpha = self._correct, 0.0
        if v and self._price:
            alpha = float((np.cumsum(mass[:v][::-1]) / np.arange(1, v + 1)).max())
        exact = float(mass[v:].sum()) + self._price * alpha
        return min(1.0, exact * (1 + _SLACK * (self._guesses + 10)))


def _lower_bound(correct: int, guesses: int, canaries: int, delta: float, level: float) -> float:
    """Bisection whose lower end is always an epsilon that was itself rejected (R4)."""
    tail = _Tail(correct, guesses, canaries, delta)
    if tail.p_value(0.0) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while tail.p_value(high) < level:  # ends: the tail tends to one
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if tail.p_value(middle) < level else (low, middle)
    return low


def _counts(correct: int, guesses: int, canaries: int) -> tuple[int, int, int]:
    m = _whole("canaries", canaries, 1, MOST_CANARIES)
    r = _whole("guesses", guesses, 0, m)
    return _whole("correct", correct, 0, r), r, m


def _whole(name: str, value: object, least: int, most: int) -> int:
    """`value` (also a NumPy integer) as an int from `least` to `most`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool | np.bool_) or not least <= number <= most:
        raise checks.AccountingError(
            f"{name} is {value!r}; expected a whole number from {least:,} to {most:,}"
        )
    return number


def _delta(value: float) -> float:
    return 0.0 if value == 0 and value is not False else checks.open_fraction("delta", value)
