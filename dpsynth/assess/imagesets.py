"""Image sets from anywhere: a folder, a zip of one, an NPZ or an IDX file; labels where there are.

So that other tools' output meets the ruler that runs meet, without a run. Files are read by the
readers that plans use, as strictly; one image that cannot be read refuses the whole set, since a
measure of the rest would be a measure of something else.
"""

import contextlib
import string
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dpsynth.artifacts.files import sha256_bytes
from dpsynth.console import counted
from dpsynth.errors import DataError, MissingError, UsageError
from dpsynth.models.lenet import Images, Labels
from dpsynth.planning.caption_rules import PUBLIC
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import FolderSource, IdxSource, LettersSource, NpzSource, Source
from dpsynth.readers import BadRecord, Record, RecordSource, UnreadableSourceError, open_source
from dpsynth.readers.class_names import classes_of, in_order
from dpsynth.readers.npz import NpzReader
from dpsynth.readers.picture import brought_to
from dpsynth.readers.tree import READ_ERRORS, open_tree

RESIZING = (
    "brought to the reference's shape: Lanczos, antialiased; grey copied to three channels, "
    "colour to grey by luma (ITU-R 601)"
)
HINT = (
    "give a folder or zip (metadata.csv, class subfolders, or pictures alone), an NPZ of images "
    "and labels, or IDX files as IMAGES,LABELS"
)
ARRAYS = (("images", "labels"), ("arr_0", "arr_1"))
"""Names of images and labels in an NPZ: ours, and those that `np.savez` gives by itself."""
LETTERS = 10_000
MOST_BYTES = 1 << 32
"""Largest set, in bytes of its decoded images: a small file may unpack to more than any memory."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images of one shape, with what else their source says of them.

    Attributes:
        images: uint8 (n, H, W, C), C 1 or 3.
        labels: int64 (n,), indices into `classes`; -1 everywhere where the source has none.
        classes: names of the classes, in order; empty where there are no labels.
        texts: captions (n,), empty text for none; None where no image has one.
        resized: how many images had another shape in the source.
    """

    images: Images
    labels: Labels
    classes: tuple[str, ...] = ()
    texts: tuple[str, ...] | None = None
    resized: int = 0

    def __len__(self) -> int:
        """How many images there are, n."""
        return len(self.images)

    @property
    def labelled(self) -> bool:
        """Whether every image has a label."""
        return bool(self.classes)

    @property
    def shape(self) -> ImageShape:
        """Shape of every image."""
        height, width, channels = self.images.shape[1:]
        return ImageShape(height=height, width=width, channels=channels)

    def only(self, chosen: np.ndarray) -> "ImageSet":
        """The images of these numbers, or those that a mask (n,) marks."""
        texts = None if self.texts is None else tuple(np.array(self.texts, dtype=object)[chosen])
        return replace(self, images=self.images[chosen], labels=self.labels[chosen], texts=texts)

    def without_labels(self) -> "ImageSet":
        """The same images, their labels put aside."""
        return replace(self, labels=np.full(len(self), -1, np.int64), classes=())

    def under(self, classes: Sequence[str], what: str) -> "ImageSet":
        """The same images with labels that index `classes`.

        Raises:
            DataError: a class of this set is not among them.
        """
        if not self.labelled:
            return self
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            raise DataError(
                f"{what} has {counted(len(unknown), 'label')} that the reference lacks",
                hint="name the classes of both sets alike (folder names, the column `label`; "
                "numbers of an NPZ or IDX count as names)",
            )
        places = np.array([classes.index(name) for name in self.classes], dtype=np.int64)
        return replace(self, labels=places[self.labels], classes=tuple(classes))


@dataclass(frozen=True)
class _Wanted:
    """What a set is called, the shape to bring it to, and whether errors may name its images."""

    what: str
    shape: ImageShape | None
    reveal: bool


