"""A real image folder in a zip, with captions and labels beside each file."""

import csv
import io
import zipfile
from pathlib import Path

import pytest

from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import FolderSource
from dpsynth.readers import Record, open_source

EMOJI = Path(__file__).resolve().parents[3] / "shared/data/emoji/noto.zip"


@pytest.mark.skipif(not EMOJI.is_file(), reason="the emoji archive is not beside this checkout")
def test_a_real_archive_reads_whole() -> None:
    with zipfile.ZipFile(EMOJI) as archive:
        text = archive.read("metadata.csv").decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    classes = sorted({row["label"] for row in rows})
    source = FolderSource(kind="folder", path=EMOJI)
    image = ImageShape(height=64, width=64, channels=3)
    items = list(open_source(source, classes, image))
    assert len(items) == len(rows) > 1_000
    assert all(isinstance(item, Record) and item.image.shape == (64, 64, 3) for item in items)
