"""Image folders and zips of them: rows of a metadata file, or one folder a class."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path, PurePosixPath

from dpsynth.errors import UsageError
from dpsynth.planning.caption_fits import TEXT
from dpsynth.planning.caption_rules import CaptionRule
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import FolderSource
from dpsynth.readers.metadata import (
    MOST_METADATA,
    NAMES,
    Row,
    is_metadata,
    metadata_name,
    parse_metadata,
)
from dpsynth.readers.parallel import in_order
from dpsynth.readers.picture import SUFFIXES, BadPictureError, decode, most_bytes, silence
from dpsynth.readers.records import (
    BadRecord,
    Block,
    Item,
    Record,
    UnreadableSourceError,
    block_rows,
    gathered,
)
from dpsynth.readers.tree import READ_ERRORS, Listing, TooLargeError, Tree, open_tree

_PART_BYTES = 1 << 21


@dataclass(frozen=True)
class _Table:
    """Rows of a metadata file beside the files of its tree.

    `counts`: a unit's rows that name a file; `named`: the files that any row names.
    """

    rows: list[Row]
    counts: Counter[tuple[str, str]]
    named: set[str]
    listing: Listing
    present: set[str]

    def fault(self, row: Row) -> str:
        """Why a row is no record before its picture is looked at; empty for none."""
        if row.fault:
            return row.fault
        if row.path in self.listing.refused:
            return self.listing.refused[row.path]
        if row.path not in self.present:
            return "the file is missing"
        # All of them, not all but the first: which row is "first" would depend on the others.
        # Inside one unit: rows of another unit must not decide on this one's images.
        return "more than one row for this file" if self.counts[row.path, row.unit] > 1 else ""


@dataclass(frozen=True)
class _Entry:
    """A picture to decode, and what its place or its row says of it."""

    name: str
    label: int
    unit: str
    text: str


class FolderReader:
    """A directory or zip of pictures, each labelled by the name of its class.

    With `metadata.csv` or `metadata.jsonl` (`file_name`, and `label` or else `text` equal to a
    class name) its rows are the records, and a picture without a row is bad. Without one, the
    folder that holds a picture is its class. Hidden files and files that are no pictures are
    passed over. No record's fate depends on another's, but that of rows or entries which name
    the same file: all of them are bad. `column`, of the metadata file, names privacy units.
    `captions`: how its column `text` is read as the picture's caption.
    """

    def __init__(
        self,
        source: FolderSource,
        classes: tuple[str, ...] | None,
        image: ImageShape | None,
        column: str | None = None,
        captions: CaptionRule | None = None,
    ) -> None:
        self._path, self._image, self._column = source.path, image, column
        self._captions = captions
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
        foreign = [n for n in listing.files if not _is_picture(n) and not is_metadata(n)]
        return [*listing.hidden, *foreign]

    def __iter__(self) -> Iterator[Item]:
        """Yield each picture, or why it does not fit.

        Raises:
            UnreadableSourceError: absent, no folder or zip, or its metadata is damaged; no
                metadata at all where it must name units or hold captions.
        """
        for part, _ in self._parts():
            yield from part

    def blocks(self) -> Iterator[Block]:
        """See `BlockSource`; where a shape is declared. Raises as iteration does."""
        if self._image is None:
            raise UsageError("a folder is read by blocks where its images' shape is declared")
        shape = (self._image.height, self._image.width, self._image.channels)
        items, most = list[Item](), block_rows(shape)
        for part, done in self._parts():
            items += part
            if len(items) >= most:
                yield gathered(items, shape, done)
                items.clear()
        yield gathered(items, shape, 1.0)

    def _parts(self) -> Iterator[tuple[list[Item], float]]:
        """All items, some at a time, decoded by several threads; and the share read by then."""
        silence()
        with open_tree(self._path) as tree:
            table = self._table(tree)
            found = self._by_folder(tree) if table is None else self._by_rows(table)
            # Files that are no pictures count too, so that the end may come before the whole.
            names = len(tree.listing.files) + len(tree.listing.refused)
            total, count = max(1, names, len(table.rows) if table else 0), 0
            for part in in_order(partial(self._decoded, tree), found, self._at_once):
                count += len(part)
                yield part, min(1.0, count / total)

    @property
    def _at_once(self) -> int:
        """Pictures that one thread takes at a time: about two megabytes, else 16."""
        if self._image is None:
            return 16
        size = self._image.height * self._image.width * self._image.channels
        return max(1, min(128, _PART_BYTES // size))

    def unit_names(self) -> Iterator[str]:
        """See `UnitSource`. A place is a row of the metadata file."""
        with open_tree(self._path) as tree:
            table = self._table(tree)
            if table is not None:
                yield from ("" if table.fault(row) else row.unit for row in table.rows)

    def select(self, places: Sequence[int]) -> Iterator[tuple[int, Item]]:
        """See `UnitSource`: one picture is read for each place."""
        silence()
        with open_tree(self._path) as tree:
            table = self._table(tree)
            if table is not None:
                # A file that shrank since its names were read has fewer rows: the rest is gone.
                within = [place for place in places if place < len(table.rows)]
                entries = (self._of_row(table, place) for place in within)
                parts = in_order(partial(self._decoded, tree), entries, self._at_once)
                yield from zip(within, chain.from_iterable(parts), strict=True)

    def _by_folder(self, tree: Tree) -> Iterator[_Entry | BadRecord]:
        for name in filter(_is_picture, tree.listing.files):
            label = _last_name(name.replace("\\", "/").rpartition("/")[0])
            yield self._entry(Row(name, name, label), "not in a class folder")
        yield from (BadRecord(name, reason) for name, reason in tree.listing.refused.items())

    def _table(self, tree: Tree) -> _Table | None:
        """The metadata, or None where the folders are the classes."""
        name = metadata_name(tree.listing.files)
        if name is None:
            if needed := self._needed():
                raise UnreadableSourceError("folder", f"no {' or '.join(NAMES)}, whose {needed}")
            return None
        try:
            content = tree.read(name, MOST_METADATA)
        except (TooLargeError, *READ_ERRORS) as error:
            raise UnreadableSourceError("folder", f"{name}: {error}") from error
        rows = list(parse_metadata(name, content, self._column, self._captions))
        told = (row for row in rows if row.path and (self._column is None or row.unit))
        counts = Counter((row.path, row.unit) for row in told)
        named = {row.path for row in rows if row.path}
        return _Table(rows, counts, named, tree.listing, set(tree.listing.files))

    def _needed(self) -> str:
        """What a metadata file must hold; empty where there may be none."""
        if self._column is not None:
            return f"column {self._column} names the units"
        if self._captions is not None and not self._captions.lenient:
            return f"column {TEXT} holds the captions"
        return ""

    def _by_rows(self, table: _Table) -> Iterator[_Entry | BadRecord]:
        for place in range(len(table.rows)):
            yield self._of_row(table, place)
        for name in table.listing.files:
            if _is_picture(name) and name not in table.named:
                yield BadRecord(name, "a picture without a row in the metadata file")
        for name, reason in table.listing.refused.items():
            if name not in table.named:
                yield BadRecord(name, reason)

    def _of_row(self, table: _Table, place: int) -> _Entry | BadRecord:
        row = table.rows[place]
        reason = table.fault(row)
        if reason:
            return BadRecord(row.path or row.name, reason)
        return self._entry(row, "no label in its row")

    def _entry(self, row: Row, unlabelled: str) -> _Entry | BadRecord:
        """What the listing says of a picture. In the source's order: open classes are numbered."""
        rule = self._captions
        if rule is not None and not rule.lenient:
            return self._captioned(row, rule)
        if not row.label and self._closed:
            return BadRecord(row.path, unlabelled)
        if row.label not in self._index:
            if self._closed:
                return BadRecord(row.path, f"label {row.label!r} is undeclared")
            self._index[row.label] = len(self._index)
        return _Entry(row.path, self._index[row.label], row.unit, row.text)

    def _captioned(self, row: Row, rule: CaptionRule) -> _Entry | BadRecord:
        """A private picture, whose caption tells its class where it has no label."""
        if row.label and row.label not in self._index:
            return BadRecord(row.path, f"label {row.label!r} is undeclared")
        label, fault = rule.judged(row.text, self._index.get(row.label))
        return BadRecord(row.path, fault) if fault else _Entry(row.path, label, row.unit, row.text)

    def _decoded(self, tree: Tree, entry: _Entry | BadRecord) -> Item:
        """Read and decode one picture, in any thread."""
        if isinstance(entry, BadRecord):
            return entry
        try:
            content = tree.read(entry.name, most_bytes(self._image))
            return Record(decode(content, self._image), entry.label, entry.unit, entry.text)
        except BadPictureError as error:
            return BadRecord(entry.name, str(error))
        except TooLargeError:
            return BadRecord(entry.name, "a file far larger than its declared pixels")
        except READ_ERRORS as error:
            return BadRecord(entry.name, f"damaged file ({type(error).__name__})")


def _is_picture(name: str) -> bool:
    """By its ending, of a file that is not hidden."""
    return f".{name.rpartition('.')[2].lower()}" in SUFFIXES


@lru_cache(maxsize=64)
def _last_name(folder: str) -> str:
    return PurePosixPath(folder).name
