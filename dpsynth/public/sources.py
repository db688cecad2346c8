"""Public images, brought to the plan's image shape. Private paths never come here."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import DataError, MissingError
from dpsynth.planning.schema import ImageShape, Plan
from dpsynth.planning.source_kinds import Source
from dpsynth.public.spool import in_parts, spooled
from dpsynth.readers import BadRecord, Item, Record, UnreadableSourceError, open_source

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
    classes are numbered after those of the sources before it.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: int
    sources: tuple[SourceFacts, ...]

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


def read_public(plan: Plan) -> PublicImages:
    """Read every public source, resized (antialiased) and converted to the plan's image shape.

    Raises:
        DataError: a source or a record of it cannot be read.
        MissingError: a file or an optional install is absent.
    """
    image = plan.private.image
    given: list[list[NDArray[np.int64]]] = [[] for _ in plan.public]  # as each source has them

    def parts() -> Iterator[NDArray[np.uint8]]:
        for source, own in zip(plan.public, given, strict=True):
            for images, labels in _read_one(source, image):
                own.append(labels)
                yield images

    images = spooled(parts(), (image.height, image.width, image.channels), np.uint8)
    labels, facts, offset, start = [], list[SourceFacts](), 0, 0
    for source, read in zip(plan.public, given, strict=True):
        own = np.concatenate(read)
        values, indices = np.unique(own, return_inverse=True)
        labels.append(indices.astype(np.int64) + offset)
        digest = _sha256(images[start : start + len(own)], own)
        facts.append(SourceFacts(source.kind, len(own), len(values), digest))
        offset, start = offset + len(values), start + len(own)
    return PublicImages(images, np.concatenate(labels), offset, tuple(facts))


def _read_one(
    source: Source, shape: ImageShape
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Images of one source, fitted, and labels as it has them, by parts; there is one or more."""
    # Letters have no size of their own: they are drawn at the plan's.
    drawn = source.kind in DRAWN
    reader = open_source(source, None, shape if drawn else None)
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


def _fitted(
    kind: str, items: list[Item], shape: ImageShape
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = [], []
    for item in items:
        if isinstance(item, BadRecord):
            raise DataError(f"public {kind} source: {item.name}: {item.reason}")
        images.append(_fit(item, shape))
        labels.append(item.label)
    return np.stack(images), np.array(labels, dtype=np.int64)


def _fit(record: Record, shape: ImageShape) -> NDArray[np.uint8]:
    """One image (h, w, c) as uint8 (H, W, C)."""
    image = record.image
    if image.shape == (shape.height, shape.width, shape.channels):
        return image
    from PIL import Image

    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    picture = picture.convert("L" if shape.channels == 1 else "RGB")
    if picture.size != (shape.width, shape.height):
        picture = picture.resize((shape.width, shape.height), Image.Resampling.LANCZOS)
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels.reshape(shape.height, shape.width, shape.channels)


def _sha256(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> str:
    """Hash of what is used: shape, pixels and labels of one source as read."""
    digest = hashlib.sha256(repr(images.shape).encode())
    for part in in_parts(images):
        digest.update(np.ascontiguousarray(part).tobytes())
    digest.update(labels.astype("<i8").tobytes())
    return digest.hexdigest()
