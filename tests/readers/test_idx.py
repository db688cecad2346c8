"""IDX pairs: round trips, and no bytes that end in anything but records or a DataError."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpsynth.errors import DataError
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import IdxSource
from dpsynth.readers import BadRecord, Record, UnreadableSourceError, open_source

CLASSES = ["zero", "one", "two"]


def idx_bytes(array: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.tobytes()


def write(folder: Path, images: bytes, labels: bytes) -> IdxSource:
    (folder / "images").write_bytes(images)
    (folder / "labels").write_bytes(labels)
    return IdxSource(kind="idx", images=folder / "images", labels=folder / "labels")


def read(source: IdxSource, shape=(4, 3, 1), classes=CLASSES) -> list:
    image = ImageShape(height=shape[0], width=shape[1], channels=shape[2])
    return list(open_source(source, classes, image))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), channels=st.sampled_from([1, 3]), zipped=st.booleans())
def test_round_trip(data, channels, zipped, tmp_path_factory):
    n = data.draw(st.integers(0, 5))
    shape = (n, 4, 3) if channels == 1 else (n, 4, 3, 3)
    images = data.draw(hnp.arrays(np.uint8, shape))
    labels = data.draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 2)))
    pack = gzip.compress if zipped else bytes
    source = write(tmp_path_factory.mktemp("idx"), pack(idx_bytes(images)), pack(idx_bytes(labels)))
    records = read(source, (4, 3, channels))
    assert [record.label for record in records] == labels.tolist()
    for record, image in zip(records, images, strict=True):
        np.testing.assert_array_equal(record.image, image.reshape(4, 3, channels))


def test_more_than_one_block(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (2500, 4, 3), dtype=np.uint8)
    labels = (np.arange(2500) % 3).astype(np.uint8)
    records = read(write(tmp_path, idx_bytes(images), idx_bytes(labels)))
    np.testing.assert_array_equal(np.stack([r.image for r in records])[..., 0], images)


def test_an_undeclared_label_is_one_bad_record_and_the_rest_is_read(tmp_path):
    images = np.zeros((3, 4, 3), np.uint8)
    source = write(tmp_path, idx_bytes(images), idx_bytes(np.array([0, 9, 2], np.uint8)))
    good, bad, last = read(source)
    assert isinstance(good, Record) and isinstance(last, Record)
    assert bad == BadRecord("image 1", "label 9 is undeclared: the plan declares 3 classes")


GOOD_IMAGES = idx_bytes(np.arange(36, dtype=np.uint8).reshape(3, 4, 3))
GOOD_LABELS = idx_bytes(np.array([0, 1, 2], np.uint8))


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        pytest.param(GOOD_IMAGES[:-1], GOOD_LABELS, id="truncated images"),
        pytest.param(GOOD_IMAGES, GOOD_LABELS[:-1], id="truncated labels"),
        pytest.param(GOOD_IMAGES + b"\0", GOOD_LABELS, id="trailing byte"),
        pytest.param(gzip.compress(GOOD_IMAGES)[:-9], GOOD_LABELS, id="truncated gzip"),
        pytest.param(b"\x1f\x8bgarbage", GOOD_LABELS, id="no gzip"),
        pytest.param(GOOD_IMAGES, idx_bytes(np.zeros(2, np.uint8)), id="fewer labels"),
        pytest.param(GOOD_LABELS, GOOD_LABELS, id="labels for images"),
        pytest.param(b"\0\0\x0d\x03" + GOOD_IMAGES[4:], GOOD_LABELS, id="floats"),
        pytest.param(b"", b"", id="empty"),
        pytest.param(struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 4, 3), GOOD_LABELS, id="bomb"),
        pytest.param(idx_bytes(np.zeros((3, 3, 4), np.uint8)), GOOD_LABELS, id="another shape"),
        pytest.param(idx_bytes(np.zeros((3, 4, 3, 3), np.uint8)), GOOD_LABELS, id="channels"),
        pytest.param(idx_bytes(np.zeros((3, 0, 3), np.uint8)), GOOD_LABELS, id="no pixels"),
    ],
)
def test_a_damaged_source_is_unreadable_and_names_nothing(images, labels, tmp_path):
    source = write(tmp_path, images, labels)
    with pytest.raises(UnreadableSourceError) as caught:
        read(source)
    assert caught.value.exit_code == 5
    assert caught.value.detail
    assert str(tmp_path) not in caught.value.message + caught.value.hint


def test_an_absent_file_is_unreadable_and_names_nothing(tmp_path):
    source = IdxSource(kind="idx", images=tmp_path / "secret", labels=tmp_path / "secret2")
    with pytest.raises(UnreadableSourceError) as caught:
        read(source)
    assert "secret" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(
    images=st.one_of(
        st.binary(max_size=80),
        st.binary(max_size=60).map(lambda tail: GOOD_IMAGES[:8] + tail),
        st.binary(max_size=40).map(gzip.compress),
    ),
    labels=st.one_of(st.just(GOOD_LABELS), st.binary(max_size=20)),
    declared=st.booleans(),
)
def test_any_bytes_end_in_records_or_a_data_error(images, labels, declared, tmp_path_factory):
    source = write(tmp_path_factory.mktemp("idx"), images, labels)
    shape = ImageShape(height=4, width=3) if declared else None
    try:
        items = list(open_source(source, CLASSES if declared else None, shape))
    except DataError:
        return
    assert all(isinstance(item, Record | BadRecord) for item in items)


MNIST = Path(__file__).resolve().parents[3] / "shared/data/mnist"


@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST is not beside this checkout")
def test_real_mnist() -> None:
    source = IdxSource(
        kind="idx",
        images=MNIST / "t10k-images-idx3-ubyte.gz",
        labels=MNIST / "t10k-labels-idx1-ubyte.gz",
    )
    records = read(source, (28, 28, 1), [str(digit) for digit in range(10)])
    assert len(records) == 10_000
    assert all(isinstance(record, Record) for record in records)
    assert [record.label for record in records[:5]] == [7, 2, 1, 0, 4]
    assert 30 < np.mean([record.image.mean() for record in records]) < 37
