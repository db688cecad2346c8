"""The stamp of reference images: what never belongs into a hand-out says so by itself.

A reference shows what a plan gives without privacy, or what public data alone give. Its PNGs and
sheets carry the stamp as text fields, its `metadata.csv` as a column of its own, by which
`artifacts.samples` refuses it as a release.
"""

import csv
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from dpsynth.artifacts.files import write_atomic
from dpsynth.artifacts.sample_rows import COLUMNS
from dpsynth.errors import DataError

Kind = Literal["nonprivate", "pretrained"]

KEY = "dpsynth-nonprivate"
COLUMN = "stamp"
TEXTS: dict[Kind, str] = {
    "nonprivate": "NON-PRIVATE: made from private records without noise. Curator-only: never hand "
    "this out.",
    "pretrained": "NON-PRIVATE REFERENCE: made by the public model alone, beside a private run. "
    "Curator-only: it is no release.",
}
_HEAD = 4096
"""Bytes of a file that the stamp lies within."""
_TABLE, _PICTURE = "metadata.csv", ".png"


def reference_stamps(kind: Kind) -> dict[str, str]:
    """Text fields for every image and sheet of a reference."""
    return {"dpsynth": "curator-only", KEY: TEXTS[kind]}


def stamp_metadata(folder: Path, kind: Kind) -> Path:
    """Give `metadata.csv` of a finished folder of samples its column `stamp`; return its path.

    A file that has it already stays as it is.

    Raises:
        DataError: the file is no list of samples.
    """
    path = folder / "metadata.csv"
    header, rows = _read(path)
    if header == (*COLUMNS, COLUMN):
        return path
    if header != COLUMNS:
        raise DataError(f"{path.name} has columns {', '.join(header)}, no list of samples")
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*COLUMNS, COLUMN))
    writer.writerows([*row, TEXTS[kind]] for row in rows)
    write_atomic(path, out.getvalue().encode(), mode=0o600)
    return path


def is_stamped(path: Path) -> bool:
    """Whether any file in a folder or zip says that it is of a reference.

    A `metadata.csv` or a PNG does, in zips that lie in a folder too: one is enough among others,
    and with any of the others left behind.
    """
    return next(stamped(path), None) is not None


def stamped(path: Path) -> Iterator[Path]:
    """The files below a folder, or the one file, that say so; of a zip the zip itself.

    No link is followed, and of each file its first bytes are read.
    """
    files = path.rglob("*") if path.is_dir() else iter([path.resolve()])
    for one in files:
        try:
            if one.is_file() and not one.is_symlink() and _file_says_so(one):
                yield one
        except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError):
            continue  # whoever reads it says what is wrong with it


def _file_says_so(path: Path) -> bool:
    if _is_marked(path.name):
        with path.open("rb") as file:
            return _says_so(path.name, file.read(_HEAD))
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        for name in filter(_is_marked, archive.namelist()):
            with archive.open(name) as file:
                if _says_so(name, file.read(_HEAD)):
                    return True
    return False


def _is_marked(name: str) -> bool:
    """Whether a file of that name would bear the stamp."""
    return name.lower().endswith((_TABLE, _PICTURE))


def _says_so(name: str, head: bytes) -> bool:
    """By the header of a table, or by the text fields of a PNG, which come before its pixels."""
    if name.lower().endswith(_TABLE):
        header = head.partition(b"\n")[0].decode(errors="replace")
        return COLUMN in header.strip().split(",")
    return KEY.encode() in head.partition(b"IDAT")[0]


def _read(path: Path) -> tuple[tuple[str, ...], list[list[str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file, strict=True)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path.name} in {path.parent.name}/ is no readable CSV") from error
    return tuple(header), rows
