"""Codes as a stream: the same bits by blocks, records, threads, shards; in bounded memory."""

import math
import tracemalloc
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from unitkit import Listed, exact_sums, joined

from dpsynth.distributed.ranks import Ranks
from dpsynth.errors import UsageError
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import NpzSource
from dpsynth.private.encoding import CodeStream, encoded
from dpsynth.private.lattice import (
    CODE_MAX,
    SHARE_BITS,
    SHARE_MAX,
    RunningSums,
    quantise,
    quantise_rows,
)
from dpsynth.private.products import Products, Sums
from dpsynth.public.geometry import PixelCodec
from dpsynth.public.representation import Representation
from dpsynth.readers import Record, open_source
from dpsynth.vault import Units

SHAPE, CLASSES = (4, 3, 1), 3
anything = st.floats(allow_nan=True, allow_infinity=True)
rows_of_codes = hnp.arrays(
    float, st.tuples(st.integers(0, 9), st.integers(1, 30)), elements=anything
)


@given(rows_of_codes, st.floats(1e-3, 1e3))
@settings(max_examples=300, deadline=None)
def test_many_rows_have_the_bits_of_one(codes, radius):
    whole, finite = quantise_rows(codes, radius)
    for row, kept, code in zip(whole, finite, codes, strict=True):
        alone = quantise(code, radius)
        assert kept == (alone is not None)
        assert row.tolist() == ([0] * len(code) if alone is None else alone.tolist())
        assert sum(int(x) ** 2 for x in row) <= CODE_MAX**2


@given(hnp.arrays(float, st.integers(1, 30), elements=st.floats(-1e6, 1e6)), st.floats(1e-3, 1e3))
@settings(max_examples=300, deadline=None)
def test_a_row_is_the_clipped_code_in_exact_arithmetic(code, radius):
    """Against Fractions: towards zero, and within the steps that its rounding may take."""
    whole = quantise(code, radius)
    square = sum(Fraction(x) ** 2 for x in code.tolist())
    norm = max(Fraction(math.isqrt(int(square * 4**80)), 2**80), Fraction(radius))
    for q, x in zip(whole.tolist(), code.tolist(), strict=True):
        exact = Fraction(x) * CODE_MAX / norm
        assert q * exact >= 0
        assert -3 < abs(exact) - abs(q) < 3
        if norm == radius:
            assert -1e-9 < abs(exact) - abs(q) < 1 + 1e-9


def test_rows_are_the_same_bits_in_any_company(monkeypatch):
    draw = np.random.default_rng(0)
    codes = draw.normal(size=(300, 17)) * 10.0 ** draw.integers(-3, 4, (300, 1))
    whole, _ = quantise_rows(codes, 2.0)
    order = draw.permutation(300)
    np.testing.assert_array_equal(quantise_rows(codes[order], 2.0)[0], whole[order])
    np.testing.assert_array_equal(quantise_rows(np.asfortranarray(codes), 2.0)[0], whole)
    monkeypatch.setattr("dpsynth.private.lattice._NEAR", 40)
    np.testing.assert_array_equal(quantise_rows(codes, 2.0)[0], whole)


@pytest.mark.parametrize("bits", [32, 42, 51, 52])
@pytest.mark.parametrize("weighted", [False, True])
def test_products_stay_exact_past_floats_and_ints(bits, weighted):
    """`bits` says when the types are full: 2,500 rows fill all three of them at 52."""
    draw = np.random.default_rng(bits)
    rows = draw.integers(-CODE_MAX, CODE_MAX + 1, (2500, 3))
    weights = draw.integers(0, 256, len(rows))
    found = Products(2, 3, bits)
    for start in range(0, len(rows), 700):
        part = slice(start, start + 700)
        if weighted:
            found.add_weighted(1, rows[part], weights[part])
        else:
            found.add(1, rows[part].astype(np.int32))
    wide = rows.astype(object)
    expected = (wide * weights.astype(object)[:, None]).T @ wide if weighted else wide.T @ wide
    assert (found.total()[1] == expected).all()
    assert not found.total()[0].any()


@pytest.mark.parametrize("bits", [32, 60, 62])
def test_sums_stay_exact_past_ints(bits):
    """At 60 and 62 bits, four rows and one fill the ints."""
    rows = np.random.default_rng(bits).integers(-(2**bits), 2**bits + 1, (9, 3))
    found = Sums(2, 3, bits)
    for row in rows:
        found.add(1, row, 1)
    assert found.total().tolist() == [[0, 0, 0], rows.astype(object).sum(axis=0).tolist()]
    assert (found.total() == found.total()).all()  # asking changes nothing


