"""Columns that name a record's privacy unit: metadata files and NPZ arrays."""

import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from dpsynth.errors import PlanError
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import DigitsSource, FolderSource, IdxSource, NpzSource
from dpsynth.readers import BadRecord, Record, UnreadableSourceError, open_source, open_units
from dpsynth.readers.npz import BLOCK
from dpsynth.readers.records import unit_text

CLASSES = ["cat", "dog"]
SHAPE = ImageShape(height=4, width=3)


def png(seed):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def folder(root, metadata, names=("a", "b", "c", "d"), zipped=False):
    files = {f"{name}.png": png(number) for number, name in enumerate(names)} | metadata
    if zipped:
        with zipfile.ZipFile(root / "data.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return root / "data.zip"
    (root / "data").mkdir(parents=True)
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (root / "data" / name).write_bytes(data)
    return root / "data"


def opened(path, column="patient"):
    return open_units(FolderSource(kind="folder", path=path), CLASSES, SHAPE, column)


CSV = "file_name,label,patient\na.png,cat,7\nb.png,dog, p1 \nc.png,dog,\nd.png,cat,7\n"
JSONL = "".join(
    json.dumps(row) + "\n"
    for row in (
        {"file_name": "a.png", "label": "cat", "patient": 7},
        {"file_name": "b.png", "label": "dog", "patient": "p1"},
        {"file_name": "c.png", "label": "dog", "patient": None},
        {"file_name": "d.png", "label": "cat", "patient": "7"},
    )
)


@pytest.mark.parametrize("zipped", [False, True], ids=["directory", "zip"])
@pytest.mark.parametrize(
    "metadata", [{"metadata.csv": CSV}, {"metadata.jsonl": JSONL}], ids=["csv", "jsonl"]
)
def test_a_column_of_the_metadata_names_units(metadata, zipped, tmp_path):
    source = opened(folder(tmp_path, metadata, zipped=zipped))
    items = list(source)
    assert [item.unit for item in items if isinstance(item, Record)] == ["7", "p1", "7"]
    (bad,) = (item for item in items if isinstance(item, BadRecord))
    assert (bad.name, bad.reason) == ("c.png", "no patient in its row")
    assert list(source.unit_names()) == ["7", "p1", "", "7"]
    found = dict(source.select([0, 2, 3]))
    assert list(found) == [0, 2, 3]
    assert isinstance(found[2], BadRecord)
    np.testing.assert_array_equal(found[3].image, items[3].image)


@pytest.mark.parametrize("value", [True, 1.5, ["p"], {"a": 1}, "", "  ", None])
def test_a_value_that_is_no_text_or_whole_number_makes_the_record_bad(value, tmp_path):
    row = json.dumps({"file_name": "a.png", "label": "cat", "patient": value}) + "\n"
    source = opened(folder(tmp_path, {"metadata.jsonl": row}, names=["a"]))
    assert [type(item) for item in source] == [BadRecord]
    assert list(source.unit_names()) == [""]


def test_a_name_typed_in_two_ways_is_one_unit(tmp_path):
    rows = "file_name,label,patient\na.png,cat,Ren\u00e9\nb.png,cat, Rene\u0301\n"
    source = opened(folder(tmp_path, {"metadata.csv": rows}, names=["a", "b"]))
    assert len({item.unit for item in source}) == 1


@pytest.mark.parametrize("metadata", [{}, {"metadata.csv": "file_name,label\na.png,cat\n"}])
def test_a_folder_without_the_column_is_unreadable(metadata, tmp_path):
    source = opened(folder(tmp_path, metadata))
    for read in (lambda: list(source), lambda: list(source.unit_names())):
        with pytest.raises(UnreadableSourceError) as caught:
            read()
        assert "patient" in caught.value.detail


def test_bad_rows_have_no_unit_and_keep_their_place(tmp_path):
    rows = "file_name,label,patient\na.png,cat,1\ngone.png,cat,1\nb.png,dog,2\nb.png,dog,2\n"
    source = opened(folder(tmp_path, {"metadata.csv": rows}, names=["a", "b"]))
    assert list(source.unit_names()) == ["1", "", "", ""]
    assert [type(item) for _, item in source.select([0, 1, 3])] == [Record, BadRecord, BadRecord]


def test_rows_of_another_unit_decide_on_nothing(tmp_path):
    """A unit that names the files of others, or a row without a unit, takes no image away."""
    own = "file_name,label,patient\na.png,cat,1\nb.png,dog,1\n"
    alone = opened(folder(tmp_path / "alone", {"metadata.csv": own}, names=["a", "b"]))
    rows = own + "a.png,cat,2\nb.png,dog,2\nb.png,cat,\n"
    beside = opened(folder(tmp_path / "beside", {"metadata.csv": rows}, names=["a", "b"]))
    kept = [item for item in beside if isinstance(item, Record) and item.unit == "1"]
    assert [x.image.tobytes() for x in kept] == [x.image.tobytes() for x in alone]
    assert len(kept) == 2


def test_without_a_column_records_name_no_unit(tmp_path):
    path = folder(tmp_path, {"metadata.csv": CSV})
    records = list(open_source(FolderSource(kind="folder", path=path), CLASSES, SHAPE))
    assert [record.unit for record in records] == [""] * 4


def archive(root, units, n=None, **arrays):
    n = len(units) if n is None else n
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 4, 3), dtype=np.uint8)
    np.savez(root / "data.npz", images=images, labels=np.arange(n) % 2, patient=units, **arrays)
    source = NpzSource(kind="npz", path=root / "data.npz")
    return images, open_units(source, CLASSES, SHAPE, "patient")


