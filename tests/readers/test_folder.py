"""Image folders and zips: layouts, labels, and everything that is refused."""

import io
import json
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dpsynth.errors import DataError
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import FolderSource
from dpsynth.readers import BadRecord, Record, UnreadableSourceError, open_source

CLASSES = ["cat", "dog"]
SHAPE = ImageShape(height=4, width=3)
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (4, 3), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (4, 3, 3), dtype=np.uint8)


def encoded(array: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    picture = array if isinstance(array, Image.Image) else Image.fromarray(array)
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


PNG = encoded(GREY)


def make(root: Path, files: dict[str, bytes | str], zipped: bool = False) -> Path:
    if zipped:
        with zipfile.ZipFile(root / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return root / "data.zip"
    for name, content in files.items():
        path = root / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root / "data"


def opened(path: Path, image: ImageShape | None = SHAPE, classes=CLASSES):
    return open_source(FolderSource(kind="folder", path=path), classes, image)


def bad(path: Path, image: ImageShape = SHAPE) -> dict[str, str]:
    return {item.name: item.reason for item in opened(path, image) if isinstance(item, BadRecord)}


def labels(path: Path) -> list[int]:
    return [item.label for item in opened(path) if isinstance(item, Record)]


LAYOUTS = {
    "subfolders": {"cat/1.png": PNG, "dog/2.png": PNG, "dog/3.PNG": PNG},
    "wrapped": {"data/cat/1.png": PNG, "data/dog/2.png": PNG, "data/dog/3.png": PNG},
    "csv": {
        "metadata.csv": "file_name,label\na.png,cat\nx/b.png,dog\nc.png,dog\n",
        "a.png": PNG,
        "x/b.png": PNG,
        "c.png": PNG,
    },
    "csv with text": {
        "metadata.csv": "\ufefftext,file_name\r\ncat,a.png\r\ndog,b.png\r\ndog,c.png\r\n",
        "a.png": PNG,
        "b.png": PNG,
        "c.png": PNG,
    },
    "wrapped jsonl": {
        "data/metadata.jsonl": '{"file_name": "a.png", "label": "cat", "text": "a cat"}\n'
        '{"file_name": "b.png", "label": "dog"}\n\n{"file_name": "./c.png", "text": "dog"}\n',
        "data/a.png": PNG,
        "data/b.png": PNG,
        "data/c.png": PNG,
    },
}


@pytest.mark.parametrize("zipped", [False, True], ids=["directory", "zip"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, zipped, tmp_path):
    path = make(tmp_path, LAYOUTS[layout], zipped)
    items = list(opened(path))
    assert all(isinstance(item, Record) for item in items)
    assert [item.label for item in items] == [0, 1, 1]
    np.testing.assert_array_equal(items[0].image[..., 0], GREY)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), channels=st.sampled_from([1, 3]), zipped=st.booleans())
def test_round_trip(data, channels, zipped, tmp_path_factory):
    seeds = data.draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), max_size=5))
    files, expected = {}, []
    for number, (seed, label) in enumerate(seeds):
        shape = (4, 3) if channels == 1 else (4, 3, 3)
        array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        files[f"{CLASSES[label]}/{number}.png"] = encoded(array)
        expected.append((label, array.reshape(4, 3, channels).tobytes()))
    root = tmp_path_factory.mktemp("folder")
    (root / "data").mkdir()
    path = make(root, files, zipped)
    items = list(opened(path, ImageShape(height=4, width=3, channels=channels)))
    assert sorted((i.label, i.image.tobytes()) for i in items) == sorted(expected)


def test_numbers_are_class_names_too(tmp_path):
    files = {"metadata.jsonl": '{"file_name": "a.png", "label": 7}\n', "a.png": PNG}
    source = FolderSource(kind="folder", path=make(tmp_path, files))
    (record,) = open_source(source, ["3", "7"], SHAPE)
    assert record.label == 1


@pytest.mark.parametrize("zipped", [False, True], ids=["directory", "zip"])
def test_hidden_and_foreign_files_are_passed_over(zipped, tmp_path):
    files = {
        "cat/1.png": PNG,
        ".DS_Store": b"x",
        "cat/.1.png": b"x",
        "__MACOSX/cat/._1.png": b"x",
        "dog/Thumbs.db": b"x",
        "README.txt": b"x",
    }
    source = opened(make(tmp_path, files, zipped))
    assert [type(item) for item in source] == [Record]
    assert sorted(source.ignored()) == sorted(set(files) - {"cat/1.png"})


def with_chunk(png: bytes, kind: bytes, body: bytes) -> bytes:
    chunk = struct.pack(">I", len(body)) + kind + body
    chunk += struct.pack(">I", zlib.crc32(kind + body))
    return png[:33] + chunk + png[33:]


def bomb() -> bytes:
    """A PNG of 40,000 x 40,000 by its header, in some hundred bytes."""
    body = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    head = b"IHDR" + body
    return PNG[:8] + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + PNG[33:]


