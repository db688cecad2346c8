"""Captions that are public: of a plan's conditions, and to draw images for."""

import csv
import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dpsynth.artifacts.rooms import in_curators_room
from dpsynth.errors import DataError, MissingError, PlanError
from dpsynth.planning.caption_fits import TEXT
from dpsynth.planning.caption_rules import CaptionRule, caption_text, condition_captions
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.schema import Plan
from dpsynth.public.private_places import meets_private
from dpsynth.readers.metadata import NAMES, metadata_name, parse_metadata
from dpsynth.readers.records import UnreadableSourceError
from dpsynth.readers.tree import READ_ERRORS, TooLargeError, open_tree

MOST_CAPTIONS = 4095
_MOST_BYTES = 1 << 23
_LABEL = "label"
_LINES = "write one caption a line, each once, as UTF-8 text"
_TABLE = "its columns are `text`, one caption of 1 to 1,000 characters a row, and maybe `label`"
_NO_TEXT = "no caption of 1 to 1,000 characters"


@dataclass(frozen=True)
class Drawn:
    """A caption that images are drawn for, and its class by name; "" where no column says it."""

    text: str
    label: str = ""


def drawn_captions(plan: Plan) -> list[str]:
    """The captions that images are drawn for: of `sampling.captions`, else of the conditions.

    Private captions cannot be among them: nothing here reads the private source.

    Raises:
        PlanError: the file is one of the private source.
        MissingError, DataError: it is absent, or no list of captions.
    """
    if not isinstance(plan.private.captions, FreeCaptions) or plan.sampling.captions is None:
        return condition_captions(plan.private.captions, plan.private.classes)
    return sampling_captions(plan, plan.sampling.captions)


def sampling_captions(plan: Plan, path: Path) -> list[str]:
    """The captions of a public file, in its order, each once; see `labelled_captions`."""
    return [one.text for one in labelled_captions(plan, path)]


def labelled_captions(plan: Plan, path: Path) -> list[Drawn]:
    """The captions of a public file and their classes, in its order.

    A text file has one a line, each once. A CSV file (`.csv`), or the metadata file of an image
    folder or of a zip of one, has them in the column `text`, with the class in `label` if there is
    one; a row said before is passed over.

    Raises:
        PlanError: the file is one of the private source.
        MissingError: there is no such file.
        DataError: it is damaged; no caption in a line or row; one of two classes, or twice in a
            text file; none at all, or too many.
    """
    require_public(plan, path)
    if path.is_dir() or _is_zip(path):
        found = _once(path, _folder_rows(path))
    elif path.suffix.lower() == ".csv":
        found = _once(path, _csv_rows(path))
    else:
        found = _lines(path)
    if not 0 < len(found) <= MOST_CAPTIONS:
        raise _no_list(path, f"has {len(found)} captions, expected 1 to {MOST_CAPTIONS}")
    return found


def require_drawable(plan: Plan) -> None:
    """Refuse captions to draw images for that `sample` would refuse, before anything is spent.

    Raises PlanError, MissingError or DataError, see `labelled_captions` and `class_of`.
    """
    if isinstance(plan.private.captions, FreeCaptions) and plan.sampling.captions is not None:
        for one in labelled_captions(plan, plan.sampling.captions):
            class_of(one, plan.private.classes)


def class_of(drawn: Drawn, classes: list[str]) -> int:
    """The class of its label; else the one whose name stands in the caption as whole words.

    Raises DataError where neither tells one class.
    """
    if drawn.label in classes:
        return classes.index(drawn.label)
    if drawn.label:
        raise DataError(
            f"sampling.captions: {drawn.text[:100]!r} has the label {drawn.label[:60]!r}, which is "
            "no declared class",
            hint="write names of private.classes in the column `label`, or leave the column out",
        )
    named = [
        place
        for place, name in enumerate(classes)
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", drawn.text, re.IGNORECASE)
    ]
    if len(named) != 1:
        raise DataError(
            f"sampling.captions: {drawn.text!r} names {len(named)} of the declared classes",
            hint="write captions that name one class each, or a CSV file with columns text and "
            "label: samples are labelled by it",
        )
    return named[0]


