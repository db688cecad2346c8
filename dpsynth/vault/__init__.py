"""The one door to private records."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from dpsynth.errors import UsageError
from dpsynth.planning.schema import HashHeldOut, SourceHeldOut
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.readers import (
    BadRecord,
    Item,
    Record,
    RecordSource,
    UnreadableSourceError,
    open_source,
)
from dpsynth.vault.split import is_held_out
from dpsynth.vault.units import Unit, Units

__all__ = [
    "BadRecord",
    "Item",
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
    private = verified.plan.private
    source = open_source(private.source, private.classes, private.image)
    match private.held_out:
        case HashHeldOut() as rule:
            train = Units(source, private.image, partial(_is_train, rule))
            held_out = Units(source, private.image, partial(_is_test, rule))
            return PrivateData(train, held_out, (source,))
        case SourceHeldOut() as rule:
            other = open_source(rule.source, private.classes, private.image)
            return PrivateData(
                Units(source, private.image), Units(other, private.image), (source, other)
            )


def _is_train(rule: HashHeldOut, item: Item) -> bool:
    """A bad record is on this side, so that it is found once."""
    return isinstance(item, BadRecord) or not is_held_out(item, rule)


def _is_test(rule: HashHeldOut, item: Item) -> bool:
    return isinstance(item, Record) and is_held_out(item, rule)
