"""`cross-moments.safetensors`: it comes back bit for bit, and nothing else is read as one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.artifacts import settled
from dpsynth.artifacts.cross import NAME, ReleasedCross, load_cross, save_cross
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import MissingError, UsageError

REALS = st.floats(0, 1e300, exclude_min=True)


def released(dim=3, features=2, seed=0, sensitivity="tight", constant=0.5):
    rng = np.random.default_rng(seed)
    square, codes = rng.normal(size=(features, features)), rng.normal(size=(dim, dim))
    beside = int(sensitivity == "paper")
    return ReleasedCross(
        ff=square + square.T,
        zf=rng.normal(size=(dim, features)),
        zz=codes + codes.T,
        count=rng.normal(size=beside),
        total=rng.normal(size=(beside, dim)),
        ff_std=0.1,
        zf_std=0.2,
        zz_std=0.3,
        count_std=0.4 * beside,
        total_std=0.5 * beside,
        radius=2.0,
        feature_radius=1.0,
        constant=constant,
        sensitivity=sensitivity,
    )


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["tight", "paper"]),
    stds=st.tuples(REALS, REALS, REALS),
)
@settings(max_examples=40, deadline=None)
def test_it_comes_back_bit_for_bit(tmp_path_factory, shape, seed, kind, stds):
    made, scale = released(*shape, seed, kind), (5e-324, 1e-30, 1.0, 1e300)[seed % 4]
    made = replace(made, ff=made.ff * scale, zf_std=stds[0], zz_std=stds[1], radius=stds[2])
    path = tmp_path_factory.mktemp("cross") / NAME
    save_cross(path, made)
    found = load_cross(path)
    for name, value in vars(made).items():
        np.testing.assert_array_equal(getattr(found, name), value)
    assert (found.dim, found.features) == shape
    first = path.read_bytes()
    save_cross(path, found)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    "wrong",
    [
        {"ff": np.full((2, 2), np.nan)},
        {"ff": np.array([[1.0, 2.0], [2.1, 1.0]])},
        {"zz": np.array([[0.0, 1, 2], [1, 0, 3], [2, 4, 0]])},
        {"ff": np.zeros((3, 3))},
        {"zf": np.zeros((3, 0)), "ff": np.zeros((0, 0))},
        {"zf": np.zeros(3)},
        {"count": np.zeros(1)},
        {"total": np.zeros((1, 3))},
        {"ff_std": -1.0},
        {"zf_std": np.inf},
        {"radius": 0.0},
        {"constant": 1.0},
        {"feature_radius": 0.0, "constant": 0.0},
    ],
)
def test_what_makes_no_sense_is_neither_written_nor_read(tmp_path, wrong):
    path, bad = tmp_path / NAME, replace(released(), **wrong)
    with pytest.raises(UsageError):
        save_cross(path, bad)
    assert not path.exists()
    save_cross(path, released())
    arrays, metadata = load_tensors(path)
    for name, value in wrong.items():
        target = arrays if name in arrays else metadata
        target[name] = value if name in arrays else repr(float(value))
    save_tensors(path, arrays, metadata)
    with pytest.raises(UsageError):
        load_cross(path)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / NAME
    with pytest.raises(MissingError):
        load_cross(path)
    save_cross(path, released())
    arrays, metadata = load_tensors(path)
    for change in (
        {"format": "dpsynth-moments-1"},
        {"room": "curator"},
        {"sensitivity": "loose"},
        {"radius": "many"},
    ):
        save_tensors(path, arrays, metadata | change)
        with pytest.raises(UsageError):
            load_cross(path)
    save_tensors(path, {k: v for k, v in arrays.items() if k != "zf"}, metadata)
    with pytest.raises(UsageError):
        load_cross(path)


def test_each_release_settles_with_the_one_file(tmp_path):
    for name in ("", "-sums", "-second", "-captions", "-spare-1", "-second-spare-2"):
        assert settled.file_of("moments", f"cross-moments{name}") == NAME
    assert settled.file_of("moments", "moments-second-spare-1") == "moments.safetensors"
    (tmp_path / NAME).write_bytes(b"x")
    assert settled.made_files(tmp_path) == [tmp_path / NAME]
