"""Private records as quantised codes: chunk by chunk, each record's a function of it alone.

What a mechanism reads is a stream: memory does not grow with the records. See docs/sources.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.planning.caption_rules import CaptionRule, caption_rule
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.coding import CodeSpace, Encoder
from dpsynth.private.together import Shard, shard
from dpsynth.vault import PrivacyUnits, Record, Units, open_private
from dpsynth.vault.split import content_hash, content_hashes

Codes = NDArray[np.int64]
Images = NDArray[np.uint8]
Moved = Callable[[float], None]

MOST_KEPT = 2**28
"""Bytes of codes, by the plan's own numbers, that are kept for the rounds after the first."""
# Images of a chunk (units are whole: a chunk may hold one unit's more), and numbers in its codes.
_ROWS, _NUMBERS = 2**14, 2**21
# Bytes of images that wait to be encoded, where units come one by one.
_WAITING = 2**26


@dataclass(frozen=True)
class UnitCodes:
    """Quantised codes of whole units: never released, dies in the mechanism.

    codes (n, d) int32 in steps of R / 2^16 (widen before a product: squares do not fit), or ids of
    private tokens. labels (n,) int64: classes, or conditions where captions follow a template.
    sizes (u,) int64: images of each unit, which lie side by side; None where each record is a unit
    by itself. captions (n,): their texts, where these are free.
    """

    codes: NDArray[np.int32]
    labels: Codes
    sizes: Codes | None = None
    captions: tuple[str, ...] | None = None

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.labels if self.sizes is None else self.sizes)


class CodeStream:
    """The codes of a process's shard, chunk by chunk; iterating anew reads the records anew.

    `keep`: hold the chunks of the first pass, so that later ones read nothing. Iterate to the end:
    only then is it sure that all processes read the same records. The first chunk may be empty,
    and there always is one.
    """

    def __init__(
        self,
        units: PrivacyUnits,
        representation: CodeSpace,
        classes: int,
        *,
        ranks: Ranks = ALONE,
        keep: bool = False,
        captions: CaptionRule | None = None,
    ) -> None:
        self._units, self._representation, self._classes = units, representation, classes
        self._ranks, self._keep, self._captions = ranks, keep, captions
        self._kept: list[UnitCodes] | None = None

    def __iter__(self) -> Iterator[UnitCodes]:
        return self.chunks()

    def chunks(self, moved: Moved = lambda _: None) -> Iterator[UnitCodes]:
        """The chunks; `moved` is told how much of the source was read since it was told last."""
        if self._kept is not None:
            yield from self._kept
            return
        kept = []
        for chunk in encoded(
            self._units,
            self._representation,
            self._classes,
            ranks=self._ranks,
            moved=moved,
            captions=self._captions,
        ):
            if self._keep:
                kept.append(chunk)
            yield chunk
        self._kept = kept if self._keep else None


def private_stream(
    verified: VerifiedPlan, representation: CodeSpace, ranks: Ranks = ALONE, passes: int = 1
) -> CodeStream:
    """Codes of the training side, of this process's shard of it, for so many passes.

    Iterate after the charge: then private records are read.
    """
    plan = verified.plan
    return CodeStream(
        open_private(verified).train,
        representation,
        len(plan.private.classes),
        ranks=ranks,
        keep=passes > 1 and is_kept(plan, representation.dim),
        captions=caption_rule(plan.private.captions, plan.private.classes),
    )


def is_kept(plan: Plan, dim: int = 0) -> bool:
    """Whether codes are held between rounds: N x images of a unit x code x 4 bytes fit 2^28.

    `dim`: of the space they are encoded in, where that may be larger than the plan's code.

    A rule of declared numbers, never of the records: whether a stage reads them once or in each
    round says nothing of them.
    """
    column = plan.budget.column
    most = 1 if column is None else column.most
    return 4 * plan.private.capacity * most * max(plan.representation.code, dim) <= MOST_KEPT


