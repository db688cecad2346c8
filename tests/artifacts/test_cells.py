"""Cell rounds on disk: exact round trips, and nothing damaged or foreign is read."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.artifacts.cells import (
    FORMAT,
    MOST_LLOYD,
    NAME,
    ReleasedCells,
    lloyd_name,
    load_cells,
    save_cells,
)
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import MissingError, UsageError
from dpsynth.planning.release import Cells

NUMBERS = ("count_std", "sum_std", "second_std", "radius", "clip")
NUMBER = st.floats(0, 1e300)


def make_cells(classes=2, cells=3, dim=4, *, seconds=True, seed=0, scale=1.0) -> ReleasedCells:
    rng = np.random.default_rng(seed)
    used = rng.random((classes, cells)) < 0.6
    used[:, 0] = True
    shape = (classes, cells, dim)
    return ReleasedCells(
        centres=rng.standard_normal(shape) * used[..., None],
        used=used,
        counts=rng.standard_normal(shape[:2]) * scale,
        sums=rng.standard_normal(shape) * scale,
        seconds=rng.standard_normal((*shape, dim)) * scale if seconds else None,
        count_std=3.5,
        sum_std=0.25,
        second_std=0.125 if seconds else 0.0,
        radius=1.75,
        clip=2.5,
    )


def same(one: ReleasedCells, other: ReleasedCells) -> bool:
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)),
    seconds=st.booleans(),
    scale=st.sampled_from([0.0, 1e-300, 1.0, 1e12, 1e300]),
    numbers=st.tuples(NUMBER, NUMBER, NUMBER, st.floats(5e-324, 1e300), st.floats(5e-324, 1e300)),
)
def test_round_trip_to_the_bit(tmp_path_factory, *, shape, seconds, scale, numbers):
    one = make_cells(*shape, seconds=seconds, seed=sum(shape), scale=scale)
    known = dict(zip(NUMBERS, numbers, strict=True))
    known["second_std"] *= seconds
    one = dataclasses.replace(one, **known)
    folder = tmp_path_factory.mktemp("cells")
    save_cells(folder / NAME, one)
    again = load_cells(folder / NAME)
    assert same(again, one)
    assert (again.classes, again.cells, again.dim) == shape
    save_cells(folder / "again", again)
    assert (folder / "again").read_bytes() == (folder / NAME).read_bytes()


def test_names():
    assert lloyd_name(1) == "cells-lloyd-1.safetensors"
    assert Cells(lloyd=MOST_LLOYD).lloyd == MOST_LLOYD
    with pytest.raises(ValueError, match="lloyd"):
        Cells(lloyd=MOST_LLOYD + 1)


def test_the_file_is_stamped_released(tmp_path):
    save_cells(tmp_path / NAME, make_cells())
    arrays, metadata = load_tensors(tmp_path / NAME)
    assert set(arrays) == {"centres", "used", "counts", "sums", "seconds"}
    assert metadata["room"] == "released"
    assert metadata["format"] == FORMAT
    save_cells(tmp_path / NAME, make_cells(seconds=False))
    assert "seconds" not in load_tensors(tmp_path / NAME)[0]


ONE = make_cells()
BAD = {
    "a NaN": {"sums": np.full_like(ONE.sums, np.nan)},
    "an infinite centre": {"centres": np.where(ONE.used[..., None], np.inf, 0.0)},
    "a negative noise": {"count_std": -1.0},
    "a noise that is no number": {"sum_std": float("nan")},
    "no radius": {"radius": 0.0},
    "an infinite clip": {"clip": float("inf")},
    "another class": {"counts": np.zeros((3, 3))},
    "another cell": {"sums": np.zeros((2, 2, 4))},
    "a flat second moment": {"seconds": np.zeros((2, 3, 4))},
    "no second moments, yet noise": {"seconds": None},
    "no class": {"centres": np.zeros((0, 3, 4))},
    "a scalar": {"centres": np.float64(1.0) * np.ones(())},
    "a class without cells": {"used": np.zeros((2, 3), dtype=bool)},
    "used as numbers": {"used": ONE.used.astype(np.float64)},
    "a centre of no cell": {"centres": np.ones((2, 3, 4)), "used": np.eye(2, 3, dtype=bool)},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_what_makes_no_sense_is_neither_written_nor_read(tmp_path, change):
    bad = dataclasses.replace(ONE, **change)
    with pytest.raises(UsageError):
        bad.check()
    with pytest.raises(UsageError):
        save_cells(tmp_path / NAME, bad)
    assert not (tmp_path / NAME).exists()
    fields = {f.name: getattr(bad, f.name) for f in dataclasses.fields(bad)}
    arrays = {k: v for k, v in fields.items() if isinstance(v, np.ndarray)}
    metadata = {k: repr(v) for k, v in fields.items() if k in NUMBERS}
    save_tensors(tmp_path / NAME, arrays, {"room": "released", "format": FORMAT, **metadata})
    with pytest.raises(UsageError, match=NAME):
        load_cells(tmp_path / NAME)


def written(tmp_path, **changes):
    save_cells(tmp_path / NAME, ONE)
    arrays, metadata = load_tensors(tmp_path / NAME)
    arrays |= changes.pop("arrays", {})
    metadata |= changes
    gone = [key for key, value in (*arrays.items(), *metadata.items()) if value is None]
    arrays = {k: v for k, v in arrays.items() if k not in gone}
    metadata = {k: v for k, v in metadata.items() if k not in gone}
    save_tensors(tmp_path / NAME, arrays, metadata)
    return tmp_path / NAME


@pytest.mark.parametrize("name", ["centres", "used", "counts", "sums"])
def test_a_missing_array(tmp_path, name):
    with pytest.raises(UsageError, match="damaged"):
        load_cells(written(tmp_path, arrays={name: None}))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [None, "", "much", "nan", "-1"])
def test_a_damaged_number(tmp_path, name, value):
    with pytest.raises(UsageError, match="damaged"):
        load_cells(written(tmp_path, **{name: value}))


def test_foreign_files(tmp_path):
    for changes in (
        {"format": "dpsynth-moments-1"},
        {"format": None},
        {"room": "curator"},
        {"arrays": {"extra": np.zeros(1)}},
        {"arrays": {"sums": ONE.sums.astype(np.float32)}},
    ):
        with pytest.raises(UsageError):
            load_cells(written(tmp_path, **changes))
    with pytest.raises(MissingError):
        load_cells(tmp_path / "none.safetensors")


def test_a_cut_file(tmp_path):
    path = written(tmp_path)
    data = path.read_bytes()
    for cut in range(0, len(data), 97):
        path.write_bytes(data[:cut])
        with pytest.raises(UsageError, match="damaged"):
            load_cells(path)
