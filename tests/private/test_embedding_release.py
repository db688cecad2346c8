"""The embedding release: a search for neighbours, noise, units, and what it refuses."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from unitkit import DIM, encode_units, image, named_units

from dpsynth.accounting.queries import EmbeddingSums
from dpsynth.accounting.statistics import CellSums, sensitivity
from dpsynth.artifacts.embedding import MapRecipe
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError
from dpsynth.models.embeddings.fourier import FourierMap
from dpsynth.models.embeddings.hermite import HermiteMap
from dpsynth.models.embeddings.tangent import TangentMap
from dpsynth.private.embedding import embedding_sums, release_embedding
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, quantise_rows
from dpsynth.private.noise import NoiseSource

SHAPE, CLASSES = (2, 3, 1), 3
MAPS = [
    FourierMap(SHAPE, 20, 0.8, 1),
    HermiteMap(SHAPE, length=0.4, order=5, pairs=np.array([[0, 1]]), pair_order=2, alpha=0.5),
    TangentMap(SHAPE, 4, np.full(SHAPE, 40, np.uint8), 1),
]
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (30, *SHAPE), dtype=np.uint8)
LABELS = RNG.integers(0, CLASSES, 30)


def slot(dim, classes=CLASSES, noise=1.0, count=0.6, total=0.8):
    return Slot(1, "embedding", "embedding", EmbeddingSums(count, total, classes, dim), noise)


def recipe(dim):
    return MapRecipe("fourier", SHAPE, 1, dim, "0" * 64, {"features": dim, "bandwidth": 0.8})


def coded(space, images, labels, sizes=None):
    codes, _ = quantise_rows(space.encode_exact_many(images), space.radius)
    return UnitCodes(codes, np.asarray(labels, np.int64), sizes)


def moved(one, other, statistic):
    """Squared whitened move between two exact sums in the same steps, as a Fraction."""
    counts = sum(int(x) ** 2 for x in one.counts - other.counts)
    sums = sum(int(x) ** 2 for x in (one.sums - other.sums).ravel())
    whole = Fraction(statistic.count) ** 2 * counts
    whole += Fraction(statistic.sum) ** 2 * Fraction(sums, CODE_MAX**2)
    return whole / 4**one.bits


images = arrays(np.uint8, SHAPE, elements=st.sampled_from([0, 1, 40, 128, 254, 255]))


@pytest.mark.parametrize("space", MAPS, ids=lambda m: type(m).__name__)
@settings(max_examples=40, deadline=None)
@given(image=images, label=st.integers(-2, CLASSES + 1), place=st.integers(0, 30))
def test_no_record_moves_the_sums_past_the_sensitivity(space, image, label, place):
    paid = slot(space.dim)
    without = embedding_sums([coded(space, IMAGES, LABELS)], paid)
    longer = np.insert(IMAGES, place, image, axis=0)
    more = embedding_sums([coded(space, longer, np.insert(LABELS, place, label))], paid)
    found = moved(more, without, paid.statistic)
    assert found <= Fraction(sensitivity(paid.statistic)) ** 2 * (1 + Fraction(1, 2**50))
    assert (found > Fraction(36, 100) / 2) == (0 <= label < CLASSES)


def test_a_record_of_norm_one_reaches_the_sensitivity():
    """The bound is tight: a vector on the sphere's surface moves the sums by all of it."""
    code = np.zeros((1, 20), np.int32)
    code[0, 3] = CODE_MAX
    paid = slot(20)
    none = UnitCodes(code[:0], np.zeros(0, np.int64))
    one = embedding_sums([UnitCodes(code, np.array([1]))], paid)
    assert math.isclose(moved(one, embedding_sums([none], paid), paid.statistic), 1.0)


