"""Public arrays in memory or on disk, and fits that take them by parts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.errors import UsageError
from dpsynth.public import representation, spool
from dpsynth.public.geometry import PixelCodec, fit_pca
from dpsynth.public.representation import standardised
from dpsynth.public.spool import in_parts, spooled


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), max_size=6), held=st.sampled_from([0, 40, 10**6]))
def test_a_spool_is_its_parts_one_after_another(sizes, held):
    draw = np.random.default_rng(0)
    parts = [draw.integers(0, 256, (size, 3, 2), dtype=np.uint8) for size in sizes]
    expected = np.concatenate([np.empty((0, 3, 2), np.uint8), *parts])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spool, "HELD_BYTES", held)
        found = spooled(iter(parts), (3, 2), np.uint8)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.uint8
    assert isinstance(found, np.memmap) == (expected.nbytes > held)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spool, "_PART_BYTES", 20)
        pieces = list(in_parts(found))
    assert all(len(piece) <= 3 for piece in pieces)
    assert sum(map(len, pieces)) == len(expected)


def images(count, seed=0, shape=(4, 5, 1)):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def test_pca_is_the_same_bits_however_its_images_come():
    data = images(90)
    whole = fit_pca([data], 7)
    for parts in (np.array_split(data, 4), [data[60:], data[:60]], [row[None] for row in data]):
        again = fit_pca(iter(parts), 7)
        np.testing.assert_array_equal(again.basis, whole.basis)
        np.testing.assert_array_equal(again.centre, whole.centre)


@pytest.mark.parametrize("parts", [[], [images(3)[0]], [images(3), images(3, shape=(5, 4, 1))]])
def test_pca_takes_parts_of_one_shape_alone(parts):
    with pytest.raises(UsageError):
        fit_pca(parts, 1)


@pytest.mark.parametrize("side", [3, 40])
def test_pca_codes_are_those_of_plain_arithmetic(side):
    data = images(60, shape=(side, side, 3))
    codec = fit_pca([data[:, :3, :3]], 5) if side == 3 else random_pca(side)
    shaped = data[:, :3, :3] if side == 3 else data
    plain = (shaped.reshape(60, -1) / 255.0 - codec.centre) @ codec.basis.T
    np.testing.assert_allclose(codec.encode_rows(shaped), plain, rtol=0, atol=1e-9)


def random_pca(side):
    from dpsynth.public.geometry import PcaCodec

    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(side * side * 3, 6)))[0].T
    return PcaCodec(np.ascontiguousarray(basis), np.full(side * side * 3, 0.4), (side, side, 3))


def test_the_standard_is_that_of_all_images_by_parts(monkeypatch):
    data = images(100, seed=3)
    monkeypatch.setattr(representation, "in_parts", lambda array: np.array_split(array, 7))
    space = standardised(PixelCodec((4, 5, 1)), data)
    flat = data.reshape(100, -1).astype(float)
    np.testing.assert_allclose(space.mean, flat.mean(0), rtol=1e-14)
    assert space.scale == pytest.approx(np.sqrt(np.square(flat - flat.mean(0)).mean()), rel=1e-13)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="no public images"):
        standardised(PixelCodec((4, 5, 1)), data[:0])
