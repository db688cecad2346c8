"""What must be equal before runs are compared, and what their budgets add up to."""

from collections.abc import Iterator, Sequence
from typing import Any

from dpsynth.artifacts.files import canonical_json
from dpsynth.artifacts.ledger import Entry, Ledger
from dpsynth.assess.comparison.entrants import Entrant, labels
from dpsynth.console import counted
from dpsynth.errors import BudgetError, UsageError
from dpsynth.planning.units import unit_words

_ROUNDING = 1 + 1e-12  # as the ledger's own


def require_equal(entrants: Sequence[Entrant]) -> None:
    """Refuse, naming both, what cannot be compared: other budgets, records, images or ruler.

    Raises UsageError.
    """
    first = entrants[0]
    for other in entrants[1:]:
        for (what, own), (_, its) in zip(_facts(first), _facts(other), strict=True):
            if canonical_json(own) != canonical_json(its):
                raise UsageError(
                    f"{first.name} and {other.name} differ in {what}: {_said(own)} against "
                    f"{_said(its)}",
                    hint="compare plans that differ in their method alone",
                )
    _require_one_protocol(entrants)


def _facts(one: Entrant) -> Iterator[tuple[str, Any]]:
    """What every run of a comparison has in common, by the words for it."""
    budget, private = one.budget, one.facts["private"]
    for key, what in (("delta", "delta"), ("adjacency", "neighbours")):
        yield f"the budget's {what}", budget[key]
    yield "the unit of privacy", unit_words(budget["unit"])
    # Told before the place: the words say more than two paths would, and show none.
    yield "the private source", private["source"]
    yield "where the private records lie", _Place(one.places[0])
    yield "the image shape", private["image"]
    yield "classes", private["classes"]
    yield "the held-out rule", private["held_out"]
    yield "where the held-out records lie", _Place(one.places[1])
    yield "the declared capacity", private["capacity"]
    yield "what `private.public` declares", private["public"]
    yield "the evaluation's settings", one.facts["evaluation"]


class _Place(str):
    """A place of private records: compared, and never shown."""

    __slots__ = ()


def _said(value: Any) -> str:
    if isinstance(value, _Place):
        return "(one place)"
    text = value if isinstance(value, str) else canonical_json(value).decode()
    return text if len(text) <= 80 else f"{text[:79]}…"


def _require_one_protocol(entrants: Sequence[Entrant]) -> None:
    """Every method at the same epsilons: else a path would stand beside nothing, or a larger one.

    Raises UsageError that names one run of each.
    """
    named = labels(entrants)
    methods: dict[str, dict[float, Entrant]] = {}
    for one in entrants:
        methods.setdefault(named[one.run.root], {}).setdefault(one.epsilon, one)
    first = next(iter(methods.values()))
    for other in methods.values():
        if other.keys() == first.keys():
            continue
        left, right = (next(iter(m.values())) for m in (first, other))
        raise UsageError(
            f"{left.name} and {right.name} have different budgets: epsilon {_listed(first)} "
            f"against {_listed(other)}",
            hint="compare at equal budgets: --epsilon E (several) takes every plan at each of them",
        )


def _listed(at: dict[float, Entrant]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(at))


def require_allowed(entrants: Sequence[Entrant]) -> None:
    """Refuse fresh runs whose budgets may not add up, before the first of them is begun.

    Several runs of one plan need data that is declared public, or a cap that says how much all
    runs may spend. A cap holds for every run on the dataset, earlier ones too.

    Raises BudgetError.
    """
    fresh = [one for one in entrants if not one.started]
    _require_declared(entrants, fresh)
    totals: dict[Ledger, dict[str, float]] = {}
    for one in fresh:
        ledger = Ledger.beside(one.run.root, one.places[0])
        if ledger not in totals:
            totals[ledger] = spent_on(ledger)
        total = totals[ledger]
        for key in ("epsilon", "delta"):
            total[key] += one.budget[key]
            if one.cap is not None and total[key] > one.cap[key] * _ROUNDING:
                raise BudgetError(
                    f"with {one.name}, the {counted(len(fresh), 'fresh run')} of this comparison "
                    f"and earlier ones make {key} {total[key]:g} on the same private dataset, over "
                    f"the plan's cap of {one.cap[key]:g}",
                    hint="compare fewer runs, or lower budgets; what was spent stays spent",
                )


def _require_declared(entrants: Sequence[Entrant], fresh: Sequence[Entrant]) -> None:
    for one in fresh:
        several = [other for other in entrants if other.given == one.given]
        if len(several) > 1 and not one.public and one.cap is None:
            total = sum(other.epsilon for other in several)
            raise BudgetError(
                f"{len(several)} runs of {one.given.name} on private data spend epsilon "
                f"{total:g} together, and the plan has no cap that allows it",
                hint="declare `private: {cap: {epsilon: E, delta: D}}` for all runs on these "
                "records, or leave --repeat out and name one --epsilon",
            )


def spent_on(ledger: Ledger) -> dict[str, float]:
    """What all runs of a dataset may spend together: budgets add up."""
    found = entries_of(ledger)
    return {
        "epsilon": float(sum(entry.epsilon for entry in found)),
        "delta": float(sum(entry.delta for entry in found)),
    }


def entries_of(ledger: Ledger) -> list[Entry]:
    """The runs that a ledger lists; none where there is no ledger yet, which stays so."""
    return ledger.entries() if ledger.folder.is_dir() else []
