"""LL0 codes of private records: in the ball, exact in any company, and no neighbour is worse."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from unitkit import Listed, blocks_of, exact_sums, joined, whitened_square

from dpsynth.accounting.statistics import ClassMoments
from dpsynth.planning.schema import ImageShape, Representation
from dpsynth.private.encoding import encoded
from dpsynth.private.lattice import CODE_MAX
from dpsynth.public.representation import standardised
from dpsynth.public.wavelet import wavelet_codec
from dpsynth.readers import Record
from dpsynth.vault import Units

SIDE, CLASSES, DIM = 8, 3, 16
IMAGE = ImageShape(height=SIDE, width=SIDE)


def space_of(wavelet="haar", radius=1.0):
    settings = Representation(kind="wavelet", code=DIM, wavelet=wavelet, levels=1)
    public = np.random.default_rng(0).integers(0, 256, (60, SIDE, SIDE, 1), dtype=np.uint8)
    return standardised(wavelet_codec(settings, IMAGE), public, radius=radius)


def records(count, seed=1):
    """Noise, and images as far out as bytes go: white, black, halves, boards."""
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 256, (count, SIDE, SIDE, 1), dtype=np.uint8)
    rows, columns = np.indices((SIDE, SIDE))
    far = [rows < 0, rows >= 0, rows < 4, columns % 2 == 0, (rows + columns) % 2 == 0]
    for image, shown in zip(images, far, strict=False):
        image[..., 0] = 255 * shown
    labels = draw.integers(0, CLASSES, count)
    return [Record(image, int(y)) for image, y in zip(images, labels, strict=True)]


def codes_of(listed, space, rows=None):
    units = Units(Listed(listed), IMAGE, rows=lambda block: np.ones(len(block), bool))
    return joined(encoded(units, space, CLASSES, rows))


@pytest.mark.parametrize("wavelet", ["haar", "db3", "sym4"])
@pytest.mark.parametrize("radius", [1e-3, 0.7, 4.0, 1e3])
def test_every_contribution_lies_in_the_ball(wavelet, radius):
    space = space_of(wavelet, radius)
    listed = records(40)
    codes = codes_of(listed, space).codes.astype(object)
    assert all(sum(int(x) ** 2 for x in row) <= CODE_MAX**2 for row in codes)
    norms = np.linalg.norm(codes.astype(float), axis=1)
    exact = np.stack([space.encode_exact(record.image) for record in listed])
    beyond = np.linalg.norm(exact, axis=1) > radius
    assert beyond.all() if radius < 0.1 else not beyond.any() if radius > 100 else True
    assert (norms[beyond] > CODE_MAX - 2 * math.sqrt(DIM)).all()  # cut to the surface, no further
    steps = exact[~beyond] * CODE_MAX / radius
    assert np.abs(codes[~beyond].astype(float) - steps).max(initial=0.0) <= 1  # else as it is


@pytest.mark.parametrize("wavelet", ["haar", "sym4"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_batches_blocks_and_threads_change_no_bit(wavelet, threads, rows, monkeypatch):
    space, listed = space_of(wavelet), records(30)
    alone = [codes_of([record], space).codes[0] for record in listed]
    monkeypatch.setattr("dpsynth.readers.records._BLOCK_ROWS", 8)
    monkeypatch.setattr("dpsynth.private.coding._NEAR", 3 * DIM)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = codes_of(listed, space, rows)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(together.codes, np.stack(alone))


@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_a_record_moves_the_moments_by_its_own_contribution_alone(radius):
    """Add or remove any of the worst images: at most 1 in whitened units, and it is attained."""
    statistic = ClassMoments(math.sqrt(0.05), math.sqrt(0.55), math.sqrt(0.4), "class", 3, DIM)
    space, listed = space_of(radius=radius), records(12)
    whole = codes_of(listed, space)
    everything = exact_sums(whole.codes, whole.labels, CLASSES)
    moves = []
    for gone in range(len(listed)):
        rest = codes_of(listed[:gone] + listed[gone + 1 :], space)
        less = exact_sums(rest.codes, rest.labels, CLASSES)
        moved = [
            np.asarray(one, object) - np.asarray(other, object)
            for one, other in zip(
                blocks_of(everything, statistic), blocks_of(less, statistic), strict=True
            )
        ]
        own = codes_of([listed[gone]], space)
        alone = blocks_of(exact_sums(own.codes, own.labels, CLASSES), statistic)
        assert all(np.array_equal(a, b) for a, b in zip(moved, alone, strict=True))
        moves.append(float(whitened_square(moved, statistic, 0)))
    assert max(moves) <= 1 + 1e-12
    if radius == 0.5:
        assert max(moves) > 0.999


def test_a_code_that_is_not_finite_contributes_nothing():
    space = replace(space_of(), mean=np.full(DIM, np.nan))
    assert codes_of(records(5), space).units == 0