@pytest.mark.parametrize("bits", [0, SHARE_BITS])
def test_sums_of_many_codes_at_the_edge_of_the_ball_are_exact(bits):
    """More rows than int32 holds the sum of, all of one class and as long as a code may be."""
    count = 2**15 + 1
    codes, labels = np.full((count, 1), -CODE_MAX, np.int32), np.zeros(count, np.int64)
    running = RunningSums(1, 1, bits=bits)
    running.add(codes, labels, np.full(count, SHARE_MAX) if bits else None)
    total = running.total()
    assert total.sums.tolist() == [[-count * CODE_MAX << bits]]
    assert total.seconds.tolist() == [[[count * CODE_MAX**2 << bits]]]


def some_codes(n, seed=0, dim=5):
    draw = np.random.default_rng(seed)
    codes, _ = quantise_rows(draw.normal(size=(n, dim)), 1.5)
    return codes, draw.integers(-1, CLASSES + 1, n)


def same(one, other):
    for name in ("counts", "sums", "seconds"):
        assert (getattr(one, name) == getattr(other, name)).all()
    assert one.bits == other.bits


@pytest.mark.parametrize("shared", [False, True])
def test_running_sums_are_the_sums_of_their_chunks(shared):
    codes, labels = some_codes(400)
    shares = np.random.default_rng(1).integers(0, SHARE_MAX + 1, 400) if shared else None
    bits = SHARE_BITS if shared else 0
    running = RunningSums(CLASSES, 5, bits=bits)
    pooled = RunningSums(CLASSES, 5, pooled=True, bits=bits)
    parts = []
    for start, end in ((0, 1), (1, 250), (250, 250), (250, 400)):
        part = slice(start, end)
        own = None if shares is None else shares[part]
        running.add(codes[part], labels[part], own)
        pooled.add(codes[part], labels[part], own)
        parts.append(exact_sums(codes[part], labels[part], CLASSES, shares=own))
    total = running.total()
    same(total, exact_sums(codes, labels, CLASSES, shares=shares))
    same(total, parts[3] + parts[1] + parts[0] + parts[2])
    one = pooled.total()
    assert one.seconds.shape == (1, 5, 5)
    assert (one.seconds[0] == total.seconds.sum(axis=0)).all()
    assert (one.sums == total.sums).all()
    same(total, running.total())  # asking changes nothing


def test_shares_where_none_are_counted_are_refused():
    codes, labels = some_codes(3)
    with pytest.raises(UsageError, match="go together"):
        RunningSums(CLASSES, 5).add(codes, labels, np.ones(3, np.int64))
    with pytest.raises(UsageError, match="go together"):
        RunningSums(CLASSES, 5, bits=SHARE_BITS).add(codes, labels)


def pixels(radius=2.0):
    draw = np.random.default_rng(3)
    return Representation(PixelCodec(SHAPE), SHAPE, 255 * draw.random(12), 80.0, radius)


def records(n, seed=4):
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 256, (n, *SHAPE), dtype=np.uint8)
    labels = draw.integers(0, CLASSES, n)
    return [Record(image, int(y)) for image, y in zip(images, labels, strict=True)]


def units_of(listed):
    def every(block):
        return np.ones(len(block), bool)

    return Units(Listed(listed), ImageShape(height=4, width=3), rows=every)


class ByRecords:
    """The same units without blocks."""

    most = None

    def __init__(self, listed):
        self.listed = listed

    def records(self):
        return ([record] for record in self.listed)


def assert_same_codes(one, other):
    np.testing.assert_array_equal(one.codes, other.codes)
    np.testing.assert_array_equal(one.labels, other.labels)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 6, 1000])
def test_blocks_give_the_codes_of_records(threads, rows, monkeypatch):
    listed, space = records(50), pixels()
    expected = joined(encoded(ByRecords(listed), space, CLASSES))
    for row, record in zip(expected.codes, listed, strict=True):
        plain = (record.image.reshape(-1) - space.mean) / space.scale
        assert row.tolist() == quantise(plain, space.radius).tolist()
    monkeypatch.setattr("dpsynth.readers.records._BLOCK_ROWS", 8)
    monkeypatch.setattr("dpsynth.private.coding._NEAR", 30)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = list(encoded(units_of(listed), space, CLASSES, rows))
    finally:
        torch.set_num_threads(before)
    assert max(len(part.labels) for part in parts) <= rows
    assert_same_codes(joined(parts), expected)


