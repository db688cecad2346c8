"""The stamp of reference images: what never belongs into a hand-out says so by itself.

A reference shows what a plan gives without privacy, or what public data alone give. Its PNGs and
sheets carry the stamp as text fields, its `metadata.csv` as a column of its own, by which
`artifacts.samples` refuses it as a release.
"""

import csv
import io
import zipfile
from itertools import islice
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
    """Whether a folder or zip of images says that it is a reference.

    In its `metadata.csv`, or in its first PNG where that file was left behind.
    """
    try:
        if path.is_dir():
            tables, pictures = path.rglob("metadata.csv"), path.rglob("*.png")
            found = [*islice(tables, 1), *islice(pictures, 1)]
            return any(_says_so(one.name, one.read_bytes()) for one in found)
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            listed = [name for name in names if name.endswith("metadata.csv")][:1]
            drawn = [name for name in names if name.endswith(".png")][:1]
            return any(_says_so(name, archive.read(name)) for name in listed + drawn)
    except (OSError, zipfile.BadZipFile, RuntimeError):
        return False  # whoever reads it says what is wrong with it


def _says_so(name: str, content: bytes) -> bool:
    """By the header of a table, or by the text fields of a PNG, which come before its pixels."""
    if name.endswith(".csv"):
        header = content.partition(b"\n")[0].decode(errors="replace")
        return COLUMN in header.strip().split(",")
    return KEY.encode() in content.partition(b"IDAT")[0]


def _read(path: Path) -> tuple[tuple[str, ...], list[list[str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file, strict=True)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path.name} in {path.parent.name}/ is no readable CSV") from error
    return tuple(header), rows
