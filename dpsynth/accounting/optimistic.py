"""A lower bound on the privacy loss of the (sampled) Gaussian mechanism, on a grid.

dp-accounting's own optimistic estimate rounds each loss down to the grid and loses half a
step of it each time a mechanism is composed. Here the outcomes are gathered in bins centred
on the grid first, which is post-processing, hence never raises delta; what is left to round
is of second order (docs/maths/accounting.md, equations A9 to A12).
"""

from dataclasses import dataclass

import numpy as np
from dp_accounting.pld import pld_pmf
from scipy import special

Array = np.ndarray[tuple[int], np.dtype[np.float64]]

_TAIL = 11.0  # standard deviations of noise that are kept; beyond them the mass is dropped
_ULP = 2.0**-51
_SHIFTS = np.concatenate([[0.0], 10.0 ** np.arange(-12.0, -0.2, 0.1)])  # in grid steps


@dataclass(frozen=True)
class Rounded:
    """Masses on grid losses k h, each at most the true loss plus `shift`."""

    pmf: pld_pmf.PLDPmf
    shift: float


@dataclass(frozen=True)
class LowerBound:
    """One step in both directions: the record is removed, or added."""

    remove: Rounded
    add: Rounded


def gaussian_lower_bound(sigma: float, rate: float, grid: float) -> LowerBound:
    """Lower bound for one step of noise `sigma` at sampling `rate` <= 1, on multiples of `grid`."""
    index = _bins(sigma, rate, grid)
    edges = _outcome(np.append(index - 0.5, index[-1] + 0.5) * grid, sigma, rate)
    without, error_without = _mass(edges / sigma, sigma)
    shifted, error_shifted = _mass((edges - 1) / sigma, sigma)
    mixed = (1 - rate) * without + rate * shifted
    error_mixed = (1 - rate) * error_without + rate * error_shifted
    keep = (without > 2 * error_without) & (mixed > 2 * error_mixed)
    without, mixed = without[keep], mixed[keep]
    loss = np.log(mixed) - np.log(without)
    error = 2 * (error_mixed[keep] / mixed + error_without[keep] / without)
    remove = _rounded_down(loss - error, mixed, grid)
    return LowerBound(remove, _rounded_down(-loss - error, without, grid))


def _bins(sigma: float, rate: float, grid: float) -> Array:
    """Grid indices whose bins cover the outcomes between -_TAIL sigma and 1 + _TAIL sigma."""
    ends = np.array([-_TAIL * sigma, 1 + _TAIL * sigma])
    with np.errstate(divide="ignore"):
        log_stay = np.log1p(-rate)
    losses = np.logaddexp(log_stay, np.log(rate) + (2 * ends - 1) / (2 * sigma**2))
    low, high = np.floor(losses[0] / grid), np.ceil(losses[1] / grid)
    return np.arange(low, high + 1)


def _outcome(loss: Array, sigma: float, rate: float) -> Array:
    """The outcome x at which log(1 - q + q exp((2x - 1)/(2 sigma^2))) is `loss` (A10)."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log1p(np.expm1(np.minimum(loss, 0)) / rate)
        large = loss - np.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(loss, 0)))
    ratio = np.where(loss > 0, large, np.where(np.isnan(small), -np.inf, small))
    return np.asarray(sigma**2 * ratio + 0.5)


def _mass(edges: Array, sigma: float) -> tuple[Array, Array]:
    """Normal mass between consecutive `edges`, from the nearer tail, and its rounding error."""
    left, right = special.ndtr(edges), special.ndtr(-edges)
    upper = edges[:-1] > 0
    mass = np.where(upper, right[:-1] - right[1:], left[1:] - left[:-1])
    tail = np.where(upper, right[:-1], left[1:])
    near = np.minimum(np.abs(np.where(upper, edges[:-1], edges[1:])), 40.0)
    moved = np.exp(-0.5 * near**2) * (near + 1 / sigma)  # the edges themselves are rounded
    return mass, _ULP * 4 * (tail + moved)


def _rounded_down(loss: Array, mass: Array, grid: float) -> Rounded:
    """Masses on grid indices k <= (loss + shift)/grid, with the shift that costs least (A12)."""
    position = loss / grid
    short = np.rint(position) - position  # in grid steps, above 0: just below a grid point
    costs = [mass.sum() * shift + mass[short > shift].sum() for shift in _SHIFTS]
    shift = float(_SHIFTS[int(np.argmin(costs))])
    index = np.floor(position + shift).astype(np.int64)
    low = int(index.min())
    dense = np.bincount(index - low, weights=mass)
    pmf = pld_pmf.DensePLDPmf(grid, low, dense, 0.0, pessimistic_estimate=False)
    return Rounded(pmf, shift * grid)
