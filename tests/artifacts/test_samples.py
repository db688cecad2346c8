"""Samples on disk: round trips, resumption, and clear errors for damaged folders."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from sklearn.datasets import load_digits

from dpsynth.artifacts.samples import (
    SamplesWriter,
    content_digest,
    read_samples,
    read_summary,
    summary_path,
    write_samples,
)
from dpsynth.artifacts.sheet import contact_sheet, rows_by_class, side_by_side
from dpsynth.errors import DataError, MissingError, UsageError

CLASSES = [str(i) for i in range(10)]
AWKWARD = ["plain", 'a "quoted", name', "two\nlines", "Ünïcode ✓", " 7", "=1+1"]


def digits(n: int) -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    images = (data.images[:n, ..., None] * 15.9).astype(np.uint8)
    return images, data.target[:n].astype(np.int64)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_round_trip(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = data.draw(
        st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]))
    )
    images = data.draw(arrays(np.uint8, shape))
    labels = data.draw(arrays(np.int64, shape[0], elements=st.integers(0, len(AWKWARD) - 1)))
    folder = tmp_path_factory.mktemp("round") / "samples"
    write_samples(folder, images, labels, AWKWARD)
    back, back_labels = read_samples(folder, AWKWARD, shape[1:])
    np.testing.assert_array_equal(back, images)
    np.testing.assert_array_equal(back_labels, labels)


def test_real_digits_load_as_an_image_folder(tmp_path: Path) -> None:
    images, labels = digits(50)
    folder = tmp_path / "samples"
    texts = [f"a handwritten {label}" for label in labels]
    write_samples(folder, images, labels, CLASSES, texts=texts, stamp={"dpsynth": "synthetic"})
    with (folder / "metadata.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["file_name", "label", "text"]
    # What an image-folder loader does: every file_name is relative to the metadata file's folder.
    for row, image, label in zip(rows, images, labels, strict=True):
        with Image.open(folder / row["file_name"]) as opened:
            assert opened.text["dpsynth"] == "synthetic"
            np.testing.assert_array_equal(np.asarray(opened), image[..., 0])
        assert row["label"] == CLASSES[label]
        assert row["text"] == f"a handwritten {label}"
    listed = {row["file_name"] for row in rows}
    assert {f"images/{p.name}" for p in (folder / "images").iterdir()} == listed
    assert not (folder / ".parts").exists()


def test_killed_between_shards_goes_on(tmp_path: Path) -> None:
    images, labels = digits(30)
    folder, origin = tmp_path / "samples", {"model": "abc", "guidance": 1.5}
    first = SamplesWriter(folder, CLASSES, origin=origin)
    first.add(images[:10], labels[:10])
    # A shard cut short: images on disk that no list names.
    (folder / "images" / "0000010.png").write_bytes(b"half")
    with pytest.raises(MissingError):
        read_samples(folder, CLASSES)
    second = SamplesWriter(folder, CLASSES, origin=origin)
    assert second.written == 10 and second.shards == 1
    second.add(images[10:], labels[10:])
    second.finish()
    back, back_labels = read_samples(folder, CLASSES)
    np.testing.assert_array_equal(back, images)
    np.testing.assert_array_equal(back_labels, labels)
    summary = read_summary(folder)
    assert summary is not None and summary["count"] == 30 and summary["origin"] == origin
    assert summary["content_sha256"] == content_digest(folder)


def test_shards_of_another_origin_are_discarded(tmp_path: Path) -> None:
    images, labels = digits(30)
    folder = tmp_path / "samples"
    SamplesWriter(folder, CLASSES, origin={"model": "old"}).add(images, labels)
    other = SamplesWriter(folder, CLASSES, origin={"model": "new"})
    assert other.written == 0
    other.add(images[:5], labels[:5])
    other.finish()
    assert len(list((folder / "images").iterdir())) == 5


def test_sampling_anew_replaces_the_finished_folder(tmp_path: Path) -> None:
    images, labels = digits(20)
    folder = tmp_path / "samples"
    write_samples(folder, images, labels, CLASSES)
    write_samples(folder, images[:3], labels[:3], CLASSES)
    assert len(read_samples(folder, CLASSES)[0]) == 3
    # An edited list is not what the summary speaks of.
    (folder / "metadata.csv").write_text("file_name,label,text\n")
    assert summary_path(folder).exists() and read_summary(folder) is None


def damage(folder: Path, how: str) -> None:
    metadata, first = folder / "metadata.csv", folder / "images" / "0000000.png"
    text = metadata.read_text()
    if how == "missing image":
        first.unlink()
    elif how == "truncated image":
        first.write_bytes(first.read_bytes()[:40])
    elif how == "not an image":
        first.write_bytes(b"hello")
    elif how == "other size":
        Image.new("L", (9, 8)).save(first)
    elif how == "other mode":
        Image.new("RGBA", (8, 8)).save(first)
    elif how == "undeclared label":
        metadata.write_text(text.replace(",0,", ",eleven,", 1))
    elif how == "outside":
        Image.new("L", (8, 8)).save(folder.parent / "x.png")
        metadata.write_text(text.replace("images/0000000.png", "../x.png"))
    elif how == "columns":
        metadata.write_text(text.replace("file_name", "name", 1))
    elif how == "short row":
        metadata.write_text(text + "images/0000000.png\n")
    elif how == "empty":
        metadata.write_text("file_name,label,text\n")
    elif how == "binary":
        metadata.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    "how",
    [
        "missing image",
        "truncated image",
        "not an image",
        "other size",
        "other mode",
        "undeclared label",
        "outside",
        "columns",
        "short row",
        "empty",
        "binary",
    ],
)
def test_damage_is_a_data_error(tmp_path: Path, how: str) -> None:
    images, labels = digits(4)
    folder = tmp_path / "samples"
    write_samples(folder, images, labels, CLASSES)
    damage(folder, how)
    with pytest.raises(DataError):
        read_samples(folder, CLASSES, (8, 8, 1))


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (np.zeros((2, 8, 8, 1)), np.zeros(2, dtype=int)),
        (np.zeros((2, 8, 8, 2), dtype=np.uint8), np.zeros(2, dtype=int)),
        (np.zeros((2, 8, 8, 1), dtype=np.uint8), np.zeros(3, dtype=int)),
        (np.zeros((2, 8, 8, 1), dtype=np.uint8), np.array([0, 10])),
        (np.zeros((2, 8, 8, 1), dtype=np.uint8), np.array([0.0, 1.0])),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, images: np.ndarray, labels: np.ndarray
) -> None:
    with pytest.raises(UsageError):
        write_samples(tmp_path / "samples", images, labels, CLASSES)


def test_contact_sheet_shows_every_class(tmp_path: Path) -> None:
    images, labels = digits(200)
    rows = rows_by_class(images, labels, CLASSES)
    assert [name for name, _ in rows] == CLASSES
    path = contact_sheet(rows, tmp_path / "sheet.png", title="digits", stamp={"dpsynth": "x"})
    with Image.open(path) as sheet:
        assert sheet.text == {"dpsynth": "x"}
        assert sheet.width > 10 * 56 and sheet.height > 10 * 56
    pairs = [(name, [group, group[:5]]) for name, group in rows]
    side_by_side(pairs, ["synthetic", "real"], tmp_path / "pair.png")
    with pytest.raises(UsageError):
        contact_sheet([("none", images[:0])], tmp_path / "none.png")
    # A class without images leaves its row empty.
    contact_sheet([("some", images[:2]), ("none", images[:0])], tmp_path / "sheet.png")