FLIPPED = bytearray(PNG)
FLIPPED[PNG.index(b"IDAT") + 8] ^= 0xFF
UNFIT = {
    "truncated": PNG[:-20],
    "flipped bit": bytes(FLIPPED),
    "empty": b"",
    "text": b"not an image at all",
    "wrong size": encoded(GREY.T.copy()),
    "colour": encoded(COLOUR),
    "palette": encoded(Image.fromarray(GREY).convert("P")),
    "one bit": encoded(Image.fromarray(GREY).convert("1")),
    "alpha": encoded(Image.fromarray(GREY).convert("LA")),
    "sixteen bits": encoded(GREY.astype(np.uint16) * 257),
    "transparent grey": encoded(GREY, transparency=0),
    "bomb": bomb(),
    "text bomb": with_chunk(PNG, b"zTXt", b"k\0\0" + zlib.compress(b"0" * 80_000_000)),
    "gif": encoded(GREY, "GIF"),
    "animated": encoded(
        Image.fromarray(GREY), save_all=True, append_images=[Image.fromarray(255 - GREY)]
    ),
    "huge file": PNG + bytes((1 << 24) + 1000),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("zipped", [False, True], ids=["directory", "zip"])
def test_one_unfit_picture_is_one_bad_record(kind, zipped, tmp_path, capfd):
    files = {"cat/a.png": PNG, "cat/b.png": UNFIT[kind], "dog/c.png": PNG}
    path = make(tmp_path, files, zipped)
    assert labels(path) == [0, 1]
    assert list(bad(path)) == ["cat/b.png"]
    assert capfd.readouterr() == ("", "")


def test_grey_where_colour_is_declared_is_bad(tmp_path):
    path = make(tmp_path, {"cat/a.png": PNG, "cat/b.png": encoded(COLOUR)})
    assert list(bad(path, ImageShape(height=4, width=3, channels=3))) == ["cat/a.png"]


def test_undeclared_and_absent_labels(tmp_path):
    path = make(tmp_path, {"cat/a.png": PNG, "cow/b.png": PNG, "c.png": PNG})
    assert bad(path) == {"cow/b.png": "label 'cow' is undeclared", "c.png": "not in a class folder"}


def test_bad_rows(tmp_path):
    rows = [
        {"file_name": "a.png", "label": "cat"},
        {"file_name": "twice.png", "label": "cat"},
        {"file_name": "./twice.png", "label": "dog"},
        {"file_name": "gone.png", "label": "cat"},
        {"file_name": "../out.png", "label": "cat"},
        {"file_name": "/etc/hostname", "label": "cat"},
        {"file_name": "b.png", "label": "cow"},
        {"file_name": "c.png"},
        {"file_name": "d.png", "label": ["cat"]},
        {"file_name": "e.png", "label": True},
        {"label": "cat"},
        ["a row that is a list"],
    ]
    names = ["a", "twice", "b", "c", "d", "e", "unlisted"]
    text = "".join(json.dumps(row) + "\n" for row in rows) + "{broken\n"
    files = {f"{name}.png": PNG for name in names} | {"metadata.jsonl": text}
    path = make(tmp_path, files)
    assert labels(path) == [0]
    found = [item for item in opened(path) if isinstance(item, BadRecord)]
    assert len(found) == 13  # eleven rows, the broken one, and the picture without a row
    reasons = {item.name: item.reason for item in found}
    assert "more than one row" in reasons["twice.png"]
    assert "missing" in reasons["gone.png"]
    assert "without a row" in reasons["unlisted.png"]


def test_removing_a_row_never_changes_two_records(tmp_path):
    """Rows that name one file: whatever row goes, the rest changes by one record at most."""
    rows = ["a.png,cat", "b.png,cat", "b.png,dog", "c.png,dog"]
    seen = []
    for left_out in [None, *range(len(rows))]:
        root = tmp_path / str(left_out)
        kept = [row for number, row in enumerate(rows) if number != left_out]
        files = dict.fromkeys(("a.png", "b.png", "c.png"), PNG)
        path = make(root, files | {"metadata.csv": "\n".join(["file_name,label", *kept])})
        seen.append(sorted(labels(path)))
    assert all(abs(len(other) - len(seen[0])) <= 1 for other in seen)
    assert seen == [[0, 1], [1], [0, 1, 1], [0, 0, 1], [0]]


@pytest.mark.parametrize(
    "files",
    [
        {"metadata.csv": "name,label\na.png,cat\n"},
        {"metadata.csv": "file_name,label,label\na.png,cat,cat\n"},
        {"metadata.csv": b"\xff\xfe\x00"},
        {"metadata.csv": 'file_name,label\n"a.png,cat\n'},
        {"metadata.csv": ""},
        {"metadata.csv": "file_name,label\n", "metadata.jsonl": ""},
        {"x/metadata.csv": "file_name,label\n", "y/metadata.csv": "file_name,label\n"},
    ],
)
@pytest.mark.parametrize("zipped", [False, True], ids=["directory", "zip"])
def test_damaged_metadata_is_unreadable(files, zipped, tmp_path):
    with pytest.raises(UnreadableSourceError) as caught:
        list(opened(make(tmp_path, files, zipped)))
    assert caught.value.exit_code == 5


def test_links_and_pipes(tmp_path):
    path = make(tmp_path, {"cat/a.png": PNG, "dog/b.png": PNG})
    (tmp_path / "outside.png").write_bytes(PNG)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.png").write_bytes(PNG)
    (path / "cat/out.png").symlink_to(tmp_path / "outside.png")
    (path / "cat/in.png").symlink_to("../dog/b.png")
    (path / "cat/gone.png").symlink_to("nowhere.png")
    (path / "cat/loop.png").symlink_to("loop.png")
    (path / "more").symlink_to(tmp_path / "other")
    (path / "again").symlink_to(path / "cat")
    os.mkfifo(path / "dog/pipe.png")
    assert labels(path) == [0, 0, 1]
    assert set(bad(path)) == {
        "cat/out.png",
        "cat/gone.png",
        "cat/loop.png",
        "more",
        "again",
        "dog/pipe.png",
    }


def test_a_root_that_is_a_link_is_the_custodians_choice(tmp_path):
    path = make(tmp_path, {"cat/a.png": PNG})
    (tmp_path / "link").symlink_to(path)
    assert labels(tmp_path / "link") == [0]


def test_zip_entries_that_lead_out(tmp_path):
    link = zipfile.ZipInfo("cat/link.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("cat/a.png", PNG)
        for name in ("../cat/b.png", "/cat/c.png", "C:/cat/d.png", "..\\cat\\e.png"):
            archive.writestr(name, PNG)
        archive.writestr(link, "/etc/hostname")
        with pytest.warns(UserWarning, match="Duplicate"):
            for _ in range(2):
                archive.writestr("cat/twice.png", PNG)
    path = tmp_path / "data.zip"
    assert labels(path) == [0]
    assert len(bad(path)) == 6
    assert "more than one entry" in bad(path)["cat/twice.png"]


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04", b"text"])
def test_neither_folder_nor_zip(content, tmp_path):
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    with pytest.raises(UnreadableSourceError) as caught:
        list(opened(tmp_path / "secret"))
    assert "secret" not in str(caught.value)


def test_public_pictures_of_any_size_and_mode(tmp_path):
    files = {
        "x/a.png": encoded(Image.fromarray(COLOUR).convert("P")),
        "y/b.png": encoded(GREY.T.copy()),
        "x/c.jpg": encoded(COLOUR, "JPEG"),
    }
    items = list(opened(make(tmp_path, files), image=None, classes=None))
    assert [item.label for item in items] == [0, 0, 1]
    assert {item.image.shape for item in items} == {(4, 3, 3), (3, 4, 1)}
    assert [
        item.name
        for item in opened(make(tmp_path, {"x/bomb.png": bomb()}), None, None)
        if isinstance(item, BadRecord)
    ] == ["x/bomb.png"]


ZIP_NAMES = st.sampled_from(["cat/a.png", "metadata.csv", "metadata.jsonl", "dog/b.jpg", ".x"])


@settings(max_examples=120, deadline=None)
@given(
    files=st.dictionaries(
        ZIP_NAMES,
        st.one_of(
            st.just(PNG),
            st.binary(max_size=60),
            st.integers(0, len(PNG) - 1).map(lambda i: PNG[:i] + b"\x55" + PNG[i + 1 :]),
            st.text(max_size=60).map(lambda text: b"file_name,label\n" + text.encode()),
        ),
    ),
    flip=st.integers(0, 2000),
    zipped=st.booleans(),
)
def test_garbage_ends_in_items_or_a_data_error(files, flip, zipped, tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    (root / "data").mkdir()
    path = make(root, files, zipped)
    if zipped:
        content = bytearray(path.read_bytes())
        content[flip % len(content)] ^= 0x81
        path.write_bytes(content)
    try:
        items = list(opened(path))
    except DataError:
        return
    assert all(isinstance(item, Record | BadRecord) for item in items)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_compressed_tiff_is_bad_and_its_library_says_nothing(damaged, tmp_path, capfd):
    """libtiff writes its complaints to the terminal by itself: a count of private files."""
    pixels = np.random.default_rng(0).integers(0, 256, (SHAPE.height, SHAPE.width), dtype=np.uint8)
    content = bytearray(encoded(pixels, "TIFF", compression="tiff_lzw"))
    if damaged:
        content[20:24] = b"\xff\xff\xff\xff"
    files = {"cat/lzw.tif": bytes(content), "cat/plain.tif": encoded(pixels, "TIFF")}
    path = make(tmp_path, files)
    assert list(bad(path)) == ["cat/lzw.tif"]
    assert labels(path) == [0]
    assert capfd.readouterr() == ("", "")
