"""NPZ archives: round trips, floats, objects, damage."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpsynth.errors import DataError
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import NpzSource
from dpsynth.readers import BadRecord, Record, UnreadableSourceError, open_source

CLASSES = ["zero", "one", "two"]
LABELS = np.array([0, 1, 2])


def save(path: Path, save_with=np.savez, **arrays) -> NpzSource:
    save_with(path, **arrays)
    return NpzSource(kind="npz", path=path)


def read(source: NpzSource, channels: int = 1) -> list:
    return list(open_source(source, CLASSES, ImageShape(height=4, width=3, channels=channels)))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), channels=st.sampled_from([None, 1, 3]), packed=st.booleans())
def test_round_trip(data, channels, packed, tmp_path_factory):
    n = data.draw(st.integers(0, 5))
    shape = (n, 4, 3) if channels is None else (n, 4, 3, channels)
    images = data.draw(hnp.arrays(np.uint8, shape))
    kind = data.draw(st.sampled_from([np.int64, np.uint8, ">i4"]))
    labels = data.draw(hnp.arrays(kind, n, elements=st.integers(0, 2)))
    writer = np.savez_compressed if packed else np.savez
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    records = read(save(path, writer, images=images, labels=labels), channels or 1)
    assert [record.label for record in records] == labels.tolist()
    for record, image in zip(records, images, strict=True):
        np.testing.assert_array_equal(record.image, image.reshape(4, 3, channels or 1))


@pytest.mark.parametrize("dtype", ["f2", "<f4", ">f8"])
def test_floats_in_the_unit_interval_are_scaled(dtype, tmp_path):
    images = (np.arange(36).reshape(3, 4, 3) / 35).astype(dtype)
    records = read(save(tmp_path / "a.npz", images=images, labels=LABELS))
    expected = np.rint(images.astype(float) * 255)
    np.testing.assert_array_equal(np.stack([r.image for r in records])[..., 0], expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.01, 1.01, 255.0])
def test_a_float_outside_the_unit_interval_is_one_bad_record(value, tmp_path):
    images = np.zeros((3, 4, 3), np.float32)
    images[1, 2, 2] = value
    first, bad, last = read(save(tmp_path / "a.npz", images=images, labels=LABELS))
    assert isinstance(first, Record) and isinstance(last, Record)
    assert isinstance(bad, BadRecord) and bad.name == "image 1"


@pytest.mark.parametrize("label", [-1, 3, 2**40])
def test_an_undeclared_label_is_one_bad_record(label, tmp_path):
    labels = np.array([0, label, 2])
    items = read(save(tmp_path / "a.npz", images=np.zeros((3, 4, 3), np.uint8), labels=labels))
    assert [isinstance(item, BadRecord) for item in items] == [False, True, False]


GREY = np.zeros((3, 4, 3), np.uint8)


@pytest.mark.parametrize(
    "arrays",
    [
        pytest.param({"images": GREY}, id="no labels"),
        pytest.param({"labels": LABELS}, id="no images"),
        pytest.param({"images": GREY, "labels": LABELS[:2]}, id="counts differ"),
        pytest.param({"images": GREY, "labels": LABELS.astype(float)}, id="float labels"),
        pytest.param({"images": GREY, "labels": LABELS[:, None]}, id="labels of two axes"),
        pytest.param({"images": GREY.astype(np.int64), "labels": LABELS}, id="wide integers"),
        pytest.param({"images": GREY.astype(bool), "labels": LABELS}, id="bits"),
        pytest.param({"images": GREY.astype(object), "labels": LABELS}, id="objects"),
        pytest.param({"images": GREY, "labels": LABELS.astype(object)}, id="object labels"),
        pytest.param({"images": GREY.astype("c8"), "labels": LABELS}, id="complex"),
        pytest.param({"images": GREY.transpose(0, 2, 1), "labels": LABELS}, id="another shape"),
        pytest.param({"images": np.asfortranarray(GREY), "labels": LABELS}, id="fortran"),
        pytest.param({"images": GREY[0, 0], "labels": LABELS}, id="one axis"),
        pytest.param({"images": np.uint8(3), "labels": LABELS}, id="no axis"),
        pytest.param({"images": np.zeros((3, 4, 3), "u1,u1"), "labels": LABELS}, id="struct"),
    ],
)
def test_a_foreign_archive_is_unreadable(arrays, tmp_path):
    with pytest.raises(UnreadableSourceError) as caught:
        read(save(tmp_path / "secret.npz", **arrays))
    assert caught.value.exit_code == 5
    assert "secret" not in str(caught.value) + caught.value.hint


def test_an_object_array_is_never_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    traps = np.array([Trap()] * 3, dtype=object)
    with pytest.raises(UnreadableSourceError):
        read(save(tmp_path / "a.npz", images=traps, labels=LABELS))
    assert not (tmp_path / "sprung").exists()


def archive_bytes() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, images=np.arange(36, dtype=np.uint8).reshape(3, 4, 3), labels=LABELS)
    return file.getvalue()


ARCHIVE = archive_bytes()


def test_a_header_that_declares_too_much_is_unreadable(tmp_path):
    member = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**40, 4, 3)}
    np.lib.format.write_array_header_1_0(member, header)
    labels = io.BytesIO()
    np.lib.format.write_array_header_1_0(labels, header | {"shape": (2**40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", member.getvalue())
        archive.writestr("labels.npy", labels.getvalue())
    with pytest.raises(UnreadableSourceError):
        read(NpzSource(kind="npz", path=tmp_path / "a.npz"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_changed_byte_or_cut_ends_in_records_or_a_data_error(data, tmp_path_factory):
    content = bytearray(ARCHIVE)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    path.write_bytes(bytes(content[:cut]) if data.draw(st.booleans()) else bytes(content))
    try:
        items = read(NpzSource(kind="npz", path=path))
    except DataError:
        return
    assert all(isinstance(item, Record | BadRecord) for item in items)