def read_set(
    given: str | Path, what: str, *, shape: ImageShape | None = None, reveal: bool = False
) -> ImageSet:
    """Read a whole image set into memory.

    Args:
        given: a folder, zip, NPZ or IDX file, or `IMAGES,LABELS` of an IDX pair.
        what: how errors call the set, such as "--reference"; they never name a file.
        shape: shape to bring every image to by the one protocol, `RESIZING`; None wants images
            of one shape.
        reveal: whether errors may say which image does not fit and why: of public sets.

    Raises:
        MissingError: nothing lies there.
        UsageError: it is no image set of these kinds.
        DataError: it cannot be read, an image is damaged, shapes differ, or only some have labels.
    """
    try:
        return _read(given, _Wanted(what, shape, reveal))
    except UnreadableSourceError as error:
        detail = f": {error.detail}" if reveal else ""
        raise DataError(f"{what} cannot be read as an image set{detail}", hint=HINT) from None


def letters(shape: ImageShape, count: int | None = None) -> ImageSet:
    """Rendered letters, white on black: public images where no plan names any; always the same.

    Raises:
        MissingError: an optional install that draws them is absent.
    """
    source = LettersSource(kind="letters", count=count or LETTERS)
    records = [item for item in open_source(source, None, shape) if isinstance(item, Record)]
    return _built(records, tuple(string.ascii_lowercase), _Wanted("letters", shape, reveal=True))


def halves(whole: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Two halves of a set by a hash of each image: the same whatever the order of its files.

    Copies of one image fall into the same half.
    """
    first = np.array([sha256_bytes(image.tobytes())[0] < "8" for image in whole.images], np.bool_)
    return whole.only(first), whole.only(~first)


def joint_classes(first: ImageSet, second: ImageSet) -> tuple[str, ...]:
    """The classes of both sets, each once, sorted."""
    return in_order({*first.classes, *second.classes})


def shared(first: Images, second: Images) -> int:
    """How many images of `first` lie in `second` too, pixel by pixel."""
    known = {sha256_bytes(image.tobytes()) for image in second}
    return sum(sha256_bytes(image.tobytes()) in known for image in first)


def _read(given: str | Path, wanted: _Wanted) -> ImageSet:
    path, labels = paths_of(given, wanted.what)
    if labels is not None or _is_idx(path):
        return _idx(path, labels, wanted)
    members = _members(path)
    if any(name.endswith(".npy") for name in members):
        return _npz(path, members, wanted)
    if not path.is_dir() and not zipfile.is_zipfile(path):
        raise UsageError(f"{wanted.what} is no image set that dpsynth reads", hint=HINT)
    with open_tree(path) as tree:
        classes = classes_of(tree, wanted.what)
    source = _opened(FolderSource(kind="folder", path=path), classes)
    return _gathered(source, classes, wanted, labelled=bool(classes))


def paths_of(given: str | Path, what: str) -> tuple[Path, Path | None]:
    """The path, and that of IDX labels where one is named. A name may hold a comma itself.

    Raises:
        MissingError: nothing lies there.
        UsageError: what lies there is no folder and no regular file: such a one may never end.
    """
    path, labels = Path(given), None
    if not path.exists() and "," in str(given):
        path, labels = (Path(part) for part in str(given).split(",", 1))
    if not path.exists() or (labels is not None and not labels.exists()):
        raise MissingError(f"{what}: there is nothing at the path that was given", hint=HINT)
    if not (path.is_file() or path.is_dir()) or (labels is not None and not labels.is_file()):
        raise UsageError(f"{what} is neither a folder nor a regular file", hint=HINT)
    return path, labels


@contextlib.contextmanager
def _readable(kind: str) -> Iterator[None]:
    """Turn what damaged and closed files raise inside the block into UnreadableSourceError."""
    try:
        yield
    except READ_ERRORS as error:
        raise UnreadableSourceError(kind, f"{type(error).__name__}: {error}") from error


def _is_idx(path: Path) -> bool:
    if not path.is_file():
        return False
    with _readable("idx"), path.open("rb") as file:
        # Of what is packed by gzip alone, nothing else is an image set.
        return file.read(3).startswith((b"\0\0\x08", b"\x1f\x8b"))


def _members(path: Path) -> list[str]:
    """Names in an archive; none in what is no archive."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return []
    with _readable("npz"), zipfile.ZipFile(path) as archive:
        return archive.namelist()


def _idx(images: Path, labels: Path | None, wanted: _Wanted) -> ImageSet:
    """An IDX file of images; its labels as named, else beside it under MNIST's name, else none."""
    beside = images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))
    if labels is None and beside != images and beside.is_file():
        labels = beside
    if labels is not None:
        source = IdxSource(kind="idx", images=images, labels=labels)
        return _gathered(_opened(source), None, wanted)
    with tempfile.TemporaryDirectory() as folder:
        # The reader wants labels: zeros, as many as the header says there are images.
        zeros = Path(folder) / "labels"
        count = _idx_count(images)
        zeros.write_bytes(b"\0\0\x08\x01" + count.to_bytes(4, "big") + bytes(count))
        source = IdxSource(kind="idx", images=images, labels=zeros)
        return _gathered(_opened(source), None, wanted, labelled=False)


