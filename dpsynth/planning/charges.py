"""What a transcript's charges amount to: events, composed epsilon, a row for each mechanism.

Equal specifications are read once, so that the cost is linear in the charges and small.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from dpsynth.accounting.compose import EpsilonBounds, epsilon, event_for
from dpsynth.accounting.events import Event, PoissonGaussianEvent
from dpsynth.accounting.merging import flat
from dpsynth.accounting.statistics import Statistic, sensitivity, statistic_from_json
from dpsynth.artifacts.transcript import Line
from dpsynth.errors import DpsynthError, ReplayError


@dataclass(frozen=True)
class Row:
    """Charges of one mechanism: same statistic, noise and rate. `epsilon`: these alone.

    Where the clip differs by time bucket, `sensitivity` and `noise_multiplier` are those of the
    largest one; epsilon counts each step by its own.
    """

    mechanism: str
    executions: int
    steps: int | None
    rate: float | None
    sensitivity: float
    noise_multiplier: float
    epsilon: float


@dataclass(frozen=True, slots=True)
class Charge:
    """One `charge` line, understood. The sensitivity in `event` comes from the statistic."""

    stage: str
    statistic: Statistic
    noise_std: float
    event: Event
    rate: float | None
    steps: int | None


def read_charges(lines: Iterable[Line]) -> list[Charge]:
    """The charges among `lines`. ReplayError for one that no accountant can read."""

    @cache
    def statistic_of(items: tuple[tuple[str, object], ...]) -> Statistic:
        return statistic_from_json(dict(items))

    event_of = cache(event_for)
    charges = []
    for line in lines:
        if line["kind"] != "charge":
            continue
        try:
            statistic = statistic_of(_hashable(line["statistic"]))
            event = event_of(statistic, line["noise_std"], line["rate"], line["steps"])
        except (DpsynthError, TypeError, ValueError, AttributeError) as error:
            raise ReplayError(
                f"line {line['line']} is a charge that no accountant can read: {error}"
            ) from error
        noise, rate, steps = line["noise_std"], line["rate"], line["steps"]
        charges.append(Charge(str(line["stage"]), statistic, noise, event, rate, steps))
    return charges


def _hashable(spec: dict[str, object]) -> tuple[tuple[str, object], ...]:
    """A statistic's JSON object as a key of the cache: lists as tuples."""
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in spec.items())


def compose(charges: Sequence[Charge], delta: float) -> EpsilonBounds:
    """Bounds on the epsilon of all charges together. ReplayError where none can be computed."""
    try:
        return epsilon(gathered(charge.event for charge in charges), delta)
    except (DpsynthError, ValueError, ArithmeticError, MemoryError) as error:
        raise ReplayError(f"no accountant can compose the charges: {error}") from error


def gathered(events: Iterable[Event]) -> Iterator[Event]:
    """The same events, runs of equal sampled ones as one with all their steps."""
    for event, count in Counter(flat(events)).items():
        if isinstance(event, PoissonGaussianEvent):
            yield replace(event, steps=event.steps * count)
        else:
            yield from [event] * count


def rows(charges: Sequence[Charge], delta: float) -> list[Row]:
    """One row for charges of equal stage, statistic, noise and rate, in order of appearance."""
    groups: dict[tuple[object, ...], list[Charge]] = {}
    for charge in charges:
        key = (charge.stage, charge.statistic, charge.noise_std, charge.rate)
        groups.setdefault(key, []).append(charge)
    return [_row(group, delta) for group in groups.values()]


def _row(group: Sequence[Charge], delta: float) -> Row:
    first = group[0]
    steps = None if first.rate is None else sum(charge.steps or 0 for charge in group)
    return Row(
        mechanism=f"{first.stage}: {first.statistic.kind}",
        executions=len(group) if steps is None else steps,
        steps=steps,
        rate=first.rate,
        sensitivity=sensitivity(first.statistic),
        noise_multiplier=first.noise_std / sensitivity(first.statistic),
        epsilon=compose(group, delta).pessimistic,
    )
