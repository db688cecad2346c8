"""`confusion.safetensors`: written, read back, and refused when damaged or foreign."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpsynth.artifacts.confusion import NAME, ReleasedConfusion, load_confusion, save_confusion
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import MissingError, UsageError

MADE = ReleasedConfusion(
    np.array([[40.5, -2.25], [1.0, 38.0]]), 77.5, 1.5, 3.0, "ab" * 32, samples=60, steps=5, seed=0
)
FLOAT = st.floats(-1e9, 1e9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4).flatmap(lambda y: arrays(np.float64, (y, y), elements=FLOAT)), FLOAT)
def test_what_is_written_is_read(tmp_path_factory, cells, total):
    path = tmp_path_factory.mktemp("one") / NAME
    made = dataclasses.replace(MADE, cells=cells, total=total)
    save_confusion(path, made)
    read = load_confusion(path)
    assert np.array_equal(read.cells, cells)
    same = dataclasses.replace(read, cells=MADE.cells)
    assert same == dataclasses.replace(MADE, total=total)
    again = path.with_name("again")
    save_confusion(again, read)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"cells": np.zeros((2, 3))},
        {"cells": np.zeros((0, 0))},
        {"cells": np.zeros(4)},
        {"cells": np.full((2, 2), np.nan)},
        {"total": np.inf},
        {"cell_std": 0.0},
        {"total_std": -1.0},
        {"samples_sha256": "short"},
        {"samples": 0},
        {"steps": 0},
    ],
)
def test_nonsense_is_not_written(tmp_path, change):
    with pytest.raises(UsageError):
        save_confusion(tmp_path / NAME, dataclasses.replace(MADE, **change))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"room": "curator"},
        {"format": "dpsynth-moments-1"},
        {"samples": "many"},
        {"cell_std": "nan"},
        {"seed": None},
        {"samples_sha256": None},
    ],
)
def test_a_foreign_file_is_refused(tmp_path, change):
    path = tmp_path / NAME
    save_confusion(path, MADE)
    found, metadata = load_tensors(path)
    metadata = {key: text for key, text in (metadata | change).items() if text is not None}
    save_tensors(path, found, metadata)
    with pytest.raises(UsageError):
        load_confusion(path)


def test_damaged_arrays_are_refused(tmp_path):
    path = tmp_path / NAME
    save_confusion(path, MADE)
    found, metadata = load_tensors(path)
    for wrong in ({"total": np.zeros(2)}, {"cells": np.zeros((2, 3))}):
        save_tensors(path, found | wrong, metadata)
        with pytest.raises(UsageError):
            load_confusion(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(UsageError, match="damaged"):
        load_confusion(path)
    path.unlink()
    with pytest.raises(MissingError):
        load_confusion(path)
