"""What says that it is a reference is found among whatever else, by the first bytes of a file."""

import zipfile

import numpy as np
import pytest

from dpsynth.artifacts.nonprivate import is_stamped, reference_stamps, stamped
from dpsynth.artifacts.sheet import encode_png

PLAIN, STAMP = {"dpsynth": "synthetic"}, reference_stamps("nonprivate")


def png(stamp, side=8):
    return encode_png(np.full((side, side, 1), 7, np.uint8), stamp)


@pytest.fixture
def folder(tmp_path):
    """Plain images under names before and after, so that neither end would do."""
    for name in ("a.png", "z.png"):
        (tmp_path / name).write_bytes(png(PLAIN))
    (tmp_path / "metadata.csv").write_text("file_name,label,text\na.png,1,one\n")
    return tmp_path


@pytest.mark.parametrize("name", ["m.png", "deep/in/m.png", "m.PNG"])
def test_one_image_among_others_is_enough(folder, name):
    assert not is_stamped(folder)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(STAMP, 64))
    assert list(stamped(folder)) == [path]


def test_one_table_among_others_is_enough(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "metadata.csv").write_text("file_name,label,text,stamp\n")
    assert [path.parent.name for path in stamped(folder)] == ["sub"]


def test_a_zip_is_looked_into_wherever_it_lies_and_whatever_it_is_called(folder):
    with zipfile.ZipFile(folder / "pack.dat", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/0.png", png(PLAIN))
        archive.writestr("x/1.png", png(STAMP))
    assert list(stamped(folder)) == [folder / "pack.dat"]
    (folder.parent / f"{folder.name}-link").symlink_to(folder / "pack.dat")
    assert is_stamped(folder.parent / f"{folder.name}-link")


def test_pixels_and_damage_say_nothing(folder):
    (folder / "m.png").write_bytes(png(PLAIN) + STAMP["dpsynth"].encode() + b"dpsynth-nonprivate")
    (folder / "broken.zip").write_bytes(b"PK\x05\x06" + bytes(40))
    (folder / "gone.png").symlink_to(folder / "nowhere")
    assert not is_stamped(folder)
    assert not is_stamped(folder / "none")
