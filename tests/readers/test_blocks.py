"""Blocks hold what iteration yields, whatever the format, the threads and what is bad."""

import csv
import gzip
import io
import os
import struct
import threading
import warnings
import zipfile

import numpy as np
import pytest
from PIL import Image

from dpsynth.errors import UsageError
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import DigitsSource, FolderSource, IdxSource, NpzSource
from dpsynth.readers import BadRecord, UnreadableSourceError, blocks_of, open_source, open_units
from dpsynth.readers import records as records_module
from dpsynth.readers.parallel import WORKERS, in_order, workers

SHAPE, NAMES = (4, 3, 1), ["a", "b", "c"]
DECLARED = ImageShape(height=4, width=3)
COUNT = 40


def arrays(seed=0):
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 256, (COUNT, 4, 3), dtype=np.uint8)
    labels = draw.integers(0, 3, COUNT)
    labels[[5, 17]] = 9  # undeclared
    return images, labels


def idx(folder, pack):
    for name, array in zip(("images", "labels"), arrays(), strict=True):
        head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / name).write_bytes(pack(head + array.astype(np.uint8).tobytes()))
    source = IdxSource(kind="idx", images=folder / "images", labels=folder / "labels")
    return open_source(source, NAMES, DECLARED)


def npz(folder, kind=np.uint8, column=None):
    images, labels = arrays()
    if kind is not np.uint8:
        images = (images / 255).astype(kind)
        images[11, 0, 0] = np.nan
    labels = labels.astype(np.int64)
    labels[23] = -1
    owners = np.array([f"p{n % 7}" if n % 5 else "" for n in range(COUNT)])
    np.savez(folder / "a.npz", images=images, labels=labels, owner=owners)
    source = NpzSource(kind="npz", path=folder / "a.npz")
    if column is None:
        return open_source(source, NAMES, DECLARED)
    return open_units(source, NAMES, DECLARED, column)


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def pictures(folder, zipped=False, table=False):
    images, labels = arrays()
    files = {}
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        content = png(image if number != 8 else image.T.copy())  # of another shape
        files[f"{'abc'[label] if label < 3 else 'other'}/{number:02}.png"] = content
    files["a/notes.txt"] = b"passed over"
    files["b/30-damaged.png"] = png(images[0])[:-20]
    if table:
        rows = io.StringIO()
        lines = [
            (name, name[0]) for name in files if not name.startswith("a/3") and ".txt" not in name
        ]
        csv.writer(rows).writerows([("file_name", "label"), *lines, ("gone.png", "a")])
        files["metadata.csv"] = rows.getvalue().encode()
    root = folder / "tree"
    if zipped:
        root = folder / "tree.zip"
        with zipfile.ZipFile(root, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
    return open_source(FolderSource(kind="folder", path=root), NAMES, DECLARED)


SOURCES = {
    "idx": lambda folder: idx(folder, bytes),
    "gzipped idx": lambda folder: idx(folder, gzip.compress),
    "npz": npz,
    "npz of floats": lambda folder: npz(folder, np.float32),
    "npz with units": lambda folder: npz(folder, column="owner"),
    "folder": pictures,
    "zip": lambda folder: pictures(folder, zipped=True),
    "table": lambda folder: pictures(folder, table=True),
    "zipped table": lambda folder: pictures(folder, zipped=True, table=True),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("threads", ["1", "3"])
def test_blocks_hold_what_iteration_yields(name, rows, threads, tmp_path, monkeypatch):
    monkeypatch.setattr(records_module, "_BLOCK_ROWS", rows)
    monkeypatch.setenv(WORKERS, threads)
    source = SOURCES[name](tmp_path)
    items = list(source)
    good = [item for item in items if not isinstance(item, BadRecord)]
    blocks = list(blocks_of(source, SHAPE))
    images = np.concatenate([block.images for block in blocks])
    assert images.shape == (len(good), *SHAPE)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(images, np.stack([item.image for item in good]))
    assert [y for block in blocks for y in block.labels.tolist()] == [r.label for r in good]
    assert all(block.labels.dtype == np.int64 for block in blocks)
    bad = [item for item in items if isinstance(item, BadRecord)]
    assert bad
    assert [item for block in blocks for item in block.bad] == bad
    shares = [block.done for block in blocks]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_source_without_blocks_is_gathered():
    source = open_source(DigitsSource(kind="digits"), None, ImageShape(height=8, width=8))
    blocks = list(blocks_of(source, (8, 8, 1)))
    assert sum(map(len, blocks)) == 1797
    np.testing.assert_array_equal(blocks[0].images[7], list(source)[7].image)


@pytest.mark.parametrize("name", ["idx", "npz"])
def test_damage_ends_blocks_as_it_ends_iteration(name, tmp_path):
    source = SOURCES[name](tmp_path)
    path = source.files()[0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UnreadableSourceError):
        list(blocks_of(source, SHAPE))


def test_a_folder_of_any_shapes_has_no_blocks(tmp_path):
    pictures(tmp_path)
    source = open_source(FolderSource(kind="folder", path=tmp_path / "tree"), None, None)
    with pytest.raises(UsageError, match="shape is declared"):
        next(source.blocks())


def test_no_warning_of_pillow_is_printed_from_a_thread(tmp_path, monkeypatch, capfd):
    pictures(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # each picture is now called a bomb
    monkeypatch.setenv(WORKERS, "2")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        source = open_source(FolderSource(kind="folder", path=tmp_path / "tree"), NAMES, DECLARED)
        assert list(source)
    assert seen == []
    assert capfd.readouterr() == ("", "")


def test_a_file_that_became_a_link_is_not_opened(tmp_path):
    source = pictures(tmp_path)
    (tmp_path / "outside.png").write_bytes(png(arrays()[0][0]))
    victim = next(path for path in (tmp_path / "tree" / "a").iterdir() if path.suffix == ".png")
    from dpsynth.readers.tree import open_tree

    with open_tree(tmp_path / "tree") as tree:
        victim.unlink()
        victim.symlink_to(tmp_path / "outside.png")
        with pytest.raises(OSError, match="symbolic links"):
            tree.read(f"a/{victim.name}", 1 << 20)
    assert list(source)


@pytest.mark.parametrize("threads", ["1", "4"])
def test_work_is_in_order_and_little_of_it_runs_ahead(threads, monkeypatch):
    monkeypatch.setenv(WORKERS, threads)
    taken = []

    def items():
        for number in range(100):
            taken.append(number)
            yield number

    parts = in_order(lambda x: x * x, items(), 3)
    assert next(parts) == [0, 1, 4]
    assert len(taken) <= 3 * (2 * int(threads) + 1)
    assert [x for part in parts for x in part] == [n * n for n in range(3, 100)]


def test_what_work_raises_is_raised_and_threads_end(monkeypatch):
    monkeypatch.setenv(WORKERS, "2")
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda x: 1 // (x - 20), range(100), 4))
    early = in_order(lambda x: x, range(100), 4)
    next(early)
    early.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("given", ["", "0", "many", "-2"])
def test_without_a_setting_each_core_has_a_thread(given, monkeypatch):
    monkeypatch.setenv(WORKERS, given)
    assert workers() >= 1
    assert workers() <= (os.cpu_count() or 1)
    monkeypatch.setenv(WORKERS, "3")
    assert workers() == 3