class OneOf(Ranks):
    """One process of several; the digests of all must agree, and are kept for the test."""

    def __init__(self, rank, world, digests):
        self.rank, self.world, self.digests = rank, world, digests

    def require_same(self, what, value):
        self.digests.append(value)


@pytest.mark.parametrize("world", [2, 3])
def test_shards_partition_the_records_whatever_the_blocks(world, monkeypatch):
    listed, space, digests = records(31), pixels(), []
    whole = joined(encoded(units_of(listed), space, CLASSES))
    for rank in range(world):
        monkeypatch.setattr("dpsynth.readers.records._BLOCK_ROWS", 4 + rank)
        ranks = OneOf(rank, world, digests)
        mine = joined(encoded(units_of(listed), space, CLASSES, ranks=ranks))
        np.testing.assert_array_equal(mine.codes, whole.codes[rank::world])
        by_records = joined(encoded(ByRecords(listed), space, CLASSES, ranks=ranks))
        assert_same_codes(mine, by_records)
    assert len(set(digests[::2])) == 1
    list(encoded(units_of(listed[1:]), space, CLASSES, ranks=OneOf(0, world, digests)))
    assert digests[-1] != digests[0]


def test_undeclared_labels_and_codes_that_are_not_finite_contribute_nothing():
    listed = records(20)
    listed[3] = Record(listed[3].image, -1)
    listed[5] = Record(listed[5].image, CLASSES)
    broken = pixels()
    broken.mean[0] = np.nan
    assert joined(encoded(units_of(listed), pixels(), CLASSES)).units == 18
    assert joined(encoded(units_of(listed), broken, CLASSES)).units == 0


def test_a_code_that_is_not_finite_leaves_its_neighbours_where_they_belong(monkeypatch):
    """Codes are written in place: those after a gap move up, in one step or across several."""
    listed = records(20)
    for place in (0, 7, 8, 19):
        listed[place].image[0, 0] = 255

    class Holes(PixelCodec):
        def encode_rows(self, images):
            codes = super().encode_rows(images)
            codes[codes[:, 0] == 255] = np.nan
            return codes

    space = replace(pixels(), codec=Holes(SHAPE))
    monkeypatch.setattr("dpsynth.private.coding._NEAR", 30)
    good = [record for record in listed if record.image[0, 0, 0] < 255]
    expected = joined(encoded(units_of(good), pixels(), CLASSES))
    assert_same_codes(joined(encoded(units_of(listed), space, CLASSES)), expected)
    assert_same_codes(joined(encoded(ByRecords(listed), space, CLASSES)), expected)


@pytest.mark.parametrize("keep", [False, True])
def test_a_stream_is_read_anew_unless_it_is_kept(keep):
    passes, listed = [], records(9)

    class Counted(Listed):
        def __iter__(self):
            passes.append(1)
            return super().__iter__()

    units = Units(Counted(listed), ImageShape(height=4, width=3))
    stream = CodeStream(units, pixels(), CLASSES, keep=keep)
    shares = []
    first, again = joined(stream.chunks(shares.append)), joined(stream)
    assert_same_codes(first, again)
    assert len(passes) == (1 if keep else 2)
    assert sum(shares) <= 1.0 + 1e-9


def test_memory_does_not_grow_with_the_records(tmp_path, monkeypatch):
    """Peak of Python's and NumPy's memory over a pass: of 4 blocks' records, and of 40."""
    monkeypatch.setattr("dpsynth.readers.records._BLOCK_ROWS", 64)
    space, peaks = pixels(), []
    for count in (256, 2560):
        np.savez(
            tmp_path / "a.npz",
            images=np.zeros((count, 4, 3), np.uint8),
            labels=np.zeros(count, np.int64),
        )
        image = ImageShape(height=4, width=3)
        source = open_source(NpzSource(kind="npz", path=tmp_path / "a.npz"), ["a"], image)
        units = Units(source, image, rows=lambda block: np.ones(len(block), bool))
        tracemalloc.start()
        running = RunningSums(1, 12)
        for chunk in encoded(units, space, 1, rows=128):
            running.add(chunk.codes, chunk.labels)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert running.total().counts.tolist() == [count]
    assert peaks[1] < 1.2 * peaks[0]