def require_public(plan: Plan, path: Path) -> None:
    """Refuse captions of the private source, or of a curator's room.

    Looks at names and at the files' identities; opens none.

    Raises:
        PlanError: the file or folder is one, holds one or lies in one.
    """
    hint = "name a text file of captions that anyone may read"
    if meets_private(plan, path):
        raise PlanError(
            "sampling.captions lies in the private source, or around it: images are drawn for "
            "public captions alone",
            hint=hint,
        )
    if in_curators_room(path):
        raise PlanError(
            "sampling.captions lies in a curator's room, of which nothing may be released",
            hint=hint,
        )


def _lines(path: Path) -> list[Drawn]:
    """The captions of a text file: an empty line, or a second time, is a slip of the pen."""
    seen: dict[str, int] = {}
    for number, line in enumerate(_decoded(path, _content(path), _LINES).splitlines(), start=1):
        text = caption_text(line)
        if not text:
            raise _no_list(path, f"has {_NO_TEXT} in line {number}")
        if text in seen:
            raise _no_list(path, f"repeats line {seen[text]} in line {number}")
        seen[text] = number
    return [Drawn(text) for text in seen]


def _csv_rows(path: Path) -> Iterator[Drawn]:
    csv.field_size_limit(_MOST_BYTES)
    content = _decoded(path, _content(path), _TABLE)
    reader = csv.DictReader(io.StringIO(content, newline=""), strict=True)
    try:
        columns = list(reader.fieldnames or ())
        if TEXT not in columns or len(set(columns)) != len(columns):
            raise _no_list(path, f"has columns {', '.join(columns)[:100]}, need text", _TABLE)
        for row in reader:
            if None in row:  # more cells than columns
                raise _no_list(path, f"has a broken row in line {reader.line_num}", _TABLE)
            yield Drawn(caption_text(row[TEXT]), (row.get(_LABEL) or "").strip())
    except csv.Error as error:
        raise _no_list(path, f"is no CSV in line {reader.line_num}: {error}", _TABLE) from None


def _folder_rows(path: Path) -> Iterator[Drawn]:
    """The rows of an image folder's metadata file; its images are not opened."""
    try:
        with open_tree(path) as tree:
            name = metadata_name(tree.listing.files)
            if name is None:
                raise _no_list(path, f"has no {' or '.join(NAMES)}", _TABLE)
            rows = list(parse_metadata(name, tree.read(name, _MOST_BYTES), captions=CaptionRule()))
    except UnreadableSourceError as error:
        raise _no_list(path, f"cannot be read: {error}", _TABLE) from None
    except TooLargeError:
        raise _no_list(path, "has a metadata file above 8 MiB", _TABLE) from None
    except READ_ERRORS as error:
        raise _no_list(path, f"is damaged ({type(error).__name__})", _TABLE) from None
    for row in rows:
        if row.fault:
            raise _no_list(path, f"has {row.fault}: {row.name}", _TABLE)
        yield Drawn(row.text, row.label)


def _once(path: Path, rows: Iterable[Drawn]) -> list[Drawn]:
    """The rows whose caption was not said before, in order."""
    found: dict[str, Drawn] = {}
    for number, row in enumerate(rows, start=1):
        if not row.text:
            raise _no_list(path, f"has {_NO_TEXT} in row {number}", _TABLE)
        before = found.setdefault(row.text, row)
        if before.label != row.label:
            raise _no_list(
                path,
                f"gives the caption {row.text[:100]!r} two labels, {before.label[:40]!r} and "
                f"{row.label[:40]!r} in row {number}",
                "images of a caption have one class: keep one of the rows",
            )
    return list(found.values())


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except OSError:
        return False


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise MissingError(
            f"sampling.captions: {path} cannot be read: {error.strerror or type(error).__name__}",
            hint="correct its path under `sampling:` in the plan",
        ) from None
    if len(content) > _MOST_BYTES:
        raise _no_list(path, "has more than 8 MiB")
    return content


def _decoded(path: Path, content: bytes, hint: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _no_list(path, "is not UTF-8", hint) from None


def _no_list(path: Path, why: str, hint: str = _LINES) -> DataError:
    return DataError(f"sampling.captions: {path.name} {why}", hint=hint)