@pytest.mark.parametrize("space", MAPS, ids=lambda m: type(m).__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), size=st.integers(1, 9))
def test_no_unit_of_several_moves_them_further(space, data, size):
    paid = slot(space.dim)
    unit = np.stack([data.draw(images) for _ in range(size)])
    owners = [data.draw(st.integers(0, CLASSES - 1)) for _ in range(size)]
    sizes = np.full(10, 3)
    without = embedding_sums([coded(space, IMAGES, LABELS, sizes)], paid)
    more = embedding_sums(
        [
            coded(
                space,
                np.concatenate([IMAGES, unit]),
                np.append(LABELS, owners),
                np.append(sizes, size),
            )
        ],
        paid,
    )
    limit = Fraction(sensitivity(paid.statistic)) ** 2 * (1 + Fraction(1, 2**40))
    assert moved(more, without, paid.statistic) <= limit


def test_sums_do_not_depend_on_chunks_or_order():
    space, paid = MAPS[0], slot(20)
    whole = embedding_sums([coded(space, IMAGES, LABELS)], paid)
    order = RNG.permutation(30)
    parts = embedding_sums(
        [coded(space, IMAGES[part], LABELS[part]) for part in np.split(order, [4, 5, 20])], paid
    )
    assert (whole.counts == parts.counts).all()
    assert (whole.sums == parts.sums).all()


def test_the_noise_is_what_the_slot_declares():
    dim = 2_000
    nothing = UnitCodes(np.zeros((0, dim), np.int32), np.zeros(0, np.int64))
    found = release_embedding([nothing], slot(dim, noise=3.0), recipe(dim), NoiseSource())
    assert math.isclose(found.count_std, 3.0 / 0.6, rel_tol=1e-6)
    assert math.isclose(found.sum_std, 3.0 / 0.8, rel_tol=1e-6)
    assert abs(found.sums.std() / found.sum_std - 1) < 0.05
    assert abs(np.corrcoef(found.sums[0], found.sums[1])[0, 1]) < 0.12


def test_with_little_noise_it_is_the_plain_sum():
    space, paid = MAPS[1], slot(MAPS[1].dim, noise=1e-6)
    made = MapRecipe("hermite", SHAPE, 1, space.dim, "0" * 64, {})
    found = release_embedding([coded(space, IMAGES, LABELS)], paid, made, NoiseSource())
    features = space.encode_exact_many(IMAGES)
    for y in range(CLASSES):
        assert math.isclose(found.counts[y], (y == LABELS).sum(), abs_tol=1e-4)
        assert np.abs(found.sums[y] - features[y == LABELS].sum(0)).max() < 30 * 2.0**-16 + 1e-4


@pytest.mark.parametrize("most", [None, 3])
def test_a_map_stands_where_a_code_space_stands(most):
    """Private streams take it as it is: units in, quantised features out."""
    space = FourierMap((1, DIM, 1), 20, 0.8, 1)
    rows = RNG.integers(0, 256, (12, DIM), dtype=np.uint8)
    records = [image(row, i % CLASSES, f"unit {i // 3}") for i, row in enumerate(rows)]
    given = named_units(records, most) if most else named_units(records, 1)
    found = encode_units(given, space, CLASSES)
    wanted, _ = quantise_rows(space.encode_exact_many(rows.reshape(12, 1, DIM, 1)), 1.0)
    assert {row.tobytes() for row in found.codes} <= {row.tobytes() for row in wanted}
    exact = embedding_sums([found], slot(20))
    assert exact.bits == (0 if found.sizes is None else 16)


def test_records_without_labels_are_one_class():
    space, paid = MAPS[0], slot(20, classes=1)
    found = embedding_sums([coded(space, IMAGES, np.zeros(30))], paid)
    assert found.counts.tolist() == [30]
    assert found.sums.shape == (1, 20)


def test_another_slot_or_size_is_refused():
    chunks = [coded(MAPS[0], IMAGES, LABELS)]
    with pytest.raises(PlanError, match="declares 21"):
        release_embedding(chunks, slot(21), recipe(20), NoiseSource())
    other = Slot(1, "moments", "cells", CellSums(0.6, 0.8, 3, 2, 20), 1.0)
    with pytest.raises(PlanError, match="not a release"):
        release_embedding(chunks, other, recipe(20), NoiseSource())
