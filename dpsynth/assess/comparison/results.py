"""What a finished run amounts to: its budget, its spend, and what its evaluation measured."""

from collections.abc import Mapping
from typing import Any

from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.ledger import Ledger
from dpsynth.assess.comparison.entrants import Entrant
from dpsynth.errors import BudgetError, MissingError, typed
from dpsynth.planning.replay import replay
from dpsynth.planning.steps import status

SIDES = ("synthetic", "interval", "ceiling", "floor")


def result_of(entrant: Entrant, label: str, times: Mapping[str, Any]) -> dict[str, Any]:
    """A run as plain values, its transcript replayed; curator-only.

    `times`: what the comparison knows of its seconds.

    Raises:
        MissingError: it was not evaluated.
        ReplayError: its transcript does not hold.
        BudgetError: its private dataset's ledger does not list it.
    """
    found = status(entrant.run)
    report = read_json(entrant.run.curator / "evaluation.json")
    replayed = replay(entrant.run.root, partial=not found.state.closed)
    _require_listed(entrant, found.state.run_id)
    values = measures(report)
    if not values:
        raise MissingError(
            f"the evaluation of {entrant.name} has no measure",
            hint=typed("dpsynth", "evaluate", entrant.run.root),
        )
    return {
        "run": entrant.name,
        "plan": entrant.plan,
        "method": label,
        "kind": entrant.facts.get("method"),
        "epsilon": entrant.epsilon,
        "delta": entrant.budget["delta"],
        "spent": replayed.epsilon,
        "by_stage": {name: row["epsilon_alone"] for name, row in found.lock.by_stage.items()},
        "closed": found.state.closed,
        "verdict": replayed.verdict,
        "unsafe": replayed.unsafe,
        "plan_hash": found.lock.plan_hash,
        "run_id": found.state.run_id,
        "seconds": times.get("seconds"),
        "public_files_of": times.get("public_files_of"),
        "samples": report.get("samples", {}).get("count"),
        "protocol": report.get("protocol", {}),
        "measures": values,
    }


def measures(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The measures of an evaluation by name: each one's value, interval, ceiling and floor.

    >>> measures({"accuracy": {"synthetic": 0.5, "floor": 0.1, "n": {}}, "notes": []})
    {'accuracy': {'synthetic': 0.5, 'floor': 0.1}}
    """
    inception = report.get("inception")
    beside = {"fid": inception.get("fid")} if isinstance(inception, Mapping) else {}
    attributes = report.get("attributes")
    slots = attributes.get("slots", {}) if isinstance(attributes, Mapping) else {}
    named = {**report, **beside, **{f"attribute {name}": value for name, value in slots.items()}}
    return {
        key: {side: value[side] for side in SIDES if value.get(side) is not None}
        for key, value in named.items()
        if isinstance(value, Mapping) and isinstance(value.get("synthetic"), int | float)
    }


def _require_listed(entrant: Entrant, run_id: str | None) -> None:
    """A run on private data counts in its dataset's ledger, or its budget adds up nowhere."""
    ledger = Ledger.of(entrant.run)
    listed = ledger.folder.is_dir() and any(e.run_id == run_id for e in ledger.entries())
    if not entrant.public and not listed:
        raise BudgetError(
            f"{entrant.name} is in no ledger beside it: what it spent adds up nowhere",
            hint="put the run back beside the others, or restore its ledgers/ from a copy",
        )
