"""Tables of a page, and what kinds of them a report's JSON holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from dpsynth.released.page.render import number

_MOST_COLUMNS = 6
_LONG = 3  # entries of a list that still fit a cell


@dataclass(frozen=True)
class Cell:
    """A value as people read it, and what stands small beneath it."""

    text: str
    small: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its caption; a row is a heading and its cells.

    `heat`: of a matrix of counts, the share of its row that each cell has, 0 to 1; else empty.
    `words`: places of columns after the first that hold text, not numbers.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, tuple[Cell, ...]], ...]
    heat: tuple[tuple[float, ...], ...] = ()
    words: frozenset[int] = frozenset()


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_matrix(value: object) -> TypeGuard[list[list[float]]]:
    """Whether this is a matrix of as many rows as columns, such as a confusion matrix."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(isinstance(row, list) and len(row) == len(value) for row in value)
        and all(is_number(item) for row in value for item in row)
    )


def is_records(value: object) -> TypeGuard[list[Mapping[str, Any]]]:
    """Whether this is a list of entries, none of them nested."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(row, Mapping) and row for row in value)
        and not any(isinstance(item, Mapping) for row in value for item in row.values())
    )


def interval(value: object) -> str:
    """An interval as people read it; empty for anything else.

    >>> interval([0.25, 0.5]), interval({"low": 1, "high": 2, "level": 0.95}), interval(None)
    ('0.25 to 0.5', '1 to 2', '')
    """
    ends = [value.get("low"), value.get("high")] if isinstance(value, Mapping) else value
    if isinstance(ends, Sequence) and len(ends) == 2 and all(map(is_number, ends)):
        return f"{number(ends[0])} to {number(ends[1])}"
    return ""


def matrix_table(matrix: list[list[float]], caption: str, classes: Sequence[str]) -> Table:
    """A confusion matrix: a row for each true class, a column for each answer."""
    fits = len(classes) == len(matrix)
    labels = list(classes) if fits else [str(place) for place in range(len(matrix))]
    rows = [
        (Cell(label), tuple(Cell(number(item)) for item in row))
        for label, row in zip(labels, matrix, strict=True)
    ]
    totals = [sum(map(abs, row)) or 1.0 for row in matrix]
    heat = [
        tuple(min(1.0, abs(item) / total) for item in row)
        for row, total in zip(matrix, totals, strict=True)
    ]
    return Table(caption, ("true class", *labels), tuple(rows), tuple(heat))


def records_table(records: list[Mapping[str, Any]], caption: str) -> Table:
    """Entries as rows; as columns where they have more keys than a page is wide.

    Long lists are left out: they are for machines.
    """
    union = dict.fromkeys(key for record in records for key in record)
    keys = [k for k in union if not any(_is_long(record.get(k)) for record in records)]
    head = next((k for k in keys if all(isinstance(r.get(k), str) for r in records)), "")
    others = [key for key in keys if key != head]
    names = [number(record[head]) if head else str(n) for n, record in enumerate(records, start=1)]
    cells = [[Cell(_said(record.get(key))) for key in others] for record in records]
    if len(others) > _MOST_COLUMNS and len(records) < len(others):
        rows = list(
            zip((Cell(spaced(key)) for key in others), zip(*cells, strict=True), strict=True)
        )
        return Table(caption, ("", *names), tuple(rows))
    turned = [(Cell(name), tuple(row)) for name, row in zip(names, cells, strict=True)]
    words = {n for n, key in enumerate(others) if any(isinstance(r.get(key), str) for r in records)}
    columns = (spaced(head), *map(spaced, others))
    return Table(caption, columns, tuple(turned), words=frozenset(words))


def class_table(columns: Mapping[str, Sequence[Any]], caption: str, classes: list[str]) -> Table:
    """Values by class: one row a class."""
    rows = tuple(
        (Cell(label), tuple(Cell(number(values[y])) for values in columns.values()))
        for y, label in enumerate(classes)
    )
    return Table(caption, ("class", *columns), rows)


def spaced(key: str) -> str:
    """A key as people read it.

    >>> spaced("held_out_equal_to_training")
    'held out equal to training'
    """
    return key.replace("_", " ")


def _is_long(value: object) -> bool:
    return isinstance(value, list) and len(value) > _LONG


def _said(value: object) -> str:
    return interval(value) or number(value)
