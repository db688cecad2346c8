"""Whose records an audit trains on: the plan's private ones, or public ones in their place."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.rooms import RunDir
from dpsynth.assess.audit.canaries import ListedUnits, mark
from dpsynth.assess.audit.worlds import Coded, Pair
from dpsynth.planning.caption_rules import CaptionRule, caption_rule
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.encoding import CodeStream, is_kept
from dpsynth.private.lattice import CODE_MAX, quantise_rows
from dpsynth.public.representation import Representation
from dpsynth.public.sources import read_public
from dpsynth.vault import PrivacyUnits, Record, open_private

MOST_COMPARED = 2_000
"""Records of either side that the run's own model is asked about."""


@dataclass(frozen=True)
class Records:
    """Training units, some held-out records, and whether public images stand for private ones.

    marks: of every held-out image, see `canaries.mark`.
    """

    plan: Plan
    units: PrivacyUnits
    held_out: Pair
    marks: frozenset[bytes]
    public: bool

    @property
    def several(self) -> bool:
        """Whether units have several images."""
        return self.units.most is not None

    def stream(self, space: Representation) -> CodeStream:
        """Their codes, kept from the first pass on where the declared numbers allow it."""
        classes = self.plan.private.classes
        rule = None if self.public else caption_rule(self.plan.private.captions, classes)
        return CodeStream(
            self.units,
            space,
            self.plan.private.conditions if self.public else len(classes),
            keep=is_kept(self.plan),
            captions=rule,
        )

    def some(self) -> Pair:
        """At most 2,000 training records, each as likely as any other."""
        return _drawn(chain.from_iterable(self.units.records()), self.plan)


def private_records(verified: VerifiedPlan) -> Records:
    """The plan's own records. Nothing of the training side is read before it is iterated."""
    data = open_private(verified)
    marks = set[bytes]()

    def marked() -> Iterator[Record]:
        for item in data.held_out.items():
            if isinstance(item, Record):
                marks.add(mark(item.image))
                yield item

    held_out = _drawn(marked(), verified.plan)
    return Records(verified.plan, data.train, held_out, frozenset(marks), public=False)


def public_records(plan: Plan, run: RunDir | None = None) -> Records:
    """Public images in the private records' place: as many as declared, and others held out.

    Labels are the public sources' own, brought to the plan's conditions by their remainder.
    """
    public = read_public(plan, run)
    order = np.random.default_rng(plan.public_seed).permutation(len(public.labels))
    size = min(plan.private.capacity, max(1, len(order) - MOST_COMPARED, len(order) // 2))
    train, rest = order[:size], order[size : size + MOST_COMPARED]
    labels = public.labels % plan.private.conditions
    units = tuple((Record(public.images[i], int(labels[i])),) for i in train.tolist())
    held_out = np.ascontiguousarray(public.images[rest]), labels[rest]
    marks = frozenset(map(mark, held_out[0]))
    return Records(plan, ListedUnits(units), held_out, marks, public=True)


def coded(space: Representation, records: Pair) -> Coded:
    """Records with their codes as training takes them; those without a finite code are left out."""
    images, labels = records
    whole, finite = quantise_rows(space.encode_exact_many(images), space.radius)
    codes = whole[finite] * (space.radius / CODE_MAX)
    return Coded(images[finite], labels[finite], codes)


def _drawn(records: Iterator[Record], plan: Plan) -> Pair:
    """A random part of the records, in one pass and bounded memory."""
    kept: list[Record] = []
    source = np.random.default_rng()
    for seen, record in enumerate(records, start=1):
        if len(kept) < MOST_COMPARED:
            kept.append(record)
        elif (place := int(source.integers(seen))) < MOST_COMPARED:
            kept[place] = record
    shape = plan.private.image
    images: NDArray[np.uint8] = np.zeros(
        (len(kept), shape.height, shape.width, shape.channels), np.uint8
    )
    for place, record in enumerate(kept):
        images[place] = record.image
    rule = caption_rule(plan.private.captions, plan.private.classes)
    return images, np.array([_label(record, rule) for record in kept], dtype=np.int64)


def _label(record: Record, rule: CaptionRule | None) -> int:
    """The condition that a record's caption names, else its class."""
    found = rule.condition(record.text) if rule is not None else None
    return record.label if found is None else found
