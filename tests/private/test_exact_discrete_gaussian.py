"""The discrete Gaussian sampler against its mass, mpmath, OpenDP and its own exact comparisons."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpsynth.private import discrete_gaussian as sampler
from dpsynth.private.discrete_gaussian import fill_discrete_gaussian
from dpsynth.private.keystream import Keys, Stream

SCALES = st.one_of(st.integers(1, 200), st.integers(1, 2**57))
KEY = bytes(range(32))


class Scripted(Stream):
    """A stream that says what the test wants, then goes on as a real one."""

    def __init__(self, *words: int) -> None:
        super().__init__(KEY)
        self.script = list(words)

    def words(self, count: int):
        said = [self.script.pop(0) for _ in range(min(count, len(self.script)))]
        return np.concatenate([np.array(said, np.uint64), super().words(count - len(said))])


def drawn(scale: int, size: int, **options: float) -> np.ndarray:
    out = np.empty(size, np.int64)
    fill_discrete_gaussian(out, scale, Keys().stream(), **options)
    return out


def true_layers(scale: int, digits: int = 60) -> list[mpmath.mpf]:
    """P(layer <= k) for k = 0, 1, ... by a plain sum."""
    bits = sampler._layers(scale).bits
    with mpmath.workdps(digits):
        terms = list[mpmath.mpf]()
        while not terms or terms[-1] > mpmath.mpf(10) ** -digits:
            terms.append(mpmath.exp(-(mpmath.mpf(len(terms) << bits) ** 2) / (2 * scale**2)))
        total, below, found = mpmath.fsum(terms), mpmath.mpf(0), []
        for term in terms:
            below += term
            found.append(below / total)
        return found


@pytest.mark.parametrize("scale", [1, 2, 7, 8, 13, 16, 100])
def test_the_mass_is_that_of_the_definition(scale):
    size = 200_000
    found = drawn(scale, size)
    support = np.arange(-40 * scale, 40 * scale + 1)
    mass = np.exp(-(support**2) / (2.0 * scale**2))
    mass /= mass.sum()
    often = size * mass > 10
    counts = np.bincount(found + 40 * scale, minlength=len(support))[often]
    expected = size * mass[often]
    # Those of the rare ends stand together as one more cell.
    counts = np.append(counts, size - counts.sum())
    expected = np.append(expected, size - expected.sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, len(counts) - 1) > 1e-7


@pytest.mark.parametrize("scale", [2**30, 2**30 + 12_345, 3 * 2**40 + 1, 2**57])
def test_on_a_fine_lattice_it_is_the_gaussian(scale):
    found = drawn(scale, 200_000)
    assert stats.kstest(found / scale, "norm").pvalue > 1e-7
    low = found & 0xFF  # low bits say nothing
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > 1e-7


def test_it_draws_what_opendp_draws():
    from opendp.domains import atom_domain, vector_domain
    from opendp.measurements import make_gaussian
    from opendp.metrics import l2_distance
    from opendp.mod import enable_features

    enable_features("contrib")
    space = vector_domain(atom_domain(T="i64")), l2_distance(T="f64")
    for scale in (3, 2**31 + 7):
        theirs = np.array(make_gaussian(*space, scale=float(scale))([0] * 20_000))
        assert stats.ks_2samp(drawn(scale, 20_000), theirs).pvalue > 1e-7


@settings(max_examples=25, deadline=None)
@given(SCALES)
def test_float_comparisons_decide_as_exact_ones(scale):
    """With `doubt` 1, every acceptance is decided by whole numbers; same words, same answers."""
    fast, exact = np.empty(40, np.int64), np.empty(40, np.int64)
    key = Keys().stream().words(4).tobytes()
    fill_discrete_gaussian(fast, scale, Stream(key))
    fill_discrete_gaussian(exact, scale, Stream(key), doubt=1.0)
    np.testing.assert_array_equal(fast, exact)


@settings(max_examples=10, deadline=None)
@given(SCALES)
def test_layers_are_cut_where_mpmath_cuts_them(scale):
    layers = sampler._layers(scale)
    assert 1 << layers.bits <= max(1, scale / 8)
    assert 1 << layers.bits > scale / 16 or layers.bits == 0
    with mpmath.workdps(80):
        truth = [int(mpmath.floor(share * 2**64)) for share in true_layers(scale)]
    assert layers.edges.tolist() == truth[: len(layers.edges)]
    assert int(layers.edges[-1]) == 2**64 - 1


@settings(max_examples=10, deadline=None)
@given(SCALES, st.data())
def test_a_word_on_an_edge_is_decided_by_more_bits(scale, data):
    layers, truth = sampler._layers(scale), true_layers(scale)
    k = data.draw(st.integers(0, len(layers.edges) - 2))
    word = int(layers.edges[k])
    with mpmath.workdps(80):
        rest = int(mpmath.floor((truth[k] * 2**64 - word) * 2**64))
    inside = sum(int(edge) < word for edge in layers.edges)  # first layer whose edge is here
    for more, layer in ((rest - 1, k), (rest + 1, k + 1)):
        if 0 <= more < 2**64 and inside == k and int(layers.edges[k + 1]) != word:
            assert sampler._exact_layer(scale, layers.bits, word, Scripted(more)) == layer
    # The very word of the boundary needs a third one.
    assert sampler._exact_layer(scale, layers.bits, word, Scripted(rest, 0)) <= k
    assert sampler._exact_layer(scale, layers.bits, word, Scripted(rest, 2**64 - 1)) >= k


@settings(max_examples=25, deadline=None)
@given(SCALES, st.data())
def test_an_acceptance_near_its_probability_is_decided_by_more_bits(scale, data):
    bits = sampler._layers(scale).bits
    offset = data.draw(st.integers(0, (1 << bits) - 1))
    twice = 2 * data.draw(st.integers(0, 80)) * (1 << bits) + offset
    with mpmath.workdps(80):
        chance = mpmath.exp(-mpmath.mpf(offset * twice) / (2 * scale**2))
        word = int(mpmath.floor(chance * 2**53))
        rest = int(mpmath.floor((chance * 2**53 - word) * 2**64))
    if offset == 0:
        assert sampler._exact_chance(scale, 0, twice, 2**53 - 1, Scripted())
        return
    for more, accepted in ((rest - 1, True), (rest + 1, False)):
        if 0 <= more < 2**64:
            assert sampler._exact_chance(scale, offset, twice, word, Scripted(more)) is accepted
    assert sampler._exact_chance(scale, offset, twice, word - 1, Scripted())
    assert not sampler._exact_chance(scale, offset, twice, word + 1, Scripted())


def test_the_last_word_reaches_far_into_the_tail(monkeypatch):
    last, bits = 2**64 - 1, sampler._layers(2**30).bits
    found = [
        sampler._exact_layer(2**30, bits, last, Scripted(*[last] * more, 0)) for more in range(3)
    ]
    # Each 64 bits more are another factor of 2^-64 of the mass: 9, 13 and 16 deviations.
    assert [round(k / 8) for k in found] == [9, 13, 16]
    monkeypatch.setattr(sampler, "_MOST_LAYERS", 100)  # what fits no more
    assert sampler._exact_layer(2**30, bits, last, Scripted(*[last] * 3)) == 100


def test_undecided_words_take_the_exact_way(monkeypatch):
    asked = []
    exact = sampler._exact_layer
    monkeypatch.setattr(
        sampler, "_exact_layer", lambda *given: asked.append(given[2]) or exact(*given)
    )
    layers = sampler._layers(5)
    out = np.empty(1, np.int64)
    fill_discrete_gaussian(out, 5, Scripted(*[int(layers.edges[3])] * 17))
    assert asked == [int(layers.edges[3])] * 17
    assert abs(out[0]) in (3, 4)


def test_minus_zero_is_thrown_away():
    """A first word of 0 is layer 0; the sign of 0 must not give it twice its mass."""
    out = np.empty(1, np.int64)
    tries = 1 * 17 // 16 + 16
    negative, kept = [1 << 63] * tries, [0] * tries
    fill_discrete_gaussian(out, 1, Scripted(*[0] * tries, *negative, *kept, *[2**63] * 200))
    assert out[0] != 0


def test_no_two_draws_are_the_same():
    keys = Keys()
    first, second = np.empty(50, np.int64), np.empty(50, np.int64)
    fill_discrete_gaussian(first, 2**40, keys.stream())
    fill_discrete_gaussian(second, 2**40, keys.stream())
    assert len({*first.tolist(), *second.tolist()}) == 100
