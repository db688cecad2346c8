"""Captions of folders and archives: read where a plan has them, and never otherwise."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from dpsynth.errors import PlanError
from dpsynth.planning.caption_rules import PUBLIC, caption_rule
from dpsynth.planning.captions import FreeCaptions, Template
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import DigitsSource, FolderSource, NpzSource
from dpsynth.readers import BadRecord, UnreadableSourceError, blocks_of, open_source, open_units

CLASSES = ["cat", "dog"]
SHAPE = ImageShape(height=2, width=2)
MADE = Template(kind="template", template="a {size} {class}", slots={"size": ["big", "wee"]})
RULE = caption_rule(MADE, CLASSES)
FREE = caption_rule(FreeCaptions(kind="free"), CLASSES)


def png(value):
    out = io.BytesIO()
    Image.fromarray(np.full((2, 2), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def folder(path, rows, columns=("file_name", "label", "text"), lines=False):
    path.mkdir()
    for number in range(len(rows)):
        (path / f"{number}.png").write_bytes(png(number))
    given = [dict(zip(columns, (f"{n}.png", *row), strict=True)) for n, row in enumerate(rows)]
    if lines:
        text = "\n".join(json.dumps({k: v for k, v in row.items() if v != "-"}) for row in given)
        (path / "metadata.jsonl").write_text(text)
    else:
        body = [",".join(columns), *(",".join(f'"{v}"' for v in row.values()) for row in given)]
        (path / "metadata.csv").write_text("\n".join(body) + "\n")
    return FolderSource(kind="folder", path=path)


def archive(path, texts, labels=None, **more):
    count = len(texts)
    images = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    arrays = {"images": images, "said": np.array(texts), **more}
    if labels is not None:
        arrays["labels"] = np.array(labels)
    np.savez(path, **arrays)
    return NpzSource(kind="npz", path=path, captions="said")


def told(source):
    """Every item: pixel, label, text and unit, or the reason."""
    return [
        item.reason
        if isinstance(item, BadRecord)
        else (int(item.image[0, 0, 0]), item.label, item.text, item.unit)
        for item in source
    ]


def by_blocks(source):
    found = []
    for block in blocks_of(source, (2, 2, 1)):
        texts = block.texts or ("",) * len(block)
        found += [
            (int(i[0, 0, 0]), int(y), t)
            for i, y, t in zip(block.images, block.labels, texts, strict=True)
        ]
    return found


ROWS = [
    ("cat", "a big cat"),
    ("", " A  wee DOG"),
    ("dog", "a big cat"),
    ("cat", "a huge cat"),
    ("cat", ""),
    ("bird", "a big cat"),
]
SAID = [
    (0, 0, "a big cat", ""),
    (1, 1, "A wee DOG", ""),
    "a caption whose class is not the record's label",
    "a caption that is no filling of the template",
    "no caption (text of 1 to 1000 characters)",
    "label 'bird' is undeclared",
]


@pytest.mark.parametrize("lines", [False, True])
def test_a_folders_rows_with_captions_of_a_template(tmp_path, lines):
    source = open_source(folder(tmp_path / "x", ROWS, lines=lines), CLASSES, SHAPE, RULE)
    assert told(source) == SAID
    assert by_blocks(source) == [row[:3] for row in SAID if isinstance(row, tuple)]


def test_labels_may_be_absent_altogether(tmp_path):
    rows = [("a big cat",), ("a wee dog",)]
    source = folder(tmp_path / "x", rows, columns=("file_name", "text"))
    read = told(open_source(source, CLASSES, SHAPE, RULE))
    assert read == [(0, 0, "a big cat", ""), (1, 1, "a wee dog", "")]
    # Free captions don't tell a class.
    assert told(open_source(source, CLASSES, SHAPE, FREE)) == ["no label beside a free caption"] * 2


def test_without_captions_text_stands_in_for_the_label_as_before(tmp_path):
    rows = [("cat",), ("dog",)]
    source = folder(tmp_path / "x", rows, columns=("file_name", "text"))
    assert told(open_source(source, CLASSES, SHAPE)) == [(0, 0, "", ""), (1, 1, "", "")]
    assert all(block.texts is None for block in blocks_of(open_source(source, CLASSES, SHAPE),
                                                          (2, 2, 1)))  # fmt: skip


def test_a_caption_that_is_no_text_is_bad_and_no_other_record_is(tmp_path):
    path = tmp_path / "x"
    source = folder(path, [("cat", "a big cat")] * 4, lines=True)
    lines = (path / "metadata.jsonl").read_text().split("\n")
    lines[1] = lines[1].replace('"a big cat"', "7")
    lines[2] = lines[2].replace('"a big cat"', '"\\ud800"')
    (path / "metadata.jsonl").write_text("\n".join(lines))
    read = told(open_source(source, CLASSES, SHAPE, FREE))
    assert [isinstance(item, tuple) for item in read] == [True, False, False, True]


def test_a_folder_without_the_column_or_without_metadata_cannot_be_read(tmp_path):
    source = folder(tmp_path / "x", [("cat",)], columns=("file_name", "label"))
    with pytest.raises(UnreadableSourceError) as error:
        told(open_source(source, CLASSES, SHAPE, RULE))
    assert "text" in error.value.detail
    (tmp_path / "y" / "cat").mkdir(parents=True)
    (tmp_path / "y" / "cat" / "a.png").write_bytes(png(1))
    bare = FolderSource(kind="folder", path=tmp_path / "y")
    with pytest.raises(UnreadableSourceError) as error:
        told(open_source(bare, CLASSES, SHAPE, RULE))
    assert "column text" in error.value.detail
    assert told(open_source(bare, CLASSES, SHAPE)) == [(1, 0, "", "")]
    assert told(open_source(bare, None, None, PUBLIC)) == [(1, 0, "", "")]


@pytest.mark.parametrize("bytes_", [False, True])
def test_an_archive_with_captions(tmp_path, bytes_):
    texts = ["a big cat", "a wee  dog", "a big cat", "a huge cat", ""]
    stored = np.array([text.encode() for text in texts]) if bytes_ else texts
    source = archive(tmp_path / "x.npz", stored, [0, 1, 1, 0, 0])
    read = told(open_source(source, CLASSES, SHAPE, RULE))
    assert read == [SAID[0], (1, 1, "a wee dog", ""), *SAID[2:5]]
    assert by_blocks(open_source(source, CLASSES, SHAPE, RULE)) == [row[:3] for row in read[:2]]
    assert told(open_source(source, CLASSES, SHAPE))[3] == (3, 0, "", "")  # captions not read


@pytest.mark.parametrize("order", ["<", ">"])
def test_text_beyond_unicode_is_bad_and_no_other_record_is(tmp_path, order):
    texts = np.array(["a big cat", "a wee dog", "a wee cat"], f"{order}U9")
    for wrong in (0x110000, 0xFFFFFFFF):
        texts.view(f"{order}u4")[9] = wrong  # the second caption's first character
        source = archive(tmp_path / "x.npz", texts, who=texts)
        opened = open_source(source, CLASSES, SHAPE, RULE)
        assert told(opened) == [SAID[0], SAID[4], (2, 0, "a wee cat", "")]
        units = open_units(source, CLASSES, SHAPE, "who", RULE)
        assert list(units.unit_names()) == ["a big cat", "", "a wee cat"]


def test_an_archive_without_labels(tmp_path):
    source = archive(tmp_path / "x.npz", ["a big cat", "a wee dog"])
    read = [(0, 0, "a big cat", ""), (1, 1, "a wee dog", "")]
    opened = open_source(source, CLASSES, SHAPE, RULE)
    assert told(opened) == read and by_blocks(opened) == [row[:3] for row in read]
    for rule in (FREE, None):
        with pytest.raises(UnreadableSourceError):
            told(open_source(source, CLASSES, SHAPE, rule))


@pytest.mark.parametrize("said", [np.arange(2), np.array([["a", "b"]] * 2), np.array(["a"])])
def test_an_array_of_captions_must_fit(tmp_path, said):
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 2, 2), np.uint8), labels=[0, 1], said=said)
    source = NpzSource(kind="npz", path=tmp_path / "x.npz", captions="said")
    with pytest.raises(UnreadableSourceError):
        told(open_source(source, CLASSES, SHAPE, RULE))


def test_units_of_several_images_have_captions_too(tmp_path):
    texts = ["a big cat", "a wee dog", "nothing", "a wee cat"]
    source = archive(tmp_path / "x.npz", texts, who=np.array(["p", "q", "p", ""]))
    units = open_units(source, CLASSES, SHAPE, "who", RULE)
    assert list(units.unit_names()) == ["p", "q", "p", ""]
    items = [item for _, item in units.select([0, 1, 2])]
    assert told(items) == [(0, 0, "a big cat", "p"), (1, 1, "a wee dog", "q"), SAID[3]]
    rows = [("cat", "a big cat", "p"), ("dog", "a big cat", "p")]
    table = folder(tmp_path / "y", rows, columns=("file_name", "label", "text", "who"))
    units = open_units(table, CLASSES, SHAPE, "who", RULE)
    assert told(units) == [(0, 0, "a big cat", "p"), SAID[2]]
    assert by_blocks(units) == [(0, 0, "a big cat")]


def test_a_source_that_can_have_no_captions_is_refused():
    with pytest.raises(PlanError):
        open_source(DigitsSource(kind="digits"), CLASSES, SHAPE, RULE)
    assert next(iter(open_source(DigitsSource(kind="digits"), None, None, PUBLIC))).text == ""


def test_public_captions_may_be_absent_and_are_never_labels(tmp_path):
    rows = [("one",), ("two",), ("",)]
    source = folder(tmp_path / "x", rows, columns=("file_name", "text"))
    read = told(open_source(source, None, None, PUBLIC))
    assert read == [(0, 0, "one", ""), (1, 0, "two", ""), (2, 0, "", "")]
    rows = [("u", "one"), ("v", "two"), ("u", "three")]
    labelled = folder(tmp_path / "y", rows)
    read = told(open_source(labelled, None, None, PUBLIC))
    assert read == [(0, 0, "one", ""), (1, 1, "two", ""), (2, 0, "three", "")]
