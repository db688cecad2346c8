"""Large images of short codes: few of them are held at once, and no bit depends on how many."""

from dataclasses import replace

import numpy as np
import pytest
from unitkit import CLASSES, DIM, Pixels, image, joined, named_units

from dpsynth.private.encoding import encoded
from dpsynth.public.geometry import PixelCodec
from dpsynth.public.projection import ProjectedCodec, Projection
from dpsynth.public.representation import Representation


def test_units_wait_by_the_bytes_of_their_images(monkeypatch):
    draw = np.random.default_rng(0)
    records = [
        image(draw.integers(0, 256, DIM), draw.integers(CLASSES), f"unit {number // 2}")
        for number in range(20)
    ]
    whole = list(encoded(named_units(records, 2), Pixels(), CLASSES))
    assert [len(part.labels) for part in whole] == [0, 20]
    monkeypatch.setattr("dpsynth.private.encoding._WAITING", 5 * DIM)
    parts = list(encoded(named_units(records, 2), Pixels(), CLASSES))
    assert [len(part.labels) for part in parts] == [0, 6, 6, 6, 2]
    for mine, wanted in zip(
        (joined(parts).codes, joined(parts).labels, joined(parts).sizes),
        (joined(whole).codes, joined(whole).labels, joined(whole).sizes),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("numbers", [1, 30, 2**22])
def test_long_codes_are_projected_a_few_at_a_time(monkeypatch, numbers):
    draw, most = np.random.default_rng(1), []

    class Watched(PixelCodec):
        def encode_rows(self, images):
            most.append(len(images))
            return super().encode_rows(images)

    shape, dim = (3, 4, 1), 12
    inner = Representation(PixelCodec(shape), shape, np.full(dim, 100.0), 50.0, 1.0)
    basis = np.linalg.qr(draw.normal(size=(dim, 4)))[0].T
    codec = ProjectedCodec(inner, Projection(np.ascontiguousarray(basis), np.zeros(dim), 0.1, 8.0))
    images = draw.integers(0, 256, (7, *shape), dtype=np.uint8)
    wanted = codec.encode_rows(images)
    monkeypatch.setattr("dpsynth.public.projection._NUMBERS", numbers)
    watched = replace(codec, inner=replace(inner, codec=Watched(shape)))
    np.testing.assert_array_equal(watched.encode_rows(images), wanted)
    assert max(most) == min(7, max(1, numbers // dim))
