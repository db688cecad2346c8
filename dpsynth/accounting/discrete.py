"""What a discrete Gaussian on the integers costs against the continuous one.

The release adds N_Z(0, s^2) to integer lattice values. The continuous Gaussian of the same
scale, rounded to integers, is post-processing of the mechanism that the accountant knows
(rounding commutes with integer shifts). The two differ by a total variation of O(1/s^2) a
coordinate, bounded in docs/maths/accounting.md (equations A5 to A8).
"""

import math

from dpsynth.accounting import checks

SMALLEST_SCALE = 1.0
# (1/16) of the integral of |g''|, g the N(0, 1) density: 4 e^(-1/2) / sqrt(2 pi).
_MIDPOINT = 0.25 * math.exp(-0.5) / math.sqrt(2 * math.pi)


def tv_per_coordinate(scale: float) -> float:
    """Bound on the total variation between N_Z(0, scale^2) and N(0, scale^2) rounded (A7).

    >>> tv_per_coordinate(2.0**30) < 6e-20
    True

    Raises:
        AccountingError: `scale` is below 1 lattice step, where the bound is not proved.
    """
    scale = checks.positive("scale", scale)
    if scale < SMALLEST_SCALE:
        raise checks.AccountingError(
            f"scale is {scale!r} lattice steps; expected at least {SMALLEST_SCALE}"
        )
    # exp underflows to 0 where the term is below 1e-300; nextafter keeps the sum a bound.
    bound = _MIDPOINT / scale / scale + 1.01 * math.exp(-2 * (math.pi * scale) ** 2)
    return math.nextafter(bound, math.inf)


def delta_slack(coordinates: int, scale: float, epsilon: float) -> float:
    """What to add to delta for `coordinates` discrete draws in all, at `epsilon` (A8).

    >>> delta_slack(12_250, 2.0**30, 1.0) < 2.5e-15
    True
    """
    coordinates = checks.whole("coordinates", coordinates)
    epsilon = checks.positive("epsilon", epsilon)
    try:
        factor = 1 + math.exp(epsilon)
    except OverflowError:
        return 1.0
    return min(1.0, factor * coordinates * tv_per_coordinate(scale))
