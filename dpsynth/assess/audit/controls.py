"""Positive controls: faults planted in an audit's own worlds, and nowhere else.

Each stands in the place of a real part that `dpsynth.private` is handed by its caller: a noise
source, the engine's clipper, codes. No switch in `private` leads to them, no command names them,
and no run of a plan can reach them: an audit alone builds them, in worlds that it deletes. (But
`SilentNoise`: a non-private reference has exact moments by it, in the curator's room.)
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.assess.audit.worlds import Control, Mask, Pair
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.noise import NoiseSource

UNCLIPPED = 32
"""How many clip radii a canary's code is long in a world without a clip. Whole numbers of 2^16
times this, and sums of 2,000 of their squares, stay inside what the exact sums are made of."""
UNBOUND = 2**10
"""By how much the bound of the engine's clip is raised there: above any gradient it meets."""


class SilentNoise(NoiseSource):
    """A source whose noise is zero; its coins are real.

    For the control "no-noise", and `assess.nonprivate`, whose values stay in the curator's room.
    """

    def _normal(self, count: int, std: float) -> NDArray[np.float64]:
        super()._normal(0, std)  # refuses what a real source refuses
        return np.zeros(count)

    def discrete_gaussian(self, scale: int, size: int) -> NDArray[np.int64]:
        """Zeros, for any scale that a real source takes."""
        super().discrete_gaussian(scale, 0)
        return np.zeros(size, np.int64)


class RepeatedNoise(NoiseSource):
    """A source that goes back to its beginning for every draw of noise; its coins are real.

    Each draw of n numbers is the first n of one normal sequence times its deviation: the same in
    every step, and in every block of a release. For the control "noise-reused" alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sequence = np.zeros(0)

    def _normal(self, count: int, std: float) -> NDArray[np.float64]:
        if count > len(self._sequence):
            more = super()._normal(count - len(self._sequence), 1.0)
            self._sequence = np.concatenate([self._sequence, more])
        super()._normal(0, std)
        found: NDArray[np.float64] = self._sequence[:count] * std
        return found

    def discrete_gaussian(self, scale: int, size: int) -> NDArray[np.int64]:
        """The sequence's beginning, rounded to whole numbers."""
        super().discrete_gaussian(scale, 0)
        return np.rint(self._normal(size, float(scale))).astype(np.int64)


def faulty_source(control: Control | None) -> NoiseSource | None:
    """The one noise source of a world with this fault; None where noise is drawn as in a run."""
    if control == "no-noise":
        return SilentNoise()
    return RepeatedNoise() if control == "noise-reused" else None


def unclipped(units: UnitCodes) -> UnitCodes:
    """The same canaries with codes beyond the ball, as if nothing had cut them."""
    return UnitCodes(units.codes * np.int32(UNCLIPPED), units.labels, units.sizes)


def copied(samples: Pair, canaries: Pair, included: Mask) -> Pair:
    """Samples among which the included canaries lie, each in a random sample's place."""
    images, labels = samples[0].copy(), samples[1].copy()
    chosen = np.flatnonzero(included)[: len(labels)]
    places = torch.randperm(len(labels))[: len(chosen)].numpy()
    images[places], labels[places] = canaries[0][chosen], canaries[1][chosen]
    return images, labels


def clip_bound(control: Control | None, clip: float) -> float:
    """What the engine clips to, for a declared clip: the same but without a clip.

    >>> clip_bound("no-clip", 1.0), clip_bound("no-noise", 1.0)
    (1024.0, 1.0)
    """
    bound = clip * UNBOUND if control == "no-clip" else clip
    return bound if math.isfinite(bound) else clip
