"""`metadata.csv` and `metadata.jsonl`: rows of `file_name`, `label`, `text`, and units."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from dpsynth.planning.caption_fits import TEXT
from dpsynth.planning.caption_rules import CaptionRule, caption_text
from dpsynth.readers.records import UnreadableSourceError, unit_text

NAMES = ("metadata.csv", "metadata.jsonl")
MOST_METADATA = 1 << 28
# A metadata file lies at the root, or in the one folder that an archiver wrapped around it.
DEEPEST_METADATA = 2


@dataclass(frozen=True)
class Row:
    """One row. `path` is relative to the root of the tree; `fault` says why the row is bad.

    `unit`: value of the column that names the record's privacy unit, if one was asked for.
    `text`: the caption, if captions were asked for.
    """

    name: str
    path: str = ""
    label: str = ""
    fault: str = ""
    unit: str = ""
    text: str = ""


def metadata_name(files: Sequence[str]) -> str | None:
    """The metadata file among the files of a tree; None where there is none.

    Raises UnreadableSourceError for more than one.
    """
    found = [name for name in files if is_metadata(name)]
    if len(found) > 1:
        raise UnreadableSourceError("folder", f"more than one metadata file: {found}")
    return found[0] if found else None


def is_metadata(name: str) -> bool:
    """Whether a file of a tree is one, by its name and by how deep it lies."""
    if not name.endswith(NAMES):
        return False
    path = PurePosixPath(name)
    return path.name in NAMES and len(path.parts) <= DEEPEST_METADATA


def parse_metadata(
    name: str, content: bytes, column: str | None = None, captions: CaptionRule | None = None
) -> Iterator[Row]:
    """Rows of the metadata file `name`; file names in it are relative to its own folder.

    `column` names each record's privacy unit; a row without a value there is bad. With `captions`
    the column `text` is the caption, and never stands in for the label.

    Raises:
        UnreadableSourceError: not UTF-8, no CSV, or without the needed columns.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableSourceError("folder", f"{name} is not UTF-8: {error}") from error
    folder = PurePosixPath(name).parent
    parse = _csv_rows if name.endswith(".csv") else _jsonl_rows
    needed = [] if column is None else [column]
    needed += [TEXT] if captions is not None and not captions.lenient else []
    for number, values in enumerate(parse(name, text, needed), start=1):
        captioned = captions is not None
        row = _row(f"row {number} of {name}", values, folder, captioned=captioned)
        yield row if column is None or row.fault else _with_unit(row, values, column)


def _with_unit(row: Row, values: dict[str, Any] | None, column: str) -> Row:
    unit = unit_text((values or {}).get(column))
    return replace(row, unit=unit, fault="" if unit else f"no {column} in its row")


def _csv_rows(name: str, text: str, wanted: list[str]) -> Iterator[dict[str, Any] | None]:
    # Whatever fits into the file: one long cell must not end the source for all others.
    csv.field_size_limit(MOST_METADATA)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = list(reader.fieldnames or ())
        needed = ["file_name", *wanted]
        if not set(needed) <= set(columns) or len(set(columns)) != len(columns):
            need = ", ".join(dict.fromkeys(["file_name", "label", *needed]))
            raise UnreadableSourceError("folder", f"{name} has columns {columns}, need {need}")
        for values in reader:
            # DictReader keeps surplus cells under the key None.
            yield None if None in values else values
    except csv.Error as error:
        raise UnreadableSourceError("folder", f"{name}, line {reader.line_num}: {error}") from error


def _jsonl_rows(_name: str, text: str, _wanted: list[str]) -> Iterator[dict[str, Any] | None]:
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        yield values if isinstance(values, dict) else None


def _row(
    name: str, values: dict[str, Any] | None, folder: PurePosixPath, *, captioned: bool
) -> Row:
    if values is None:
        return Row(name, fault="the row cannot be read")
    given = values.get("file_name")
    if not isinstance(given, str) or not given:
        return Row(name, fault="no file_name in its row")
    path = PurePosixPath(given)
    if path.is_absolute() or ".." in path.parts:
        return Row(name, fault="a path out of the folder")
    label = values.get("label", None if captioned else values.get(TEXT))
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    if label is not None and not isinstance(label, str):
        return Row(name, (folder / path).as_posix(), fault="a label that is no text or number")
    text = caption_text(values.get(TEXT)) if captioned else ""
    return Row(name, (folder / path).as_posix(), label or "", text=text)
