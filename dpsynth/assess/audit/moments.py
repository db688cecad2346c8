"""Attacks on the released moments alone: likelihood ratios of the Gaussian mechanism.

A release is exact sums plus Gaussian noise of known deviation, and the adversary knows all of the
sums but the canaries' part. Every block of every round (counts, sums, second moments, by class or
by cell) is one more sighting of the same bits, each entry in units of its own noise; so block
weights, shared and class covariances and cell rounds need no rule of their own.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dpsynth.assess.audit.detector import Noise, Sighting, bit_scores, noise_level
from dpsynth.assess.audit.worlds import Statistic
from dpsynth.errors import UsageError

Array = NDArray[np.float64]


def moment_scores(blocks: Sequence[Statistic]) -> Array:
    """Likelihood ratios of the canaries (m,) from all blocks of a release: see `detector`.

    Raises:
        UsageError: no block.
    """
    return bit_scores(_together([_sighting(block) for block in blocks]))


def seen_noise(blocks: Sequence[Statistic]) -> Noise:
    """Variance of the noise in the blocks over the promised one: 1 in an honest world.

    No attack, and sharper than any: exact sums are known but for a few bits.
    """
    return noise_level(_together([_sighting(block) for block in blocks]))


def contrast_scores(blocks: Sequence[Statistic]) -> Array:
    """Scores (m,) from differences of blocks, in which noise that was used twice falls out.

    Every block, in units of its noise, against the beginning of the longest one: a generator that
    was set back between two draws makes both noises the same sequence. With fresh noise these are
    differences of independent numbers, and the attack is a weaker one than `moment_scores`.

    Raises:
        UsageError: fewer than two blocks, of which no difference can be taken.
    """
    if len(blocks) < 2:
        raise UsageError("differences need two blocks or more")
    longest = max(range(len(blocks)), key=lambda at: len(blocks[at].noisy))
    base = blocks[longest]
    found = []
    for at, block in enumerate(blocks):
        if at == longest:
            continue
        size = min(len(block.noisy), len(base.noisy))
        apart = (block.residual[:size] - base.residual[:size]) / np.sqrt(2.0)
        parts = (_rows(block)[:, :size] - _rows(base)[:, :size]) / np.sqrt(2.0)
        found.append(_of_rows(parts, apart))
    return bit_scores(_together(found))


def _sighting(block: Statistic) -> Sighting:
    return _of_rows(_rows(block), block.residual)


def _of_rows(rows: csr_array, residual: Array) -> Sighting:
    gram = np.asarray((rows @ rows.T).todense(), dtype=np.float64)
    return Sighting(gram, rows @ residual, float(residual @ residual), len(residual))


def _rows(block: Statistic) -> csr_array:
    """What each canary adds (m, k), in units of the noise; entries named twice add up."""
    count, width = block.places.shape
    starts = np.arange(0, (count + 1) * width, width)
    entries = (block.parts.reshape(-1), block.places.reshape(-1), starts)
    return csr_array(entries, shape=(count, len(block.noisy)))


def _together(sightings: Sequence[Sighting]) -> Sighting:
    if not sightings:
        raise UsageError("this world released no moments")
    total = sightings[0]
    for other in sightings[1:]:
        total = total + other
    return total
