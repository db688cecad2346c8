"""Exact discrete Gaussian numbers from a keystream, many at once.

Mass proportional to exp(-x^2 / (2 s^2)) on the whole numbers, s whole (Canonne, Kamath and Steinke
2020, Definition 1), by rejection as in Karney (2016), Algorithm D, with narrower layers:

1. x >= 0 lies on layer k, which is [k w, (k + 1) w) with w a power of two from s/16 to s/8 (1 below
   s = 16). Take layer k with probability proportional to exp(-(k w)^2 / (2 s^2)).
2. Take j uniform on 0 .. w - 1; keep x = k w + j with probability exp(-(x^2 - (k w)^2) / (2 s^2)).
3. Take a sign; -0 is thrown away.

What is kept has the right mass for any s, so that nothing is approximated but the comparisons
of 1 and 2. Those compare a uniform number with a real one. Of the uniform number the first 64 (53)
bits are looked at: nearly always they decide, whatever the rounding of float64. Where they do not
(once in 10^13 numbers), more bits are drawn and the real number is computed to as many digits as it
takes. So every decision is the exact one. docs/maths/moments.md, M4.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dpsynth.private.keystream import Stream

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
Answer = TypeVar("Answer")

_WORD = 64
_BITS = 53
DOUBT = 2.0**-44
"""An acceptance this near its probability is decided exactly: 500 times the error of float64."""
_LEAST_LAYERS = 8
_CHUNK = 2**15
_MOST_LAYERS = 504
"""Layers that surely fit 64 bits; all beyond them, of a mass below 2^-690, count as the next."""
_DIGITS = 40
_SIGN = np.uint64(63)


@dataclass(frozen=True)
class _Layers:
    """Layers for one scale s: width 2^bits; `edges` (n,) are floor(2^64 P(layer <= k)).

    The last edge is 2^64 - 1: the words that it holds, as those of any edge, are not decided by
    64 bits.
    """

    scale: int
    bits: int
    edges: Words


def fill_discrete_gaussian(
    out: Integers, scale: int, stream: Stream, *, doubt: float = DOUBT
) -> None:
    """Overwrite `out` (n,) with independent numbers of mass exp(-x^2 / (2 scale^2)), normalised.

    Args:
        out: int64; 64 standard deviations must fit it, so that `scale` is at most 2^57.
        scale: at least 1.
        stream: where all randomness comes from.
        doubt: for tests: with 1 every acceptance is decided by the exact comparison.
    """
    layers = _layers(scale)
    filled = 0
    while filled < len(out):
        # One try in twenty fails; what is left over of the others is thrown away.
        tries = min(_CHUNK, (len(out) - filled) * 17 // 16 + 16)
        found = _tried(layers, tries, stream, doubt)[: len(out) - filled]
        out[filled : filled + len(found)] = found
        filled += len(found)


def _tried(layers: _Layers, tries: int, stream: Stream, doubt: float) -> Integers:
    """What is kept of so many tries, in their order."""
    words = stream.words(3 * tries)
    first, second, third = words[:tries], words[tries : 2 * tries], words[2 * tries :]
    layer = np.searchsorted(layers.edges, first)
    for place in np.flatnonzero(layers.edges[layer] == first).tolist():
        layer[place] = _exact_layer(layers.scale, layers.bits, int(first[place]), stream)
    offset = (second & np.uint64((1 << layers.bits) - 1)).astype(np.int64)
    negative = (second >> _SIGN).astype(np.bool_)
    base = layer << layers.bits
    size = base + offset
    # exp(-j (2 k w + j) / (2 s^2)); an error of float64 moves it by less than 2^-50.
    twice = np.add(base, size, dtype=np.float64)
    exponent = offset / layers.scale * (twice / layers.scale) / 2
    chance = np.exp(-exponent)
    uniform = (third >> np.uint64(_WORD - _BITS)) * 2.0**-_BITS
    keep = uniform < chance
    for place in np.flatnonzero(np.abs(uniform - chance) <= doubt).tolist():
        move = (int(offset[place]), int(base[place]) + int(size[place]))
        word = int(third[place]) >> (_WORD - _BITS)
        keep[place] = _exact_chance(layers.scale, *move, word, stream)
    keep &= ~(negative & (size == 0))
    signed: Integers = np.where(negative, -size, size)[keep]
    return signed


@lru_cache(maxsize=64)
def _layers(scale: int) -> _Layers:
    bits = max(0, (scale // _LEAST_LAYERS).bit_length() - 1)
    edges = list[int]()
    for share in _shares(scale, bits, _DIGITS):
        low, high = (math.floor(bound * 2**_WORD) for bound in share)
        if low != high and high < 2**_WORD:  # pragma: no cover - 40 digits did not tell which cell
            raise ArithmeticError("the layers need more digits")
        edges.append(min(low, 2**_WORD - 1))
        if edges[-1] == 2**_WORD - 1:
            break
    return _Layers(scale, bits, np.array(edges, dtype=np.uint64))


def _shares(scale: int, bits: int, digits: int) -> Iterator[tuple[Fraction, Fraction]]:
    """Bounds below and above P(layer <= k) for k = 0, 1, ..., which `digits` set the width of.

    The sum over all layers is cut where a term is below 10^-digits. From there on each is less than
    half of the one before, so that 10^-digits covers the rest too; and it covers the error of a
    term, for five more digits are computed.
    """
    context = Context(prec=digits + 5)
    step, cumulative = Fraction(1 << 2 * bits, 2 * scale * scale), [Fraction(0)]
    while len(cumulative) < 2 or cumulative[-1] - cumulative[-2] > Fraction(1, 10**digits):
        k = len(cumulative) - 1
        cumulative.append(cumulative[-1] + Fraction(_exponential(step * k * k, context)))
    slack = Fraction(len(cumulative) + 1, 10**digits)
    total = cumulative[-1]
    for part in cumulative[1:]:
        yield (part - slack) / (total + slack), min(Fraction(1), (part + slack) / (total - slack))
    while True:
        yield (total - slack) / (total + slack), Fraction(1)


def _exponential(exponent: Fraction, context: Context) -> Decimal:
    """exp(-exponent), correctly rounded but for the error of the quotient."""
    whole = context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))
    return context.exp(whole)


def _exact_layer(scale: int, bits: int, word: int, stream: Stream) -> int:
    """The layer of a uniform number that begins with `word`: more bits until they decide."""

    def layer_of(bound: Fraction, shares: list[tuple[Fraction, Fraction]], side: int) -> int:
        return next((k for k, share in enumerate(shares) if bound < share[side]), len(shares))

    def decide(low: Fraction, high: Fraction, digits: int) -> int | None:
        bounds = _shares(scale, bits, digits)
        shares = [next(bounds) for _ in range(_MOST_LAYERS)]
        # At least k: the number is at or above the upper bound of k - 1.
        least, most = layer_of(low, shares, 1), layer_of(high, shares, 0)
        return least if least == most else None

    return _refined(word, _WORD, stream, decide)


def _exact_chance(scale: int, offset: int, twice: int, word: int, stream: Stream) -> bool:
    """Whether a uniform number that begins with the 53 bits `word` is below the acceptance."""
    exponent = Fraction(offset * twice, 2 * scale * scale)

    def decide(low: Fraction, high: Fraction, digits: int) -> bool | None:
        chance = Fraction(_exponential(exponent, Context(prec=digits + 5)))
        slack = Fraction(1, 10**digits)
        if exponent == 0 or high <= chance - slack:
            return True
        return False if low >= chance + slack else None

    return _refined(word, _BITS, stream, decide)


def _refined(
    word: int,
    bits: int,
    stream: Stream,
    decide: Callable[[Fraction, Fraction, int], Answer | None],
) -> Answer:
    """What `decide` says of [word, word + 1) / 2^bits, which more words narrow until it does.

    `decide` takes both ends and how many digits the other side of the comparison needs.
    """
    while True:
        unit = Fraction(1, 1 << bits)
        answer = decide(word * unit, (word + 1) * unit, _DIGITS + bits // 3)
        if answer is not None:
            return answer
        word, bits = word << _WORD | int(stream.words(1)[0]), bits + _WORD
