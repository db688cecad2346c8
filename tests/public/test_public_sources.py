"""Public sources: resized and converted to the plan's shape, hashed, counted."""

import numpy as np
import pytest

from dpsynth.errors import DataError, MissingError
from dpsynth.planning.schema import Plan
from dpsynth.public.sources import read_public


def plan(public: list[dict], height: int = 8, width: int = 8, channels: int = 1) -> Plan:
    return Plan.model_validate(
        {
            "name": "small",
            "budget": {"epsilon": 1.0, "delta": 1e-5},
            "private": {
                "source": {"kind": "digits"},
                "capacity": 10,
                "image": {"height": height, "width": width, "channels": channels},
                "classes": ["a", "b"],
                "held_out": {"by": "hash", "fraction": 0.5},
            },
            "public": public,
            "representation": {"kind": "pca", "code": 4},
            "stages": {"moments": {}},
        }
    )


def npz(path, images, labels) -> dict:
    np.savez(path, images=images, labels=labels)
    return {"kind": "npz", "path": path}


def test_sources_follow_each_other_with_classes_of_their_own(tmp_path):
    first = npz(tmp_path / "a.npz", np.zeros((3, 28, 28), np.uint8), np.array([5, 2, 5]))
    second = npz(tmp_path / "b.npz", np.full((2, 8, 8, 3), 255, np.uint8), np.array([0, 1]))
    found = read_public(
        plan([first, second, {"kind": "letters", "count": 4}, {"kind": "glyphs", "count": 5}])
    )
    assert found.images.shape == (14, 8, 8, 1) and found.images.dtype == np.uint8
    assert found.labels[:5].tolist() == [1, 0, 1, 2, 3]
    assert set(found.labels.tolist()) == set(range(found.classes))
    assert [facts.count for facts in found.sources] == [3, 2, 4, 5]
    assert [facts.kind for facts in found.sources] == ["npz", "npz", "letters", "glyphs"]
    assert (found.images[3:5] == 255).all()
    assert found.source.tolist() == [0] * 3 + [1] * 2 + [2] * 4 + [3] * 5
    assert found.drawn.tolist() == [False] * 5 + [True] * 9
    assert str(tmp_path) not in str([facts.to_json() for facts in found.sources])


def test_the_hash_is_of_the_content(tmp_path):
    images, labels = np.zeros((3, 8, 8), np.uint8), np.array([0, 1, 0])
    one = npz(tmp_path / "a.npz", images, labels)
    same = npz(tmp_path / "b.npz", images, labels)
    images[0, 0, 0] = 1
    other = npz(tmp_path / "c.npz", images, labels)
    hashes = [read_public(plan([source])).sources[0].sha256 for source in (one, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_resizing_is_antialiased_and_grey_becomes_colour(tmp_path):
    stripes = np.zeros((1, 32, 32), np.uint8)
    stripes[:, :, ::2] = 255
    source = npz(tmp_path / "a.npz", stripes, np.array([0]))
    found = read_public(plan([source], channels=3)).images
    assert found.shape == (1, 8, 8, 3)
    assert np.abs(found[0, 2:-2, 2:-2].astype(int) - 127).max() < 12


def test_an_absent_public_file_is_named(tmp_path):
    with pytest.raises(MissingError, match=r"gone\.npz"):
        read_public(plan([{"kind": "npz", "path": tmp_path / "gone.npz"}]))


def test_a_bad_public_record_is_named(tmp_path):
    images = np.zeros((2, 8, 8), np.float32)
    images[1] = np.nan
    with pytest.raises(DataError, match="image 1"):
        read_public(plan([npz(tmp_path / "a.npz", images, np.array([0, 0]))]))


def test_an_empty_or_damaged_public_source_is_refused(tmp_path):
    empty = npz(tmp_path / "a.npz", np.zeros((0, 8, 8), np.uint8), np.zeros(0, int))
    with pytest.raises(DataError, match="holds no image"):
        read_public(plan([empty]))
    (tmp_path / "b.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match="BadZipFile"):
        read_public(plan([{"kind": "npz", "path": tmp_path / "b.npz"}]))
