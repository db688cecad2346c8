"""Arrays on disk: round trip, rooms, damage."""

import numpy as np
import pytest

from dpsynth.artifacts.tensors import load_released, load_tensors, save_tensors
from dpsynth.errors import MissingError, UsageError


def test_round_trip(tmp_path):
    arrays = {
        "a": np.arange(6.0).reshape(2, 3).T,
        "b": np.array([], dtype=np.int64),
        "c": np.float32(1.5) * np.ones(()),
    }
    save_tensors(tmp_path / "x.safetensors", arrays, {"room": "released", "k": "v"})
    again, metadata = load_released(tmp_path / "x.safetensors")
    assert metadata == {"room": "released", "k": "v"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name], array)
        assert again[name].dtype == np.asarray(array).dtype


def test_a_curators_file_is_never_a_released_one(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": np.zeros(1)}, {"room": "curator"})
    assert path.stat().st_mode & 0o077 == 0
    load_tensors(path)
    with pytest.raises(UsageError, match="not for release"):
        load_released(path)


def test_a_file_without_a_room(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(UsageError, match="room None"):
        save_tensors(tmp_path / "x", {}, {})
    save_file({"a": np.zeros(1)}, tmp_path / "x")
    with pytest.raises(UsageError, match="not for release"):
        load_released(tmp_path / "x")


def test_damage(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(MissingError):
        load_tensors(path)
    save_tensors(path, {"a": np.zeros(100)}, {"room": "public"})
    data = path.read_bytes()
    for bad in (b"", b"\x80\x04pickle", data[:-1], data[: len(data) // 2], b"\xff" * 64):
        path.write_bytes(bad)
        with pytest.raises(UsageError, match="damaged"):
            load_tensors(path)