@pytest.mark.parametrize(
    ("units", "names"),
    [
        (np.array([3, -1, 3]), ["3", "-1", "3"]),
        (np.array(["a", "", " a"]), ["a", "", "a"]),
        (np.array([b"x", b"\xff", b"y"]), ["x", "", "y"]),
        (np.array([2**63, 0, 5], np.uint64), [str(2**63), "0", "5"]),
    ],
)
def test_an_array_names_units(units, names, tmp_path):
    images, source = archive(tmp_path, units)
    assert list(source.unit_names()) == names
    items = list(source)
    assert [getattr(item, "unit", "") for item in items] == names
    assert all("patient" in item.reason for item in items if isinstance(item, BadRecord))
    for place, item in source.select([0, 2]):
        np.testing.assert_array_equal(item.image[..., 0], images[place])


def test_select_reads_places_across_blocks(tmp_path):
    n = 2 * BLOCK + 10
    images, source = archive(tmp_path, np.arange(n) // 3)
    places = [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 9]
    found = list(source.select(places))
    assert [place for place, _ in found] == places
    for place, item in found:
        np.testing.assert_array_equal(item.image[..., 0], images[place])
        assert item.unit == str(place // 3)
    assert list(source.select([])) == []


@pytest.mark.parametrize(
    "units", [np.array([1.0, 2, 3]), np.zeros((3, 2), int), np.array([1, 2]), np.array([True] * 3)]
)
def test_an_array_that_names_no_units_is_unreadable(units, tmp_path):
    _, source = archive(tmp_path, units, n=3)
    for read in (lambda: list(source), lambda: list(source.unit_names())):
        with pytest.raises(UnreadableSourceError):
            read()


def test_an_absent_array_is_unreadable(tmp_path):
    _, source = archive(tmp_path, np.arange(3))
    other = open_units(source._source, CLASSES, SHAPE, "author")
    with pytest.raises(UnreadableSourceError) as caught:
        list(other)
    assert "author" in caught.value.detail


@pytest.mark.parametrize(
    "source",
    [DigitsSource(kind="digits"), IdxSource(kind="idx", images="a", labels="b")],
    ids=["digits", "idx"],
)
def test_sources_without_columns_are_refused(source):
    with pytest.raises(PlanError, match="has no column patient"):
        open_units(source, CLASSES, SHAPE, "patient")


@pytest.mark.parametrize("other", ["p7\u200b", "\ufeffp7", "\uff50\uff17", "p\u00ad7", " p7\t"])
def test_invisible_and_wide_characters_make_no_other_unit(other):
    assert unit_text(other) == unit_text("p7") == "p7"


def test_a_long_cell_ends_no_source(tmp_path):
    rows = f"file_name,label,patient,note\na.png,cat,1,\nb.png,cat,2,{'x' * 200_000}\n"
    source = opened(folder(tmp_path, {"metadata.csv": rows}, names=["a", "b"]))
    assert [item.unit for item in source] == ["1", "2"]