def encoded(
    units: PrivacyUnits,
    representation: CodeSpace,
    classes: int,
    rows: int | None = None,
    *,
    ranks: Ranks = ALONE,
    moved: Moved = lambda _: None,
    captions: CaptionRule | None = None,
) -> Iterator[UnitCodes]:
    """Codes of whole units, about `rows` images at a time; each image is encoded on its own.

    Where a record is a unit, a unit contributes its first record alone. A record whose code is
    not finite, or whose label or caption (`captions`) is not declared, contributes nothing; nor
    does a unit without codes.
    """
    if rows is None:
        rows = max(1, min(_ROWS, _NUMBERS // representation.dim))
    # The first is empty, so that there is one where there is no unit.
    sizes = None if units.most is None else np.zeros(0, np.int64)
    texts = None if captions is None or captions.is_template else ()
    yield UnitCodes(
        np.zeros((0, representation.dim), np.int32), np.zeros(0, np.int64), sizes, texts
    )
    if captions is None and isinstance(units, Units) and units.most is None:
        yield from _by_blocks(units, representation, classes, rows=rows, ranks=ranks, moved=moved)
    else:
        yield from _by_units(units, representation, _Counted(classes, captions), rows, ranks)


def _by_blocks(
    units: Units,
    representation: CodeSpace,
    classes: int,
    *,
    rows: int,
    ranks: Ranks,
    moved: Moved,
) -> Iterator[UnitCodes]:
    """Records that are units, without an object for each."""
    done, own = 0.0, Shard(ranks)
    with Encoder(representation) as encoder:
        chunk = _Chunk(rows, representation.dim)
        for block in units.blocks():
            marks = partial(content_hashes, block.images, block.labels, "shard")
            mine = own.take(len(block.labels), marks)
            images, labels = block.images[mine], block.labels[mine]
            known = (labels >= 0) & (labels < classes)
            if not known.all():
                images, labels = images[known], labels[known]
            for start in range(0, len(labels), rows):
                part = slice(start, start + rows)
                if not chunk.has_room(len(labels[part])):
                    yield chunk.taken()
                    chunk = _Chunk(rows, representation.dim)
                chunk.add(encoder, images[part], labels[part])
            moved(block.done - done)
            done = block.done
        own.finish()
        if chunk.count:
            yield chunk.taken()


class _Chunk:
    """Codes and labels of the records that came so far, `count` of the rows there is room for."""

    def __init__(self, rows: int, dim: int) -> None:
        self._codes, self._labels = np.empty((rows, dim), np.int32), np.empty(rows, np.int64)
        self.count = 0

    def has_room(self, more: int) -> bool:
        return self.count + more <= len(self._labels)

    def add(self, encoder: "Encoder", images: Images, labels: Codes) -> None:
        """Add what is finite of some images' codes, which are written where they stay."""
        room = self._codes[self.count : self.count + len(labels)]
        finite = encoder.quantise(images, room)
        if not finite.all():
            labels, kept = labels[finite], room[finite]
            room[: len(kept)] = kept
        self._labels[self.count : self.count + len(labels)] = labels
        self.count += len(labels)

    def taken(self) -> UnitCodes:
        return UnitCodes(self._codes[: self.count], self._labels[: self.count])


@dataclass(frozen=True)
class _Counted:
    """Which of a unit's records count, and for what."""

    classes: int
    captions: CaptionRule | None

    def group(self, record: Record) -> int | None:
        """A record's class, or a template's condition; None where it counts for nothing."""
        if not 0 <= record.label < self.classes:
            return None
        if self.captions is None or not self.captions.is_template:
            return record.label
        return self.captions.condition(record.text)

    def of(self, unit: list[Record]) -> list[tuple[Record, int]]:
        """The records that count, each with what it counts for."""
        groups = ((record, self.group(record)) for record in unit)
        return [(record, group) for record, group in groups if group is not None]

    def texts(self, records: list[Record], finite: NDArray[np.bool_]) -> tuple[str, ...] | None:
        """Free captions of the records whose codes are finite (n,); None where none are free."""
        if self.captions is None or self.captions.is_template:
            return None
        return tuple(record.text for record, kept in zip(records, finite, strict=True) if kept)


def _by_units(
    units: PrivacyUnits,
    representation: CodeSpace,
    counted: _Counted,
    rows: int,
    ranks: Ranks,
) -> Iterator[UnitCodes]:
    waiting: list[list[tuple[Record, int]]] = []
    images = held = 0
    with Encoder(representation) as encoder:
        for unit in shard(units.records(), ranks, _mark):
            waiting.append(counted.of(unit[:1] if units.most is None else unit))
            images += len(waiting[-1])
            held += sum(record.image.nbytes for record, _ in waiting[-1])
            if images >= rows or held >= _WAITING:
                yield _coded(waiting, units, encoder, counted)
                waiting, images, held = [], 0, 0
        if images:
            yield _coded(waiting, units, encoder, counted)


def _mark(unit: list[Record]) -> bytes:
    """What tells whether two processes read the same unit."""
    return b"".join(content_hash(record, "shard") for record in unit)


def _coded(
    waiting: list[list[tuple[Record, int]]],
    units: PrivacyUnits,
    encoder: "Encoder",
    counted: _Counted,
) -> UnitCodes:
    """Codes of these units' records, of which there is one or more."""
    records = [record for unit in waiting for record, _ in unit]
    codes = np.empty((len(records), encoder.dim), np.int32)
    finite = encoder.quantise(np.stack([record.image for record in records]), codes)
    labels = np.array([group for unit in waiting for _, group in unit], dtype=np.int64)
    texts = counted.texts(records, finite)
    if units.most is None:
        return UnitCodes(codes[finite], labels[finite], captions=texts)
    owners = np.repeat(np.arange(len(waiting)), [len(unit) for unit in waiting])
    sizes = np.bincount(owners[finite], minlength=len(waiting))
    return UnitCodes(codes[finite], labels[finite], sizes[sizes > 0], texts)
