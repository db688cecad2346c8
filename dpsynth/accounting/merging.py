"""Events gathered into few groups, so that the cost of composing is linear in their number.

Gaussian mechanisms compose to one Gaussian exactly: their 1/sigma^2 add up (Dong, Roth and
Su 2022, "Gaussian Differential Privacy", corollary 3.3). Sampled ones of the same noise and
rate add their steps.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dpsynth.accounting import checks
from dpsynth.accounting.events import (
    ComposedEvent,
    Event,
    GaussianEvent,
    PoissonGaussianEvent,
    Unaccounted,
)


@dataclass(frozen=True, order=True)
class Sampled:
    """`steps` Gaussian mechanisms of `sigma` on Poisson samples at `rate` < 1."""

    sigma: float
    rate: float
    steps: int


@dataclass(frozen=True)
class Merged:
    """What a list of events amounts to; equal for any order of the same events.

    `gaussian` is the noise multiplier of all plain Gaussians together, None if there is none.
    """

    gaussian: float | None
    sampled: tuple[Sampled, ...]
    unaccounted: bool

    def spread(self) -> float:
        """Standard deviation of the composed privacy loss, by the central limit theorem.

        Used to choose grids and first guesses, never as a bound (Bu, Dong, Long and Su 2020,
        "Deep Learning with Gaussian Differential Privacy", corollary 4).
        """
        square = 0.0 if self.gaussian is None else self.gaussian**-2
        for group in self.sampled:
            inverse = group.sigma**-2
            grown = math.expm1(inverse) if inverse < 600 else math.inf
            square += group.steps * min(inverse, group.rate**2 * grown)
        return math.sqrt(square)


def merge(events: Iterable[Event]) -> Merged:
    """Check each event and gather the like ones.

    Raises:
        AccountingError: a noise multiplier, rate or number of steps that is out of range.

    >>> merge([GaussianEvent(2.0)] * 4).gaussian
    1.0
    """
    gaussians: Counter[float] = Counter()
    sampled: Counter[tuple[float, float]] = Counter()
    unaccounted = False
    for event in flat(events):
        match event:
            case GaussianEvent(sigma):
                gaussians[_sigma(sigma)] += 1
            case PoissonGaussianEvent(sigma, rate, steps):
                steps = checks.whole("steps", steps)
                if checks.sampling_rate("rate", rate) == 1:  # every record: no sampling at all
                    gaussians[_sigma(sigma)] += steps
                else:
                    sampled[_sigma(sigma), float(rate)] += steps
            case Unaccounted():
                unaccounted = True
            case _:
                raise checks.AccountingError(f"{type(event).__name__} is no accounting event")
    precision = math.fsum(count * sigma**-2 for sigma, count in gaussians.items())
    return Merged(
        gaussian=precision**-0.5 if gaussians else None,
        sampled=tuple(sorted(Sampled(*key, steps) for key, steps in sampled.items())),
        unaccounted=unaccounted,
    )


def flat(events: Iterable[Event]) -> Iterator[Event]:
    """The events, composed ones replaced by their parts."""
    for event in events:
        if isinstance(event, ComposedEvent):
            yield from event.parts
        else:
            yield event


def _sigma(value: float) -> float:
    sigma = checks.positive("noise multiplier", value)
    if not 1e-100 < sigma < 1e100:  # its inverse square must be a number too
        raise checks.AccountingError(f"noise multiplier is {value!r}; expected 1e-100 to 1e100")
    return sigma
