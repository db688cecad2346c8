"""Standard normal numbers from a keystream, many at once (Marsaglia and Tsang 2000).

The area under exp(-x^2 / 2), x >= 0, is cut into 256 layers of one area. A word of 64 bits names a
layer (8 bits) and a signed point on it (54 bits). Nearly 99% of the points lie under the curve for
certain; the others are decided one by one, exactly as the paper has it (section 3). All steps are
NumPy calls on whole blocks: a fifth of the time of one call a number.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dpsynth.private.keystream import Stream

_LAYERS = 256
_BITS = 53
TAIL = 3.6541528853610088
"""Where the lowest layer's tail starts: r of Marsaglia and Tsang, table for 256 layers."""
BLOCK = 2**15
"""Numbers at once: what a block needs stays in the processor's second cache."""

Numbers = NDArray[np.float64]


def _density(x: float) -> float:
    return math.exp(-x * x / 2)


def _edges() -> Numbers:
    """Right ends of the layers x_0 > x_1 = r > ... > x_256 = 0; x_0 stands for base and tail."""
    area = TAIL * _density(TAIL) + math.sqrt(math.pi / 2) * math.erfc(TAIL / math.sqrt(2))
    edges = [area / _density(TAIL), TAIL]
    while len(edges) < _LAYERS:
        edges.append(math.sqrt(-2 * math.log(area / edges[-1] + _density(edges[-1]))))
    return np.array([*edges, 0.0])


EDGES = _edges()
_HEIGHTS = np.exp(-(EDGES**2) / 2)
_SCALE = EDGES[:-1] * 2.0**-_BITS
_SURE = np.floor(EDGES[1:] / EDGES[:-1] * 2.0**_BITS)
"""Points (in 2^-53 of the layer) below this lie under the curve, whatever their height."""


def fill_normal(out: Numbers, stream: Stream) -> None:
    """Overwrite `out` (n,) with independent N(0, 1) numbers."""
    places, layers = [np.empty(0, dtype=np.intp)], [np.empty(0, dtype=np.intp)]
    scratch = _Scratch(min(BLOCK, len(out)))
    for start in range(0, len(out), BLOCK):
        place, layer = scratch.points(out[start : start + BLOCK], stream)
        places.append(place + start)
        layers.append(layer)
    unsure = np.concatenate(places)
    if len(unsure):
        out[unsure] = _decided(out[unsure], np.concatenate(layers), stream)


class _Scratch:
    """Memory of one block, for the length of one draw."""

    def __init__(self, size: int) -> None:
        self._words, self._layer = np.empty(size, dtype="<i8"), np.empty(size, dtype=np.intp)
        self._point, self._table = np.empty(size), np.empty(size)

    def points(self, out: Numbers, stream: Stream) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Fill `out` (n <= size) with points on layers; where one is unsure, and its layer."""
        n = len(out)
        words, layer = self._words[:n], self._layer[:n]
        point, table = self._point[:n], self._table[:n]
        stream.fill(words)
        np.bitwise_and(words, _LAYERS - 1, out=layer)
        np.right_shift(words, 64 - _BITS - 1, out=words)
        np.copyto(point, words, casting="unsafe")  # exact: at most 2^53
        _take(_SCALE, layer, table)
        np.multiply(point, table, out=out)
        _take(_SURE, layer, table)
        np.abs(point, out=point)
        unsure = np.flatnonzero(point >= table)
        return unsure, layer[unsure]


def _take(table: Numbers, index: NDArray[np.intp], out: Numbers) -> None:
    np.take(table, index, out=out, mode="clip")  # the default mode would copy `out`


def _decided(z: Numbers, layer: NDArray[np.intp], stream: Stream) -> Numbers:
    """Points outside the sure part: kept, moved into the tail, or drawn afresh altogether."""
    height = _HEIGHTS[layer] + _uniform(len(z), stream) * (_HEIGHTS[layer + 1] - _HEIGHTS[layer])
    fresh = (layer > 0) & (height >= np.exp(-z * z / 2))
    again = np.empty(int(fresh.sum()))
    if len(again):
        fill_normal(again, stream)
    z[fresh] = again
    tail = layer == 0
    z[tail] = np.copysign(_tail(int(tail.sum()), stream), z[tail])
    return z


def _tail(count: int, stream: Stream) -> Numbers:
    """|N(0, 1)| given that it is above `TAIL` (Marsaglia 1964), (count,)."""
    found = np.empty(0)
    while len(found) < count:
        beyond = -np.log(_uniform(count, stream)) / TAIL
        keep = -2 * np.log(_uniform(count, stream)) > beyond * beyond
        found = np.concatenate([found, TAIL + beyond[keep]])
    return found[:count]


def _uniform(count: int, stream: Stream) -> Numbers:
    """Uniform multiples of 2^-53 in (0, 1]."""
    whole = (stream.words(count) >> np.uint64(64 - _BITS)) + np.uint64(1)
    numbers: Numbers = np.multiply(whole, 2.0**-_BITS, dtype=np.float64)
    return numbers
