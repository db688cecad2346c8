"""Private records as quantised codes: chunk by chunk, each record's a function of it alone.

What a mechanism reads is a stream: memory does not grow with the records. See docs/sources.md.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.lattice import quantise_rows
from dpsynth.private.together import Shard, shard
from dpsynth.public.representation import Representation
from dpsynth.vault import PrivacyUnits, Record, Units, open_private
from dpsynth.vault.split import content_hash, content_hashes

Codes = NDArray[np.int64]
Images = NDArray[np.uint8]
Moved = Callable[[float], None]
# Whole codes (m, d), and which of them (m,) are finite.
Part = tuple[NDArray[np.int32], NDArray[np.bool_]]

MOST_KEPT = 2**28
"""Bytes of codes, by the plan's own numbers, that are kept for the rounds after the first."""
# Images of a chunk (units are whole: a chunk may hold one unit's more), and numbers in its codes.
_ROWS, _NUMBERS = 2**14, 2**21
# Numbers of codes that are made at once: they stay in the processor's cache.
_NEAR = 2**17


@dataclass(frozen=True)
class UnitCodes:
    """Quantised codes of whole units: never released, dies in the mechanism.

    codes (n, d) int32 in steps of R / 2^16 (widen before a product: squares do not fit) and labels
    (n,) int64. sizes (u,) int64: images of each unit, which lie side by side; None where each
    record is a unit by itself.
    """

    codes: NDArray[np.int32]
    labels: Codes
    sizes: Codes | None = None

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
        representation: Representation,
        classes: int,
        *,
        ranks: Ranks = ALONE,
        keep: bool = False,
    ) -> None:
        self._units, self._representation, self._classes = units, representation, classes
        self._ranks, self._keep = ranks, keep
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
            self._units, self._representation, self._classes, ranks=self._ranks, moved=moved
        ):
            if self._keep:
                kept.append(chunk)
            yield chunk
        self._kept = kept if self._keep else None


def private_stream(
    verified: VerifiedPlan, representation: Representation, ranks: Ranks = ALONE, passes: int = 1
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
        keep=passes > 1 and is_kept(plan),
    )


def is_kept(plan: Plan) -> bool:
    """Whether codes are held between rounds: N x images of a unit x code x 4 bytes fit 2^28.

    A rule of declared numbers, never of the records: whether a stage reads them once or in each
    round says nothing of them.
    """
    column = plan.budget.column
    most = 1 if column is None else column.most
    return 4 * plan.private.capacity * most * plan.representation.code <= MOST_KEPT


def encoded(
    units: PrivacyUnits,
    representation: Representation,
    classes: int,
    rows: int | None = None,
    *,
    ranks: Ranks = ALONE,
    moved: Moved = lambda _: None,
) -> Iterator[UnitCodes]:
    """Codes of whole units, about `rows` images at a time; each image is encoded on its own.

    Where a record is a unit, a unit contributes its first record alone. A record whose code is
    not finite, or whose label is not declared, contributes nothing; nor does a unit without codes.
    """
    if rows is None:
        rows = max(1, min(_ROWS, _NUMBERS // representation.dim))
    # The first is empty, so that there is one where there is no unit.
    sizes = None if units.most is None else np.zeros(0, np.int64)
    yield UnitCodes(np.zeros((0, representation.dim), np.int32), np.zeros(0, np.int64), sizes)
    if isinstance(units, Units) and units.most is None:
        yield from _by_blocks(units, representation, classes, rows=rows, ranks=ranks, moved=moved)
    else:
        yield from _by_units(units, representation, classes, rows, ranks)


def _by_blocks(
    units: Units,
    representation: Representation,
    classes: int,
    *,
    rows: int,
    ranks: Ranks,
    moved: Moved,
) -> Iterator[UnitCodes]:
    """Records that are units, without an object for each."""
    done, own = 0.0, Shard(ranks)
    with _Encoder(representation) as encoder:
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
                chunk.add(encoder.quantised(images[part]), labels[part])
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

    def add(self, parts: Iterable[Part], labels: Codes) -> None:
        """Add what is finite; the parts are of records in the order of `labels`."""
        start = 0
        for whole, finite in parts:
            end = self.count + int(finite.sum())
            kept = slice(None) if finite.all() else finite
            self._codes[self.count : end] = whole[kept]
            self._labels[self.count : end] = labels[start : start + len(whole)][kept]
            self.count, start = end, start + len(whole)

    def taken(self) -> UnitCodes:
        return UnitCodes(self._codes[: self.count], self._labels[: self.count])


def _by_units(
    units: PrivacyUnits, representation: Representation, classes: int, rows: int, ranks: Ranks
) -> Iterator[UnitCodes]:
    waiting: list[list[Record]] = []
    images = 0
    with _Encoder(representation) as encoder:
        for unit in shard(units.records(), ranks, _mark):
            chosen = unit[:1] if units.most is None else unit
            waiting.append([record for record in chosen if 0 <= record.label < classes])
            images += len(waiting[-1])
            if images >= rows:
                yield _coded(waiting, units, encoder)
                waiting, images = [], 0
        if images:
            yield _coded(waiting, units, encoder)


def _mark(unit: list[Record]) -> bytes:
    """What tells whether two processes read the same unit."""
    return b"".join(content_hash(record, "shard") for record in unit)


def _coded(waiting: list[list[Record]], units: PrivacyUnits, encoder: "_Encoder") -> UnitCodes:
    """Codes of these units' records, of which there is one or more."""
    records = [record for unit in waiting for record in unit]
    parts = list(encoder.quantised(np.stack([record.image for record in records])))
    codes, finite = (np.concatenate(same) for same in zip(*parts, strict=True))
    labels = np.array([record.label for record in records], dtype=np.int64)
    if units.most is None:
        return UnitCodes(codes[finite], labels[finite])
    owners = np.repeat(np.arange(len(waiting)), [len(unit) for unit in waiting])
    sizes = np.bincount(owners[finite], minlength=len(waiting))
    return UnitCodes(codes[finite], labels[finite], sizes[sizes > 0])


class _Encoder(AbstractContextManager["_Encoder"]):
    """Encodes and quantises a few images at a time; elementwise codes by torch's many threads."""

    def __init__(self, representation: Representation) -> None:
        self._representation = representation
        self._step = max(1, _NEAR // representation.dim)
        threads = torch.get_num_threads() if representation.elementwise else 1
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def quantised(self, images: Images) -> Iterable[Part]:
        """Codes of some images after the other, and which of them are finite."""
        parts = (images[at : at + self._step] for at in range(0, len(images), self._step))
        return map(self._one, parts) if self._pool is None else self._pool.map(self._one, parts)

    def _one(self, images: Images) -> Part:
        exact = self._representation.encode_exact_many(images)
        return quantise_rows(exact, self._representation.radius)
