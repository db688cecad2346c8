"""Attacks on the noisy gradients themselves: the strongest adversary of DP-SGD.

A Dirac canary has its whole clipped gradient in one coordinate of its own (Nasr et al. 2023,
"Tight Auditing of Differentially Private Machine Learning", section 4; Steinke, Nasr and
Jagielski 2023, section 6), where each step shows x_t = C_t b coin_t + sigma e_t.
"""

import numpy as np
from numpy.typing import NDArray

from dpsynth.assess.audit.detector import Noise
from dpsynth.assess.audit.worlds import WhiteBox
from dpsynth.errors import UsageError

Array = NDArray[np.float64]

# Steps apart that are compared in the search for noise that repeats.
_LAGS = 512
# Deviation in clips below which noise counts as none.
_LEAST = 1e-6
# Median of |N(0, 1)|.
_MEDIAN = 0.6744897501960817
# Density of |N(0, 1)| there.
_DENSITY = 0.635553145368214


def dirac_scores(seen: WhiteBox, coins: NDArray[np.bool_] | None = None) -> Array:
    """Log likelihood ratios (m,) of the subsampled Gaussian mechanism, summed over the steps.

    Unknown coins: sum_t log(1 - q + q exp((C x - C^2 / 2) / s^2)) of each step's C_t and x_t, the
    optimal test in each coordinate. s is the spread seen at the coordinates, which holds the
    little that other records add, and shows where noise is missing.

    Args:
        seen: the noisy sums.
        coins: which canary would join which step (T, m), for an adversary who knows the coins.
            Subsampling then hides nothing, and the plan's epsilon does not cover him: such scores
            are a diagnosis, never a bound on this epsilon.

    Raises:
        UsageError: coins of another shape.
    """
    if coins is not None and coins.shape != seen.sums.shape:
        raise UsageError(f"coins are {coins.shape}, expected {seen.sums.shape}")
    clips = seen.clips[:, None]
    ratios = _ratios(seen.sums, clips, _spread(seen.sums, clips))
    if coins is not None:
        known: Array = (ratios * coins).sum(axis=0)
        return known
    if seen.rate >= 1.0:
        return np.asarray(ratios.sum(axis=0), np.float64)
    mixed: Array = np.logaddexp(np.log1p(-seen.rate), np.log(seen.rate) + ratios).sum(axis=0)
    return mixed


def repeat_scores(seen: WhiteBox) -> Array:
    """Scores (m,) from differences between steps, in which noise that was used twice falls out.

    Steps are compared at the distance at which differences are smallest over all coordinates (any
    distance does where noise is fresh; the attack is then a weak one). A canary that is not
    included leaves nothing but noise there; one that is leaves +-C wherever its coins differ, two
    of each 1 / (q (1 - q)) times. Zeros where no difference can be taken (one step, or q = 1).
    """
    steps, count = seen.sums.shape
    apart = seen.rate * (1.0 - seen.rate)
    if steps < 2 or apart <= 0.0:
        return np.zeros(count)
    lags = range(1, min(steps - 1, _LAGS) + 1)
    least = _LEAST * float(seen.clips.min())  # of equals the first lag, which leaves most pairs

    def size(by: int) -> float:
        return max(least, float(np.median(np.abs(seen.sums[by:] - seen.sums[:-by]))))

    lag = min(lags, key=size)
    differences = seen.sums[lag:] - seen.sums[:-lag]
    later, earlier = seen.clips[lag:, None], seen.clips[:-lag, None]
    spread = _spread(differences, np.minimum(later, earlier))
    up = _ratios(differences, later, spread)
    down = _ratios(-differences, earlier, spread)
    moved = np.log(apart) + np.logaddexp(up, down)
    scores: Array = np.logaddexp(np.log1p(-2.0 * apart), moved).sum(axis=0)
    return scores


def seen_noise(seen: WhiteBox) -> Noise:
    """Variance of the noise at the canaries' coordinates over the promised one: 1 if honest.

    Canaries and records only add to it, so that less than 1 is a fault. No attack.
    """
    count = seen.sums.size
    variance = (_spread(seen.sums, seen.clips[:, None]) / seen.std) ** 2
    # A median c has deviation 1 / (2 f(c) sqrt(n)), and its square twice that of c.
    deviation = 1.0 / (_DENSITY * _MEDIAN * np.sqrt(count))
    return Noise(variance, float(deviation))


def _ratios(sums: Array, clips: Array, spread: float) -> Array:
    """Log N(x; C, s^2) - log N(x; 0, s^2)."""
    return np.asarray(clips * (sums - 0.5 * clips) / spread**2, np.float64)


def _spread(values: Array, clips: Array) -> float:
    """Deviation of the noise, by the median: coins leave most values without a canary's part."""
    found = float(np.median(np.abs(values))) / _MEDIAN
    return max(found, _LEAST * float(clips.min()))
