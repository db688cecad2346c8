"""Units of several images in memory, and whitened norms of sums in exact arithmetic."""

from fractions import Fraction

import numpy as np

from dpsynth.accounting.statistics import CellSums, ClassMoments
from dpsynth.planning.schema import ImageShape
from dpsynth.private.encoding import UnitCodes, encoded
from dpsynth.private.lattice import CODE_MAX, SHARE_BITS, RunningSums
from dpsynth.readers import Record
from dpsynth.vault import NamedUnits

DIM, CLASSES, RADIUS = 4, 3, 2.5


class Listed:
    """A source of units in memory."""

    def __init__(self, records):
        self.kept = list(records)

    def __iter__(self):
        return iter(self.kept)

    def files(self):
        return []

    def ignored(self):
        return []

    def unit_names(self):
        return (record.unit for record in self.kept)

    def select(self, places):
        return ((place, self.kept[place]) for place in places)


class Pixels:
    """A representation whose code is the image's pixels about grey: up to 8 in size, R 2.5."""

    dim, radius, elementwise = DIM, RADIUS, True

    def encode_exact_many(self, images):
        return (images[:, 0, :, 0].astype(float) - 128) / 32


def joined(parts):
    """Chunks of codes, one after another; all with sizes, or all without."""
    parts = list(parts)
    sizes = [part.sizes for part in parts if part.sizes is not None]
    return UnitCodes(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate(sizes) if sizes else None,
    )


def encode_units(units, representation, classes):
    """All of `encoded` in memory."""
    return joined(encoded(units, representation, classes))


def exact_sums(codes, labels, classes, rows=2**20, *, second=True, shares=None):
    """All at once of `RunningSums`, over parts of `rows` records: the same bits for any `rows`."""
    bits = 0 if shares is None else SHARE_BITS
    running = RunningSums(classes, codes.shape[1], second=second, bits=bits)
    for start in range(0, len(codes), rows):
        part = slice(start, start + rows)
        running.add(codes[part], labels[part], None if shares is None else shares[part])
    return running.total()


def image(pixels, label, unit):
    return Record(np.array(pixels, dtype=np.uint8).reshape(1, DIM, 1), int(label), unit)


def named_units(records, most):
    return NamedUnits(Listed(records), ImageShape(height=1, width=DIM), images=most)


def coded(records, most):
    return encode_units(named_units(records, most), Pixels(), CLASSES)


def blocks_of(sums, statistic):
    """Counts, sums and second moments that the statistic releases, as Python ints."""
    seconds = sums.seconds
    if isinstance(statistic, CellSums):
        seconds = np.zeros((1, 0), object)
    if isinstance(statistic, ClassMoments) and statistic.covariance == "shared":
        seconds = seconds.sum(axis=0)
    return [sums.counts, sums.sums, seconds]


def whitened_square(blocks, statistic, bits):
    """Squared whitened norm of a move of sums in steps of 2^-bits, as a Fraction."""
    weights = (statistic.count, statistic.sum, getattr(statistic, "second", 0.0))
    squares = [sum(int(x) ** 2 for x in np.asarray(b, object).reshape(-1)) for b in blocks]
    whole = sum(
        Fraction(w) ** 2 * Fraction(square, CODE_MAX ** (2 * power))
        for power, (w, square) in enumerate(zip(weights, squares, strict=True))
    )
    return whole / 4**bits
