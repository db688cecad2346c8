"""The one door to private records."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import UsageError
from dpsynth.planning.caption_fits import has_captions
from dpsynth.planning.caption_rules import caption_rule
from dpsynth.planning.schema import HashHeldOut, Private, SourceHeldOut
from dpsynth.planning.units import UnitColumn
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.readers import (
    BadRecord,
    Block,
    Item,
    Record,
    RecordSource,
    UnitSource,
    UnreadableSourceError,
    open_source,
    open_units,
)
from dpsynth.vault.grouping import Unit
from dpsynth.vault.split import held_out_rows, is_held_out, is_unit_held_out
from dpsynth.vault.units import NamedUnits, PrivacyUnits, Units

__all__ = [
    "BadRecord",
    "Block",
    "Item",
    "NamedUnits",
    "PrivacyUnits",
    "PrivateData",
    "Record",
    "Unit",
    "Units",
    "UnreadableSourceError",
    "open_private",
]


@dataclass(frozen=True)
class PrivateData:
    """Both sides of the declared split, and the sources they are read from."""

    train: Units
    held_out: Units
    sources: tuple[RecordSource, ...]

    def items(self) -> Iterator[tuple[str, Item]]:
        """Every record with its side, "train" or "held_out", in one pass over each source.

        Raises:
            UnreadableSourceError: a source as a whole is damaged.
        """
        sides = (("train", self.train), ("held_out", self.held_out))
        for source in self.sources:
            for item in source:
                for side, units in sides:
                    if units.source is source and units.keep(item):
                        yield side, item


def open_private(verified: VerifiedPlan) -> PrivateData:
    """Open the plan's private records. Nothing is read before the units are iterated.

    Raises:
        UsageError: anything but a VerifiedPlan was given.
    """
    if not isinstance(verified, VerifiedPlan):
        raise UsageError(
            f"private records open for a VerifiedPlan alone, got {type(verified).__name__}",
            hint="planning.verify.load_verified(RUN) makes one",
        )
    private, column = verified.plan.private, verified.plan.budget.column
    if column is not None:
        return _named(private, column)
    captions = caption_rule(private.captions, private.classes)
    source = open_source(private.source, private.classes, private.image, captions)
    match private.held_out:
        case HashHeldOut() as rule:
            train = Units(
                source, private.image, partial(_is_train, rule), rows=partial(_train_rows, rule)
            )
            held_out = Units(
                source, private.image, partial(_is_test, rule), rows=partial(_test_rows, rule)
            )
            return PrivateData(train, held_out, (source,))
        case SourceHeldOut() as rule:
            return _beside(Units(source, private.image, rows=_all_rows), private, rule)


def _named(private: Private, column: UnitColumn) -> PrivateData:
    """Units of several records. Held-out records of another source are read one by one."""
    captions = caption_rule(private.captions, private.classes)
    source = open_units(private.source, private.classes, private.image, column.column, captions)
    match private.held_out:
        case HashHeldOut() as rule:
            train = _side(source, private, column, rule, held_out=False)
            held_out = _side(source, private, column, rule, held_out=True)
            return PrivateData(train, held_out, (source,))
        case SourceHeldOut() as rule:
            return _beside(NamedUnits(source, private.image, images=column.most), private, rule)


def _side(
    source: UnitSource, private: Private, column: UnitColumn, rule: HashHeldOut, *, held_out: bool
) -> NamedUnits:
    """One side of the split by names. A bad record is on the training side, found once."""

    def named(name: str) -> bool:
        return is_unit_held_out(name, rule) is held_out

    def keep(item: Item) -> bool:
        return not held_out if isinstance(item, BadRecord) else named(item.unit)

    return NamedUnits(source, private.image, keep, column.most, named)


def _beside(train: Units, private: Private, rule: SourceHeldOut) -> PrivateData:
    """Training units, and held-out records from a source of their own.

    These need captions only where their source can have them: they are evaluated by class.
    """
    captions = caption_rule(private.captions, private.classes)
    captions = captions if has_captions(rule.source) else None
    other = open_source(rule.source, private.classes, private.image, captions)
    return PrivateData(train, Units(other, private.image, rows=_all_rows), (train.source, other))


def _is_train(rule: HashHeldOut, item: Item) -> bool:
    """A bad record is on this side, so that it is found once."""
    return isinstance(item, BadRecord) or not is_held_out(item, rule)


def _is_test(rule: HashHeldOut, item: Item) -> bool:
    return isinstance(item, Record) and is_held_out(item, rule)


def _all_rows(block: Block) -> NDArray[np.bool_]:
    return np.ones(len(block), np.bool_)


def _train_rows(rule: HashHeldOut, block: Block) -> NDArray[np.bool_]:
    return ~_test_rows(rule, block)


def _test_rows(rule: HashHeldOut, block: Block) -> NDArray[np.bool_]:
    return held_out_rows(block.images, block.labels, rule, block.texts)
