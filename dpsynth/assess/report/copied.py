"""The copy check on a page: its verdict above what was found in each space."""

from collections.abc import Mapping
from typing import Any

from dpsynth.assess.report.tables import Cell, Table, is_number, is_records
from dpsynth.released.page.render import number, share

_ROWS = (
    ("verdict", ""),
    ("samples that are copies", "too near for chance"),
    ("samples near to training records", "by chance below it"),
    ("lowest score of a sample", "lowest of a held-out record below it"),
    ("as many near ones by chance", "p-value, before the level is shared out"),
)


def copies_table(check: Mapping[str, Any]) -> Table | None:
    """A copy check as `evaluate` writes it, a column a space; None for one of another form.

    A score is a sample's distance to its nearest training record over that to its nearest held-out
    record. What else the report holds of a space is for machines.
    """
    spaces = check.get("spaces")
    verdict = check.get("verdict")
    if not is_records(spaces) or not isinstance(verdict, str):
        return None
    if not all(isinstance(space.get(key), str) for space in spaces for key in ("space", "verdict")):
        return None
    columns = [_column(space) for space in spaces]
    rows = zip((Cell(*row) for row in _ROWS), zip(*columns, strict=True), strict=True)
    names = [space["space"].split(" (")[0] for space in spaces]
    return Table(_caption(check, verdict), ("copy check", *names), tuple(rows))


def _caption(check: Mapping[str, Any], verdict: str) -> str:
    words = check.get("words")
    said = f"Copy check: {verdict}{f': {words}' if isinstance(words, str) else ''}."
    exact = check.get("exact_copies")
    if is_number(exact):
        said += f" Samples that equal a training record: {number(exact)}."
    return (
        f"{said} Score: distance to the nearest training record over that to the nearest held-out "
        "record; lower is nearer to training."
    )


def _column(space: Mapping[str, Any]) -> tuple[Cell, ...]:
    total = space.get("n_samples")
    return (
        Cell(space["verdict"]),
        Cell(number(space.get("copies")), f"of {number(total)}" if is_number(total) else ""),
        Cell(_share(space.get("close_share")), _by_chance(space)),
        Cell(number(space.get("least_score")), number(space.get("least_held_out_score"))),
        Cell(number(space.get("p_value"))),
    )


def _by_chance(space: Mapping[str, Any]) -> str:
    """The share's interval, and what is expected without any copying."""
    ends, expected = space.get("interval"), space.get("expected_share")
    said = []
    if isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends)):
        said.append(f"{_share(ends[0])} to {_share(ends[1])}")
    if is_number(expected):
        said.append(f"{_share(expected)} by chance")
    return "; ".join(said)


def _share(value: object) -> str:
    return share(float(value)) if is_number(value) else number(None)
