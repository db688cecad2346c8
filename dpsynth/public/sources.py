"""Public images, brought to the plan's image shape. Private paths never come here."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import DataError, MissingError
from dpsynth.planning.caption_rules import PUBLIC, CaptionRule
from dpsynth.planning.schema import ImageShape, Plan
from dpsynth.planning.source_kinds import Source
from dpsynth.public.own_samples import readable
from dpsynth.public.spool import in_parts, spooled
from dpsynth.readers import BadRecord, Item, UnreadableSourceError, open_source
from dpsynth.readers.picture import brought_to

DRAWN = ("letters", "glyphs")
"""Kinds of sources whose images are drawn by dpsynth: white strokes on black."""
_PART = 1_000


@dataclass(frozen=True)
class SourceFacts:
    """One public source as used: its kind, image count, classes, and a hash of its content."""

    kind: str
    count: int
    classes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for `public/sources.json`; no path is among them."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class PublicImages:
    """All public images of a plan, in the plan's order of sources.

    `images` uint8 (n, H, W, C); `labels` int64 (n,) in [0, classes), where each source's own
    classes are numbered after those of the sources before it. `captions` (n,): of a plan with
    captions, empty for images without one; None where no image has one.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: int
    sources: tuple[SourceFacts, ...]
    captions: tuple[str, ...] | None = None

    @property
    def source(self) -> NDArray[np.int64]:
        """Of which source each image is, (n,): its place in `sources`."""
        counts = [facts.count for facts in self.sources]
        return np.repeat(np.arange(len(counts)), counts)

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Which images (n,) come from a source of letters or glyphs."""
        kinds = np.array([facts.kind in DRAWN for facts in self.sources])
        return kinds[self.source]


def read_public(plan: Plan, run: RunDir | None = None) -> PublicImages:
    """Read every public source, resized (antialiased) and converted to the plan's image shape.

    Captions are read for a plan with captions alone: for all others the column `text` may stand
    in for a label. `run`: whose public room has the own samples of a frozen prior.

    Raises:
        DataError: a source or a record of it cannot be read.
        MissingError: a file or an optional install is absent, or own samples were not drawn yet.
    """
    image = plan.private.image
    given: list[list[NDArray[np.int64]]] = [[] for _ in plan.public]  # as each source has them
    texts: list[list[str]] = [[] for _ in plan.public]
    rule = None if plan.private.captions is None else PUBLIC

    def parts() -> Iterator[NDArray[np.uint8]]:
        for place, source in enumerate(plan.public):
            for part in _read_one(readable(source, run), image, rule):
                given[place].append(part.labels)
                texts[place] += part.texts
                yield part.images

    images = spooled(parts(), (image.height, image.width, image.channels), np.uint8)
    labels, facts, offset, start = [], list[SourceFacts](), 0, 0
    for source, read, captions in zip(plan.public, given, texts, strict=True):
        own = np.concatenate(read)
        values, indices = np.unique(own, return_inverse=True)
        labels.append(indices.astype(np.int64) + offset)
        digest = _sha256(images[start : start + len(own)], own, captions)
        facts.append(SourceFacts(source.kind, len(own), len(values), digest))
        offset, start = offset + len(values), start + len(own)
    every = tuple(chain.from_iterable(texts))
    captioned = every if any(every) else None
    return PublicImages(images, np.concatenate(labels), offset, tuple(facts), captioned)


class _Part(NamedTuple):
    """Some images of a source (n, H, W, C), fitted; labels (n,) as it has them, and captions."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    texts: list[str]


def _read_one(source: Source, shape: ImageShape, captions: CaptionRule | None) -> Iterator[_Part]:
    """One source by parts, of which there is one or more."""
    # Letters have no size of their own: they are drawn at the plan's.
    drawn = source.kind in DRAWN
    reader = open_source(source, None, shape if drawn else None, captions)
    missing = [path for path in reader.files() if not path.exists()]
    if missing:
        raise MissingError(
            f"the public {source.kind} source is not there: {missing[0]}",
            hint="correct its path under `public:` in the plan",
        )
    items, read = iter(reader), 0
    try:
        while part := list(islice(items, _PART)):
            yield _fitted(source.kind, part, shape)
            read += len(part)
    except UnreadableSourceError as error:
        raise DataError(f"{error.message}: {error.detail}") from error
    if not read:
        raise DataError(f"the public {source.kind} source holds no image")


def _fitted(kind: str, items: list[Item], shape: ImageShape) -> _Part:
    images, labels, texts = [], [], []
    for item in items:
        if isinstance(item, BadRecord):
            raise DataError(f"public {kind} source: {item.name}: {item.reason}")
        images.append(brought_to(item.image, shape))
        labels.append(item.label)
        texts.append(item.text)
    return _Part(np.stack(images), np.array(labels, dtype=np.int64), texts)


def _sha256(images: NDArray[np.uint8], labels: NDArray[np.int64], captions: list[str]) -> str:
    """Hash of what is used: shape, pixels, labels and captions of one source as read."""
    digest = hashlib.sha256(repr(images.shape).encode())
    for part in in_parts(images):
        digest.update(np.ascontiguousarray(part).tobytes())
    digest.update(labels.astype("<i8").tobytes())
    if any(captions):
        digest.update("\n".join(captions).encode())  # no caption has a line break
    return digest.hexdigest()
