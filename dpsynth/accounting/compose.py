"""Composed epsilon of a list of events: privacy loss distributions, both directions.

The pessimistic value (dp-accounting's connect-the-dots) is what budgets are held to; the
optimistic one bounds how much of it is the grid's doing. The grid is refined until they
differ by less than 1% (docs/maths/accounting.md, "Composition").
"""

import math
from collections.abc import Iterable

from dp_accounting.pld import privacy_loss_distribution as pld

from dpsynth.accounting import checks, optimistic
from dpsynth.accounting.crosscheck import EpsilonBounds, cross_check
from dpsynth.accounting.events import ComposedEvent, Event, GaussianEvent, PoissonGaussianEvent
from dpsynth.accounting.merging import Merged, merge
from dpsynth.accounting.queries import CentralSums
from dpsynth.accounting.statistics import (
    BucketedGradientSums,
    ClippedGradientSum,
    Statistic,
    sensitivity,
)

__all__ = ["EpsilonBounds", "cross_check", "epsilon", "event_for"]

SMALLEST_DELTA = 1e-12
_GAP = 0.005  # of epsilon; 0.01 is promised
_SMALL = 1e-5  # a difference in epsilon that is not worth a finer grid
_REFINE = 4
_FIRST = 256  # grid points in one standard deviation of the composed loss
_FIRST_POINTS = 2**16
_MAX_POINTS = 2**20
_MAX_SPREAD = 1e3  # composed losses beyond about 1e6 / 2: no guarantee worth a number
_TRUNCATED = 1e-15  # tail mass that dp-accounting cuts at each composition


def event_for(
    statistic: Statistic, noise_std: float, rate: float | None = None, steps: int | None = None
) -> Event:
    """The event of releasing `statistic` under noise `noise_std` (same units).

    With `rate` and `steps`: `steps` releases, each over a fresh Poisson sample. A statistic with
    a clip for each time bucket makes one part for each clip (A17).

    Raises:
        AccountingError: a number out of range, only one of `rate` and `steps` given, neither for a
            statistic that is of steps alone, or both for one that no mechanism samples: amplified,
            its charge would say less than the release of all records spends.

    >>> from dpsynth.accounting.statistics import ClippedGradientSum
    >>> event_for(ClippedGradientSum(2.0), 3.0, 0.01, 100)
    PoissonGaussianEvent(noise_multiplier=1.5, rate=0.01, steps=100)
    """
    noise_std = checks.positive("noise_std", noise_std)
    if isinstance(statistic, BucketedGradientSums):
        return _bucketed(statistic, noise_std, rate, steps)
    multiplier = noise_std / sensitivity(statistic)
    _check_sampled(statistic, rate, steps)
    if rate is None:
        return GaussianEvent(multiplier)
    rate = checks.sampling_rate("rate", rate)
    return PoissonGaussianEvent(multiplier, rate, checks.whole("steps", steps))


def _check_sampled(statistic: Statistic, rate: float | None, steps: int | None) -> None:
    """Rate and steps go together, and only with what is summed over Poisson samples."""
    if (rate is None) is not (steps is None):
        raise checks.AccountingError(
            f"rate is {rate!r} and steps is {steps!r}; expected both, or neither"
        )
    if rate is None and isinstance(statistic, CentralSums):
        raise checks.AccountingError(f"{statistic.kind} is of steps; expected rate and steps")
    if rate is not None and not isinstance(statistic, ClippedGradientSum | CentralSums):
        raise checks.AccountingError(
            f"{statistic.kind} is a sum over all records; expected neither rate nor steps"
        )


def _bucketed(
    statistic: BucketedGradientSums, noise_std: float, rate: float | None, steps: int | None
) -> ComposedEvent:
    """One part for each clip: its steps are Gaussians of noise / clip on samples of their own."""
    rate = checks.sampling_rate("rate", rate)
    found = statistic.steps_by_clip(checks.whole("steps", steps))
    return ComposedEvent(
        tuple(
            PoissonGaussianEvent(noise_std / clip, rate, count)
            for clip, count in sorted(found.items(), reverse=True)
        )
    )


def epsilon(events: Iterable[Event], delta: float) -> EpsilonBounds:
    """Bounds on the epsilon of all `events` together at `delta`, add-or-remove-one.

    Cost is linear in the number of events. An `Unaccounted` event makes epsilon infinite.
    The result is the same for any order of the events.

    Raises:
        AccountingError: a delta, noise multiplier, rate or number of steps out of range.

    >>> bounds = epsilon([GaussianEvent(4.0), PoissonGaussianEvent(1.2, 0.02, 500)], 1e-5)
    >>> round(bounds.pessimistic, 3), bounds.grid
    (2.205, 0.001953125)
    """
    delta = checked_delta(delta)
    merged = merge(events)
    trivial = _trivial(merged)
    if trivial is not None:
        return trivial
    grid = first_grid(merged)
    while True:
        high = pessimistic_at(merged, delta, grid)
        finer = grid / _REFINE
        low = min(high, optimistic_at(merged, delta, finer))  # cheaper a point, slower to close
        close = high - low <= max(_GAP * high, _SMALL)
        if close or _points(merged, finer) > _MAX_POINTS:
            return EpsilonBounds(high, low, grid)
        grid = finer


