"""What is held at once does not grow with the number of images."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from dpsynth.artifacts import samples as sample_files
from dpsynth.artifacts.samples import read_samples
from dpsynth.artifacts.sheet import SIDE, contact_sheet, shrunk
from dpsynth.distributed.ranks import ALONE
from dpsynth.models.seeding import generator
from dpsynth.released import drawn
from dpsynth.released.asked import Asked
from dpsynth.released.drawn import Drawn, Made, write

SHAPE = (64, 64, 3)


def drawing(folder, monkeypatch, count):
    """Write so many samples; the images of each call, and the peak of NumPy's memory."""
    calls = []

    def pictures(labels, source):
        calls.append(len(labels))
        return Drawn(np.zeros((len(labels), *SHAPE), np.uint8))

    image = SimpleNamespace(height=64, width=64, channels=3)
    private = SimpleNamespace(image=image, classes=["cat", "dog"])
    verified = SimpleNamespace(plan=SimpleNamespace(private=private), lock=None)
    monkeypatch.setattr(drawn, "stamps", lambda _: {"dpsynth": "synthetic"})
    monkeypatch.setattr("dpsynth.artifacts.samples._HELD", 2**16)
    asked = Asked(["cat", "dog"], np.arange(2))
    tracemalloc.start()
    write(folder, verified, Made(pictures, {"count": count}), asked, source=generator(0),
          ranks=ALONE)  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return calls, peak


def test_shards_are_small_where_images_are_large(tmp_path, monkeypatch):
    few, low = drawing(tmp_path / "few", monkeypatch, 12)
    many, high = drawing(tmp_path / "many", monkeypatch, 60)
    assert max(few) == max(many) == 2**16 // (64 * 64 * 3)
    assert (sum(few), sum(many)) == (12, 60)
    assert high < low + 60 * 2_000  # rows of the list alone: images are 12,288 bytes each


def test_a_sheet_opens_what_it_shows(tmp_path, monkeypatch):
    drawing(tmp_path / "some", monkeypatch, 60)
    opened, read = [], sample_files.read_png
    monkeypatch.setattr(
        sample_files, "read_png", lambda *given: opened.append(given[1]) or read(*given)
    )
    images, labels = read_samples(tmp_path / "some", ["cat", "dog"], most=3, first=1)
    assert len(opened) == len(images) == 3 and labels.tolist() == [0] * 3


@pytest.mark.parametrize("side", [40, 256, 600])
def test_large_images_are_shrunk_on_sheets(tmp_path, side):
    images = np.tile(np.arange(side, dtype=np.uint8)[:, None, None], (2, 1, side, 3))
    small = shrunk(images)
    factor = max(1, side // SIDE)
    assert small.shape == (2, side // factor, side // factor, 3)
    assert factor > 1 or (small == images).all()
    if factor == 2:
        assert small[0, :3, 0, 0].tolist() == [0, 2, 4]  # of 0 1, 2 3, 4 5: halves to even
    assert contact_sheet([("rows", images)], tmp_path / "sheet.png").is_file()
