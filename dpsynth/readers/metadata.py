"""`metadata.csv` and `metadata.jsonl`: rows of `file_name`, `label`, `text`."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from dpsynth.readers.records import UnreadableSourceError

NAMES = ("metadata.csv", "metadata.jsonl")


@dataclass(frozen=True)
class Row:
    """One row. `path` is relative to the root of the tree; `fault` says why the row is bad."""

    name: str
    path: str = ""
    label: str = ""
    fault: str = ""


def parse_metadata(name: str, content: bytes) -> Iterator[Row]:
    """Rows of the metadata file `name`; file names in it are relative to its own folder.

    Raises:
        UnreadableSourceError: not UTF-8, no CSV, or without the needed columns.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableSourceError("folder", f"{name} is not UTF-8: {error}") from error
    folder = PurePosixPath(name).parent
    parse = _csv_rows if name.endswith(".csv") else _jsonl_rows
    for number, values in enumerate(parse(name, text), start=1):
        yield _row(f"row {number} of {name}", values, folder)


def _csv_rows(name: str, text: str) -> Iterator[dict[str, Any] | None]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = list(reader.fieldnames or ())
        if "file_name" not in columns or len(set(columns)) != len(columns):
            raise UnreadableSourceError(
                "folder", f"{name} has columns {columns}, need file_name, label"
            )
        for values in reader:
            # DictReader keeps surplus cells under the key None.
            yield None if None in values else values
    except csv.Error as error:
        raise UnreadableSourceError("folder", f"{name}, line {reader.line_num}: {error}") from error


def _jsonl_rows(_name: str, text: str) -> Iterator[dict[str, Any] | None]:
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        yield values if isinstance(values, dict) else None


def _row(name: str, values: dict[str, Any] | None, folder: PurePosixPath) -> Row:
    if values is None:
        return Row(name, fault="the row cannot be read")
    given = values.get("file_name")
    if not isinstance(given, str) or not given:
        return Row(name, fault="no file_name in its row")
    path = PurePosixPath(given)
    if path.is_absolute() or ".." in path.parts:
        return Row(name, fault="a path out of the folder")
    label = values.get("label", values.get("text"))
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    if label is not None and not isinstance(label, str):
        return Row(name, (folder / path).as_posix(), fault="a label that is no text or number")
    return Row(name, (folder / path).as_posix(), label or "")