def checked_delta(delta: float) -> float:
    """`delta` as a float that the accountant resolves."""
    delta = checks.open_fraction("delta", delta)
    if delta < SMALLEST_DELTA:
        raise checks.AccountingError(
            f"delta is {delta:g}; expected at least {SMALLEST_DELTA:g}, below which "
            "floating-point error is not negligible"
        )
    return delta


def _rounding(merged: Merged, delta: float) -> float:
    """What the fast Fourier transforms may add to or take from a tail of the composed loss.

    Measured in tests/accounting/test_optimistic_bound.py: at most 1e-16 for each step.
    """
    steps = sum(group.steps for group in merged.sampled)
    slack = 1e-14 + 2e-16 * steps
    if slack > delta / 4:
        raise checks.AccountingError(
            f"delta is {delta:g} with {steps} sampled steps; expected at least {4 * slack:.1e}, "
            "below which floating-point error is not negligible"
        )
    return slack


def coarse_epsilon(events: Iterable[Event], delta: float) -> float:
    """Pessimistic epsilon on the first grid alone: quick, for searches that verify later."""
    merged = merge(events)
    trivial = _trivial(merged)
    if trivial is not None:
        return trivial.pessimistic
    return pessimistic_at(merged, checked_delta(delta), first_grid(merged))


def first_grid(merged: Merged) -> float:
    """A power of two near 1/256 of the composed loss's standard deviation, not too fine."""
    grid = max(merged.spread() / _FIRST, _points(merged, 1.0) / _FIRST_POINTS)
    return float(2.0 ** math.floor(math.log2(grid)))


def _trivial(merged: Merged) -> EpsilonBounds | None:
    if merged.unaccounted:
        return EpsilonBounds(math.inf, math.inf, 0.0)
    if merged.gaussian is None and not merged.sampled:
        return EpsilonBounds(0.0, 0.0, 0.0)
    if merged.spread() > _MAX_SPREAD:  # no bound is computed: claim nothing on either side
        return EpsilonBounds(math.inf, 0.0, 0.0)
    return None


def _points(merged: Merged, grid: float) -> float:
    """About how many grid points the composed distribution takes."""
    spread = merged.spread()
    widest = spread * (spread + 20)
    for group in merged.sampled:
        one = (0.5 + 10 * group.sigma) / group.sigma**2
        widest = max(widest, min(one, one + math.log(group.rate) + 1) - math.log1p(-group.rate))
    return widest / grid


def pessimistic_at(merged: Merged, delta: float, grid: float) -> float:
    """Upper bound on epsilon by dp-accounting on one grid; the worse of both directions."""
    spare = delta - _rounding(merged, delta)
    return float(composed_at(merged, grid).get_epsilon_for_delta(spare))


def composed_at(merged: Merged, grid: float) -> pld.PrivacyLossDistribution:
    """dp-accounting's pessimistic privacy loss distribution of all groups, on one grid."""
    parts = []
    if merged.gaussian is not None:
        parts.append(pld.from_gaussian_mechanism(
            merged.gaussian, value_discretization_interval=grid))  # fmt: skip
    for group in merged.sampled:
        one = pld.from_gaussian_mechanism(
            group.sigma, sampling_prob=group.rate, value_discretization_interval=grid
        )
        parts.append(one.self_compose(group.steps))
    return _composed(parts)


def optimistic_at(merged: Merged, delta: float, grid: float) -> float:
    """Lower bound on epsilon on one grid; the worse of both directions."""
    groups = [(group.sigma, group.rate, group.steps) for group in merged.sampled]
    if merged.gaussian is not None:
        groups.append((merged.gaussian, 1.0, 1))
    bounds = [optimistic.gaussian_lower_bound(sigma, rate, grid) for sigma, rate, _ in groups]
    steps = [count for _, _, count in groups]
    # What rounding and truncation may have moved up is given back by asking at a larger delta.
    spare = delta + _rounding(merged, delta) + 4 * _TRUNCATED * len(groups)
    values = []
    for direction in ("remove", "add"):
        found = [getattr(bound, direction) for bound in bounds]
        parts = [
            pld.PrivacyLossDistribution(one.pmf.self_compose(n) if n > 1 else one.pmf)
            for n, one in zip(steps, found, strict=True)
        ]
        shift = math.fsum(n * one.shift for n, one in zip(steps, found, strict=True))
        values.append(float(_composed(parts).get_epsilon_for_delta(spare)) - shift)
    return max(0.0, *values)


def _composed(parts: list[pld.PrivacyLossDistribution]) -> pld.PrivacyLossDistribution:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.compose(part, tail_mass_truncation=_TRUNCATED)
    return whole
