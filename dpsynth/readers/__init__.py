"""Formats of labelled image data. Who may open which path is decided by vault and public."""

from collections.abc import Sequence

from dpsynth.errors import PlanError
from dpsynth.planning.caption_fits import has_captions
from dpsynth.planning.caption_rules import CaptionRule
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import (
    DigitsSource,
    FolderSource,
    GlyphsSource,
    IdxSource,
    LettersSource,
    NpzSource,
    Source,
)
from dpsynth.readers.records import (
    BadRecord,
    Block,
    Item,
    Record,
    RecordSource,
    UnitSource,
    UnreadableSourceError,
    block_rows,
    blocks_of,
    gathered,
)

__all__ = [
    "BadRecord",
    "Block",
    "Item",
    "Record",
    "RecordSource",
    "UnitSource",
    "UnreadableSourceError",
    "block_rows",
    "blocks_of",
    "gathered",
    "open_source",
    "open_units",
]


def open_source(
    source: Source,
    classes: Sequence[str] | None,
    image: ImageShape | None,
    captions: CaptionRule | None = None,
) -> RecordSource:
    """Open a declared source. Nothing is read before the first iteration.

    Args:
        source: what the plan declares, with paths that exist from here.
        classes: names of the declared classes; a record outside them is a BadRecord. None
            (public data alone) takes the classes as the source has them.
        image: the declared shape; a record of another shape or mode is a BadRecord. None
            (public data alone) takes images of any size.
        captions: how captions are read; None reads none. A record whose caption does not fit is a
            BadRecord.

    Raises:
        PlanError: a source of this kind has no captions, and the rule wants them.
        UnreadableSourceError: on iteration, where no record of the source is usable.
    """
    if captions is not None and not captions.lenient and not has_captions(source):
        raise PlanError(
            f"a source of kind {source.kind} has no captions as it is declared",
            hint="declare a source of kind folder, or of kind npz with `captions:`",
        )
    names = None if classes is None else tuple(classes)
    match source:
        case IdxSource():
            from dpsynth.readers.idx import IdxReader

            return IdxReader(source, names, image)
        case NpzSource():
            from dpsynth.readers.npz import NpzReader

            return NpzReader(source, names, image, captions=captions)
        case FolderSource():
            from dpsynth.readers.folder import FolderReader

            return FolderReader(source, names, image, captions=captions)
        case DigitsSource():
            from dpsynth.readers.builtin import DigitsReader

            return DigitsReader(names, image)
        case LettersSource():
            from dpsynth.readers.builtin import LettersReader

            return LettersReader(source, names, image)
        case GlyphsSource():
            from dpsynth.readers.builtin import GlyphsReader

            return GlyphsReader(source, names, image)


def open_units(
    source: Source,
    classes: Sequence[str],
    image: ImageShape,
    column: str,
    captions: CaptionRule | None = None,
) -> UnitSource:
    """Open a declared source whose `column` names each record's privacy unit.

    Arguments as for `open_source`. A record without a value there is a BadRecord.

    Raises:
        PlanError: a source of this kind has no columns (a plan that says so is refused before).
        UnreadableSourceError: on iteration, also where the source has no such column.
    """
    match source:
        case NpzSource():
            from dpsynth.readers.npz import NpzReader

            return NpzReader(source, tuple(classes), image, column, captions)
        case FolderSource():
            from dpsynth.readers.folder import FolderReader

            return FolderReader(source, tuple(classes), image, column, captions)
        case _:
            raise PlanError(
                f"a source of kind {source.kind} has no column {column}",
                hint="declare a source of kind folder or npz, or budget.unit: record",
            )
