"""An evaluation at a glance: the measured table with intervals, the copy check, and the notes."""

from collections.abc import Iterator
from typing import Any

from dpsynth.console import counted

ROWS = {
    "accuracy": "accuracy of a probe trained on synthetic alone",
    "accuracy_wide": "accuracy of the wide probe",
    "label_consistency": "label consistency",
    "domain_rate": "domain rate",
    "frechet": "Frechet distance",
    "per_class_frechet": "Frechet distance inside a class, mean",
    "kernel": "kernel distance (KID)",
    "precision": "precision",
    "recall": "recall",
    "density": "density",
    "coverage": "coverage",
    "diversity": "diversity inside a class, mean",
    "fid": "FID (Inception)",
    "lpips": "LPIPS between images of one caption",
}
"""Measures by their key in the report; attributes follow, one row a slot."""


def evaluation_text(evaluation: dict[str, Any]) -> Any:
    """The measured table, or how many findings there are and where, as a rich renderable."""
    from rich.console import Group
    from rich.text import Text

    from dpsynth.console import table

    measured = measures(evaluation)
    if not measured:
        what, where = counted(evaluation["findings"], "curator-only finding"), evaluation["where"]
        return Text(f"measured: {what} in {where}")
    names = _columns(evaluation)
    public = "the public reference" if evaluation.get("reference_declared_public") else ""
    against = public or ("the reference" if "sets" in evaluation else "held-out records")
    shown = table((f"measured on {against}", *names.values()), measured)
    return Group(shown, *map(Text, _lines(evaluation)))


def measures(evaluation: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Rows of the measured table; none where the values may not be shown."""
    columns = _columns(evaluation)
    return [
        (text, *(_cell(value, column) for column in columns))
        for text, value in _found(evaluation)
        if isinstance(value, dict)
    ]


def _found(evaluation: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of every measure that is there, in the table's order."""
    inception = evaluation.get("inception")
    beside = {"fid": inception.get("fid")} if isinstance(inception, dict) else {}
    for key, text in ROWS.items():
        yield text, {**evaluation, **beside}.get(key)
    attributes = evaluation.get("attributes")
    slots = attributes.get("slots") if isinstance(attributes, dict) else None
    for slot, value in (slots or {}).items():
        yield f"accuracy of attribute {slot}", value


def _cell(value: dict[str, Any], column: str) -> Any:
    found = value.get(column)
    if column == "interval" and found is not None:
        return f"{found[0]:.4g} to {found[1]:.4g}"
    return found


def _lines(evaluation: dict[str, Any]) -> Iterator[str]:
    """What stands below the table: the copy check in words, then the notes."""
    copies = evaluation.get("copies")
    if isinstance(copies, dict) and "words" in copies:
        yield f"copy check: {copies['words']}"
    for note in evaluation.get("notes", []):
        yield f"note: {note}"
    if evaluation.get("where"):
        yield f"report: {evaluation['where']}"


def _columns(evaluation: dict[str, Any]) -> dict[str, str]:
    """Columns of the measured table, by their key in a measure; those without a value are left out.

    Of an augmenting plan there is one more.
    """
    names = {
        "synthetic": "synthetic",
        "interval": "95% interval",
        "plain": "without augmentation",
        "ceiling": "ceiling",
        "floor": "floor",
    }
    found = [value for _, value in _found(evaluation) if isinstance(value, dict)]
    for optional in ("interval", "plain"):
        if not any(value.get(optional) is not None for value in found):
            del names[optional]
    return names