def _idx_count(path: Path) -> int:
    import gzip

    with _readable("idx"):
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as file:
            count = int.from_bytes(file.read(8)[4:], "big")
    # A lying header must not cost memory; the reader finds out that it lies.
    return min(count, 1 << 26)


def _npz(path: Path, members: Sequence[str], wanted: _Wanted) -> ImageSet:
    for images, labels in ARRAYS:
        if f"{images}.npy" in members:
            bare = f"{labels}.npy" not in members
            source = NpzSource(kind="npz", path=path, images=images, labels=labels)
            reader = NpzReader(source, None, None, unlabelled=bare)
            return _gathered(reader, None, wanted, labelled=not bare)
    raise DataError(
        f"{wanted.what}: the NPZ has no array `images` (or `arr_0`)",
        hint="np.savez(FILE, images=images, labels=labels), images (n, H, W) or (n, H, W, C)",
    )


def _opened(source: Source, classes: tuple[str, ...] = ()) -> RecordSource:
    return open_source(source, classes or None, None, PUBLIC)


def _gathered(
    source: RecordSource, classes: tuple[str, ...] | None, wanted: _Wanted, *, labelled: bool = True
) -> ImageSet:
    """Read a source; `classes` names a folder's, None numbers them as the labels do."""
    records, bad, size = list[Record](), list[BadRecord](), 0
    for item in source:
        if isinstance(item, BadRecord):
            bad.append(item)
            continue
        records.append(item if labelled else replace(item, label=-1))
        size += item.image.nbytes
        if size > MOST_BYTES:
            raise DataError(
                f"{wanted.what}: its images take more than {MOST_BYTES >> 30} GiB of memory",
                hint="give fewer images, or smaller ones",
            )
    if bad:
        first = f": {bad[0].name}: {bad[0].reason}" if wanted.reveal else ""
        raise DataError(
            f"{wanted.what}: {counted(len(bad), 'image')} cannot be used{first}",
            hint="mend or remove them" + ("" if wanted.reveal else "; --show-curator names one"),
        )
    if classes is None and labelled:
        present = sorted({record.label for record in records})
        places = {label: place for place, label in enumerate(present)}
        records = [replace(record, label=places[record.label]) for record in records]
        classes = tuple(map(str, present))
    return _built(records, classes or (), wanted)


def _built(records: list[Record], classes: tuple[str, ...], wanted: _Wanted) -> ImageSet:
    if not records:
        raise DataError(f"{wanted.what} holds no image", hint=HINT)
    shape = wanted.shape or _one_shape(records, wanted)
    images = np.empty((len(records), shape.height, shape.width, shape.channels), np.uint8)
    for row, record in zip(images, records, strict=True):
        row[...] = brought_to(record.image, shape)
    texts = tuple(record.text for record in records)
    return ImageSet(
        images,
        np.array([record.label for record in records], np.int64),
        classes,
        texts if any(texts) else None,
        sum(record.image.shape != images.shape[1:] for record in records),
    )


def _one_shape(records: list[Record], wanted: _Wanted) -> ImageShape:
    shapes = {record.image.shape for record in records}
    if len(shapes) > 1:
        raise DataError(
            f"{wanted.what}: its images have several shapes, and other sets are brought to its own",
            hint="save these images in one size and mode",
        )
    height, width, channels = shapes.pop()
    return ImageShape(height=height, width=width, channels=channels)
