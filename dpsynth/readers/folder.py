"""Image folders and zips of them: rows of a metadata file, or one folder a class."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import FolderSource
from dpsynth.readers.metadata import NAMES, Row, parse_metadata
from dpsynth.readers.picture import SUFFIXES, BadPictureError, decode, most_bytes
from dpsynth.readers.records import BadRecord, Item, Record, UnreadableSourceError
from dpsynth.readers.tree import READ_ERRORS, Listing, TooLargeError, Tree, open_tree

MOST_METADATA = 1 << 28
# A metadata file lies at the root, or in the one folder that an archiver wrapped around it.
DEEPEST_METADATA = 2


class FolderReader:
    """A directory or zip of pictures, each labelled by the name of its class.

    With `metadata.csv` or `metadata.jsonl` (`file_name`, and `label` or else `text` equal to a
    class name) its rows are the records, and a picture without a row is bad. Without one, the
    folder that holds a picture is its class. Hidden files and files that are no pictures are
    passed over. No record's fate depends on another's, but that of rows or entries which name
    the same file: all of them are bad.
    """

    def __init__(
        self, source: FolderSource, classes: tuple[str, ...] | None, image: ImageShape | None
    ) -> None:
        self._path, self._image = source.path, image
        self._closed = classes is not None
        self._index = {name: number for number, name in enumerate(classes or ())}

    def files(self) -> list[Path]:
        """Every listed file of a directory, or the zip."""
        if not self._path.is_dir():
            return [self._path]
        with open_tree(self._path) as tree:
            names = [*tree.listing.files, *tree.listing.refused]
        return [self._path, *(self._path / name for name in names)]

    def ignored(self) -> list[str]:
        """Names of hidden files and of files that are no pictures."""
        with open_tree(self._path) as tree:
            listing = tree.listing
        foreign = [n for n in listing.files if not _is_picture(n) and not _is_metadata(n)]
        return [*listing.hidden, *foreign]

    def __iter__(self) -> Iterator[Item]:
        """Yield each picture, or why it does not fit.

        Raises:
            UnreadableSourceError: absent, no folder or zip, or its metadata is damaged.
        """
        with open_tree(self._path) as tree:
            metadata = _metadata_name(tree.listing)
            if metadata is None:
                yield from self._by_folder(tree)
            else:
                yield from self._by_rows(tree, metadata)

    def _by_folder(self, tree: Tree) -> Iterator[Item]:
        for name in filter(_is_picture, tree.listing.files):
            label = PurePosixPath(name.replace("\\", "/")).parent.name
            yield self._record(tree, name, label, "not in a class folder")
        yield from (BadRecord(name, reason) for name, reason in tree.listing.refused.items())

    def _by_rows(self, tree: Tree, metadata: str) -> Iterator[Item]:
        try:
            content = tree.read(metadata, MOST_METADATA)
        except (TooLargeError, *READ_ERRORS) as error:
            raise UnreadableSourceError("folder", f"{metadata}: {error}") from error
        rows = list(parse_metadata(metadata, content))
        listing, counts = tree.listing, Counter(row.path for row in rows if row.path)
        present = set(listing.files)
        for row in rows:
            reason = _row_fault(row, counts, listing, present)
            if reason:
                yield BadRecord(row.path or row.name, reason)
            else:
                yield self._record(tree, row.path, row.label, "no label in its row")
        for name in listing.files:
            if _is_picture(name) and name not in counts:
                yield BadRecord(name, "a picture without a row in the metadata file")
        for name, reason in listing.refused.items():
            if name not in counts:
                yield BadRecord(name, reason)

    def _record(self, tree: Tree, name: str, label: str, unlabelled: str) -> Item:
        if not label and self._closed:
            return BadRecord(name, unlabelled)
        if label not in self._index:
            if self._closed:
                return BadRecord(name, f"label {label!r} is undeclared")
            self._index[label] = len(self._index)
        try:
            content = tree.read(name, most_bytes(self._image))
            return Record(decode(content, self._image), self._index[label])
        except BadPictureError as error:
            return BadRecord(name, str(error))
        except TooLargeError:
            return BadRecord(name, "a file far larger than its declared pixels")
        except READ_ERRORS as error:
            return BadRecord(name, f"damaged file ({type(error).__name__})")


def _row_fault(row: Row, counts: Counter[str], listing: Listing, present: set[str]) -> str:
    if row.fault:
        return row.fault
    if row.path in listing.refused:
        return listing.refused[row.path]
    if row.path not in present:
        return "the file is missing"
    # All of them, not all but the first: which row is "first" would depend on the others.
    return "more than one row for this file" if counts[row.path] > 1 else ""


def _metadata_name(listing: Listing) -> str | None:
    found = [name for name in listing.files if _is_metadata(name)]
    if len(found) > 1:
        raise UnreadableSourceError("folder", f"more than one metadata file: {found}")
    return found[0] if found else None


def _is_metadata(name: str) -> bool:
    path = PurePosixPath(name)
    return path.name in NAMES and len(path.parts) <= DEEPEST_METADATA


def _is_picture(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in SUFFIXES
