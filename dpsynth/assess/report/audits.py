"""What an audit's report says, of whatever format: its verdict, its controls, its attacks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dpsynth.assess.report.measures import Measures, measures, name_of
from dpsynth.assess.report.tables import Cell, Table, interval, is_number, is_records
from dpsynth.released.page.render import number

_ATTACKS = {
    "attacks": "What each attack saw in the audit's own trainings. A bound above what is promised "
    "shows a fault; faults that were planted must be seen.",
    "own_run": "Membership of this run's own records, by its own model and samples.",
}
_ABOUT = {"text", "passed", "findings", "room"}
_COLUMNS = {
    "bound": "epsilon, at least",
    "auc": "AUC",
    "tpr_at_0.001": "found at 0.1% false alarms",
    "tpr_at_0.01": "found at 1% false alarms",
    "correct": "right",
}


@dataclass(frozen=True)
class Audit:
    """`passed`: None where the report has no verdict. `head`: the verdict in a line.

    `blocks`: the rest of it in words; one of several lines is a list.
    """

    passed: bool | None
    head: str
    blocks: tuple[tuple[str, ...], ...]
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def audit(report: Mapping[str, Any]) -> Audit:
    """An audit's report for a page; whatever it lacks has no line."""
    verdict = report.get("verdict")
    said: Mapping[str, Any] = verdict if isinstance(verdict, Mapping) else report
    passed, text = said.get("passed"), said.get("text", verdict)
    rest = {key: value for key, value in report.items() if key not in {"verdict", *_ATTACKS}}
    facts = [
        (name_of(key), number(value))
        for key, value in rest.items()
        if key not in _ABOUT and not isinstance(value, Mapping | list)
    ]
    found: Measures = measures({key: v for key, v in rest.items() if isinstance(v, Mapping | list)})
    return Audit(
        passed if isinstance(passed, bool) else None,
        *_in_blocks(text if isinstance(text, str) else ""),
        tuple(sorted(facts)),
        (*_attack_tables(report), *found.tables),
        tuple(found.notes),
    )


def _attack_tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """What each attack saw: of the audit's own trainings, and of the run's own records."""
    for key, caption in _ATTACKS.items():
        rows = report.get(key)
        if is_records(rows):
            columns = [c for c in _COLUMNS if any(c in row for row in rows)]
            yield Table(
                caption,
                ("attack", *(_COLUMNS[c] for c in columns)),
                tuple((_attack(row), tuple(_cell(row, c) for c in columns)) for row in rows),
            )


def _attack(row: Mapping[str, Any]) -> Cell:
    """An attack's name above its training and what was planted there."""
    planted = f"planted: {row['control']}" if row.get("control") else ""
    return Cell(number(row.get("attack")), planted or str(row.get("world") or ""))


def _cell(row: Mapping[str, Any], column: str) -> Cell:
    """A value above its interval, or above what it is compared with."""
    small = interval(row.get(f"{column}_interval"))
    if column == "bound" and is_number(row.get("promised")):
        small = f"promised {number(row['promised'])}"
    if column == "correct":
        small = f"of {number(row.get('guesses'))} guesses"
    return Cell(number(row.get(column)), small)


def _in_blocks(text: str) -> tuple[str, tuple[tuple[str, ...], ...]]:
    r"""A verdict's first line, and paragraphs and lists of the others.

    >>> _in_blocks("PASS.\nTried: a.\nSeen:\n- one\n- two")
    ('PASS.', (('Tried: a.',), ('Seen:',), ('one', 'two')))
    """
    head, *lines = text.splitlines() or [""]
    blocks: list[tuple[str, ...]] = []
    items: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("- "):
            items.append(line.removeprefix("- "))
            continue
        if items:
            blocks.append(tuple(items))
            items = []
        if line:
            blocks.append((line,))
    return head, tuple(blocks)
