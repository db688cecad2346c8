"""What epsilon means to an attacker: the best TPR at each FPR, from the composed privacy loss.

The hockey-stick divergences of both directions at all epsilons say more than one (epsilon, delta):
together they are the trade-off curve (f-DP; Dong, Roth and Su 2022, "Gaussian Differential
Privacy", section 2). Derivation and rounding: docs/maths/audit.md (R9 to R12).

An attacker is asked whether one record was in the data, and knows everything else. TPR is his
chance to say so when it was, FPR when it was not. All bounds are rounded up.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpsynth.accounting import checks
from dpsynth.accounting.compose import composed_at, first_grid
from dpsynth.accounting.events import Event
from dpsynth.accounting.merging import merge

Array = NDArray[np.float64]
Claim = Literal["present", "absent"]

FPRS = (0.001, 0.01, 0.1)
PRIORS = (0.5, 0.01)
_FLOAT = 1e-12  # relative; rounding of the lines' own arithmetic
_MOST_EPSILON = 600.0  # e^epsilon must be a number
_MOST_LINES = 8192
_MOST_SPREAD = 1e3  # as in `compose`: no bound is computed beyond
_BLOCK = 256


@dataclass(frozen=True)
class Curve:
    """Upper bounds on both hockey-stick divergences: the lines that the trade-off curve lies under.

    Attributes:
        epsilons: (k,), increasing from 0.
        present: (k,), delta with the record against without it, P(A) <= e^eps Q(A) + delta.
        absent: (k,), delta without it against with it.
        distance: total variation between the mechanism as run and as accounted (A7, summed),
            added to every bound.
    """

    epsilons: Array
    present: Array
    absent: Array
    distance: float = 0.0


@dataclass(frozen=True)
class Odds:
    """What a claim at one FPR is worth at most; each the worse of the claims present and absent.

    Attributes:
        fpr: share of false alarms that the attacker takes.
        tpr: bound on the share of records that he finds.
        posteriors: bounds on his belief after an alarm, for each of the priors asked.
    """

    fpr: float
    tpr: float
    posteriors: tuple[float, ...]


def curve(events: Iterable[Event], distance: float = 0.0) -> Curve:
    """The trade-off lines of all `events` together, add-or-remove-one, both directions.

    Pessimistic: dp-accounting's connect-the-dots, composed on the accountant's first grid, plus
    what transforms may take from a tail. `Unaccounted` events, or noise so small that the
    accountant computes nothing, give a curve that promises nothing.

    Args:
        events: of a run's charges or of a lock's slots, in any order.
        distance: see `Curve`.

    Raises:
        AccountingError: an event's number out of range.

    >>> from dpsynth.accounting.events import GaussianEvent
    >>> made = curve([GaussianEvent(1.0)])  # exact: Phi(Phi^-1(0.01) + 1) = 0.09236
    >>> percent_up(tpr(made, 0.01)), percent_up(advantage(made))
    ('9.3%', '38.3%')
    """
    merged = merge(events)
    if merged.unaccounted or merged.spread() > _MOST_SPREAD:
        return stated(math.inf, 0.0)
    if merged.gaussian is None and not merged.sampled:
        return stated(0.0, 0.0)
    whole = composed_at(merged, first_grid(merged))
    parts = [one.to_dense_pmf() for one in (whole._pmf_remove, whole._pmf_add)]
    highest = max((part._lower_loss + part.size) * part._discretization for part in parts)
    epsilons = np.linspace(0.0, min(max(highest, 1.0), _MOST_EPSILON), _MOST_LINES)
    steps = sum(group.steps for group in merged.sampled)
    present, absent = (_deltas(part, epsilons, steps) for part in parts)
    return Curve(epsilons, present, absent, distance)


def stated(epsilon: float, delta: float) -> Curve:
    """What (epsilon, delta) alone promises, nothing else being known; infinite: nothing.

    >>> percent_up(tpr(stated(1.0, 1e-5), 0.01)), percent_up(advantage(stated(1.0, 1e-5)))
    ('2.8%', '46.3%')
    """
    if epsilon > _MOST_EPSILON:
        epsilon, delta = 0.0, 1.0
    one, spare = np.array([float(epsilon)]), np.array([float(delta)])
    return Curve(one, spare, spare)


def tpr(of: Curve, fpr: float, claim: Claim = "present") -> float:
    """Upper bound on an attacker's TPR at `fpr`, for the claim that the record is there (or not).

    Raises:
        AccountingError: an fpr outside [0, 1].
    """
    return float(tprs(of, [fpr], claim)[0])


def tprs(of: Curve, fprs: ArrayLike, claim: Claim = "present") -> Array:
    """`tpr` at many rates (k,): points of the trade-off curve, TPR against FPR (R9).

    Under the claim "absent" a true positive is a record that is called absent and was.
    """
    asked = np.asarray(fprs, dtype=np.float64)
    if asked.ndim != 1 or not ((asked >= 0) & (asked <= 1)).all():
        raise checks.AccountingError("a false positive rate lies outside 0 to 1")
    there, away = of.present + _FLOAT, of.absent + _FLOAT
    if claim == "absent":
        there, away = away, there
    with_noise = np.minimum(asked + of.distance, 1.0)
    grown, shrunk = np.exp(of.epsilons), np.exp(-of.epsilons)
    found = np.empty_like(asked)
    for start in range(0, len(asked), _BLOCK):
        x = with_noise[start : start + _BLOCK, None]
        rising = (grown * x + there).min(axis=1)
        falling = (1 - shrunk * (1 - x - away)).min(axis=1)
        found[start : start + _BLOCK] = np.minimum(rising, falling)
    return np.clip(found * (1 + _FLOAT) + of.distance, 0.0, 1.0)


def advantage(of: Curve) -> float:
    """Upper bound on TPR - FPR of any attacker, for either claim (R10).

    At each epsilon the two lines cross at an advantage of (e^eps - 1 + delta + delta') /
    (e^eps + 1); the least of these holds. At epsilon 0 it is the total variation.
    """
    spare = of.present + of.absent + 2 * _FLOAT
    found = np.tanh(of.epsilons / 2) + spare / (np.exp(of.epsilons) + 1)
    return min(1.0, float(found.min()) * (1 + _FLOAT) + 2 * of.distance)


def posterior(prior: float, tpr: float, fpr: float) -> float:
    """Belief after a positive claim, by Bayes' rule: prior odds times TPR / FPR (R11), rounded up.

    Raises:
        AccountingError: a number that is no fraction above 0 and, but for `tpr`, below 1.

    >>> percent_up(posterior(0.5, tpr=0.093, fpr=0.01)), percent_up(posterior(0.01, 0.093, 0.01))
    ('90.3%', '8.6%')
    """
    prior = checks.open_fraction("prior", prior)
    fpr, tpr = checks.open_fraction("fpr", fpr), checks.sampling_rate("tpr", tpr)
    held = prior * tpr
    return min(1.0, held / (held + (1 - prior) * fpr) * (1 + _FLOAT))


def odds(
    of: Curve, fprs: Iterable[float] = FPRS, priors: tuple[float, ...] = PRIORS
) -> tuple[Odds, ...]:
    """The bounds at each of `fprs` for a report: TPR, and belief from each of `priors`.

    An attacker who alarms more rarely may be surer of the few alarms he gives.

    Raises:
        AccountingError: a rate or prior outside 0 to 1, ends excluded.
    """
    rows = []
    for fpr in fprs:
        checks.open_fraction("fpr", fpr)
        most = max(tpr(of, fpr, "present"), tpr(of, fpr, "absent"))
        rows.append(Odds(fpr, most, tuple(posterior(prior, most, fpr) for prior in priors)))
    return tuple(rows)


def percent_up(share: float, digits: int = 1) -> str:
    """A bound as a percentage, rounded up, so that the text claims no more than the number.

    What lies less than 1e-9 above a printed number counts as that number: bounds carry about 1e-12
    of rounding, and 50% shall not read 50.1%.

    >>> percent_up(0.09201), percent_up(0.5 + 1e-12), percent_up(1.0)
    ('9.3%', '50%', '100%')
    """
    unit = Decimal(1).scaleb(-digits)
    percent = Decimal(repr(round(float(share), 9))) * 100
    return f"{percent.quantize(unit, rounding=ROUND_CEILING).normalize():f}%"


def _deltas(part: Any, epsilons: Array, steps: int) -> Array:
    """Upper bound on one direction's divergence at each of `epsilons`."""
    # What the transforms lose from a tail (as in `compose`), and the library's running sums.
    slack = 1e-14 + 2e-16 * steps + part.size * 2.0**-52
    found = np.asarray(part.get_delta_for_epsilon(epsilons), dtype=np.float64)
    bounded: Array = np.minimum(np.maximum(found, 0.0) + slack, 1.0)
    return bounded
