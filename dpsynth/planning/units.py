"""The unit of privacy: what one step between neighbouring data sets adds or removes.

One record, or all records that share a value of a column (a patient, an author).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator

from dpsynth.planning.section import Section, misfit
from dpsynth.planning.source_kinds import FolderSource, NpzSource, Source

RECORD = "record"
MOST_IMAGES = 1024


class UnitColumn(Section):
    """Units of several images: records with the same text in `column` are one unit.

    `column`: of a folder's metadata file, or an array of an NPZ archive. `most`: images of a unit
    that count; of more, those whose content hashes are smallest.
    """

    column: Annotated[str, Field(min_length=1, max_length=64)]
    most: Annotated[int, Field(ge=1, le=MOST_IMAGES)]

    @field_validator("column")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if value != value.strip() or not value.isprintable() or "`" in value:
            raise ValueError("a column's name is printable text without outer spaces or backticks")
        return value


def _kind(value: Any) -> str:
    return "several" if isinstance(value, Mapping | UnitColumn) else RECORD


PrivacyUnit = Annotated[
    Annotated[Literal["record"], Tag(RECORD)] | Annotated[UnitColumn, Tag("several")],
    Discriminator(_kind),
]


def read_unit(value: object) -> UnitColumn | None:
    """The unit that a lock or a transcript names; None for a record.

    Raises:
        ValueError: no unit that this version knows.
    """
    if value == RECORD:
        return None
    try:
        return UnitColumn.model_validate(value)
    except ValidationError as error:
        raise ValueError("no unit of privacy that this version knows") from error


def require_units(unit: UnitColumn, source: Source, sensitivity: str | None) -> None:
    """Raise ValueError where a plan's source or release cannot tell or bound units of a column."""
    if not isinstance(source, FolderSource | NpzSource):
        raise misfit(
            f"budget.unit names a column, and a source of kind {source.kind} has none: "
            "it needs private.source of kind folder (with a metadata file) or npz",
            "budget.unit",
        )
    _require_whose(unit, source)
    if sensitivity == "paper":
        raise misfit(
            "sensitivity: paper bounds one record alone: budget.unit with a column needs "
            "sensitivity: tight",
            "stages.moments.sensitivity",
        )


def _require_whose(unit: UnitColumn, source: FolderSource | NpzSource) -> None:
    """Refuse a column that says what an image shows, not whose it is.

    All images of a class would be one unit, of which `most` count: a release of next to nothing.
    """
    arrays = {source.labels, source.images} if isinstance(source, NpzSource) else set[str]()
    if unit.column in {"label", *arrays}:
        raise misfit(
            f"budget.unit.column is {unit.column}, which says what an image shows, not whose it "
            "is: a unit is all images of one person or thing",
            "budget.unit.column",
            hint="name the column that tells whose an image is, such as "
            "`unit: {column: patient, most: 8}`, or write `unit: record`",
        )


def require_named(held_out: str) -> None:
    """Raise ValueError where held-out records are measured by a release, and name no unit.

    Those of a source of their own are read one by one: of one unit any number would count.
    """
    if held_out != "hash":
        raise misfit(
            "stages.evaluation bounds what a whole unit adds, and held-out records of a source of "
            "their own name no unit",
            "private.held_out",
            "stages.evaluation",
            hint="write `held_out: {by: hash, fraction: 0.1}`, or leave stages.evaluation out",
        )


def unit_words(value: object) -> str:
    """The unit that a lock or a transcript names, for people.

    Raises ValueError as `read_unit` does.

    >>> unit_words("record"), unit_words({"column": "patient", "most": 8})
    ('record', 'patient (column patient), up to 8 images')
    """
    unit = read_unit(value)
    if unit is None:
        return RECORD
    images = "image" if unit.most == 1 else "images"
    return f"{unit.column} (column {unit.column}), up to {unit.most} {images}"
