"""The ziggurat draws the normal distribution: its table, its rare branches, its shape."""

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from scipy import stats

from dpsynth.private import ziggurat
from dpsynth.private.keystream import Keys
from dpsynth.private.ziggurat import BLOCK, EDGES, TAIL, fill_normal


def normal(count):
    out = np.empty(count)
    fill_normal(out, Keys().stream())
    return out


def test_all_layers_have_one_area():
    with mpmath.workdps(30):
        tail = mpmath.quad(lambda x: mpmath.exp(-x * x / 2), [TAIL, mpmath.inf])
        areas = [TAIL * mpmath.exp(-(mpmath.mpf(TAIL) ** 2) / 2) + tail]
        for x, inner in pairwise(EDGES[1:]):
            low, high = (mpmath.exp(-(mpmath.mpf(edge) ** 2) / 2) for edge in (x, inner))
            areas.append(mpmath.mpf(x) * (high - low))
        whole = mpmath.sqrt(mpmath.pi / 2)  # layers cover the curve and a little more
        assert max(abs(area / areas[0] - 1) for area in areas) < 1e-12
        assert 1 < 256 * areas[0] / whole < 1.02
    assert len(EDGES) == 257
    assert (np.diff(EDGES) < 0).all()


def test_a_million_numbers_are_normal():
    draws = normal(1_000_000)
    assert stats.kstest(draws, "norm").pvalue > 1e-7
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((draws**power).mean() - moment) < 6 * math.sqrt(spread / len(draws))


def test_bins_the_tail_among_them_hold_what_they_should():
    draws = normal(2_000_000)
    edges = np.concatenate([[-np.inf, -4.2], np.linspace(-TAIL, TAIL, 400), [4.2, np.inf]])
    expected = len(draws) * np.diff(stats.norm.cdf(edges))
    found = np.histogram(draws, edges)[0]
    statistic = ((found - expected) ** 2 / expected).sum()
    assert statistic < len(expected) + 6 * math.sqrt(2 * len(expected))
    beyond = np.abs(draws)[np.abs(draws) > TAIL]
    assert stats.kstest(beyond, lambda x: 1 - stats.norm.sf(x) / stats.norm.sf(TAIL)).pvalue > 1e-7


@pytest.mark.parametrize(
    "break_it",
    [
        lambda z, layer, stream: z,  # unsure points are kept as they are
        lambda z, layer, stream: np.where(layer == 0, np.copysign(TAIL, z), z),  # no tail
    ],
)
def test_a_wrong_rare_branch_would_be_seen(monkeypatch, break_it):
    monkeypatch.setattr(ziggurat, "_decided", break_it)
    with pytest.raises(AssertionError):
        test_bins_the_tail_among_them_hold_what_they_should()


class Scripted:
    """A stream of given words, then of a real one."""

    def __init__(self, words):
        self._first, self._rest = np.array(words, dtype="<i8"), Keys(b"rest").stream()

    def fill(self, array):
        self._rest.fill(array)
        given, self._first = self._first[: len(array)], self._first[len(array) :]
        array[: len(given)] = given

    def words(self, count):
        return self._rest.words(count)


def word(layer, point):
    return (int(point * 2**53) << 10) | (3 << 8) | layer


def test_a_point_in_the_sure_part_is_taken_as_it_is():
    out = np.empty(4)
    fill_normal(out, Scripted([word(0, 0.5), word(0, -0.5), word(255, 0.0), word(7, -0.25)]))
    np.testing.assert_allclose(out, [EDGES[0] / 2, -EDGES[0] / 2, 0, -EDGES[7] / 4], rtol=1e-15)


def test_the_base_layers_outer_part_goes_to_the_tail_of_its_side():
    out = np.empty(400)
    fill_normal(out, Scripted([word(0, 0.99), word(0, -0.99)] * 200))
    assert (out[::2] > TAIL).all()
    assert (out[1::2] < -TAIL).all()
    assert len(set(np.abs(out))) == 400


def test_a_wedge_keeps_points_as_often_as_the_curve_says():
    layer, point, count = 100, 0.997, 20_000
    z = EDGES[layer] * point
    low, high = (math.exp(-(EDGES[i] ** 2) / 2) for i in (layer, layer + 1))
    chance = (math.exp(-z * z / 2) - low) / (high - low)
    out = np.empty(count)
    fill_normal(out, Scripted([word(layer, point)] * count))
    kept = np.isclose(out, z, rtol=1e-14).mean()
    assert 0.1 < chance < 0.9
    assert abs(kept - chance) < 6 * math.sqrt(chance * (1 - chance) / count)


@pytest.mark.parametrize("count", [0, 1, 7, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_any_length_is_filled_with_numbers_that_do_not_repeat(count):
    out = np.full(count, np.nan)
    fill_normal(out, Keys().stream())
    assert np.isfinite(out).all()
    assert len(np.unique(out)) == count


def test_neighbours_and_blocks_are_independent():
    draws = normal(3 * BLOCK)
    for lag in (1, 2, 256, BLOCK, 2 * BLOCK):
        a, b = draws[lag:], draws[:-lag]
        for f in (np.array, np.abs):
            assert abs(np.corrcoef(f(a), f(b))[0, 1]) < 6 / math.sqrt(len(a))
