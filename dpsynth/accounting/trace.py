"""How much of a code a noisy point leaves open: the posterior-variance trace of a moment model.

For z ~ N(mu, Sigma) and x_t = (1 - t) xi + t z the posterior of z given x_t is Gaussian with

    Cov[z | x_t] = Sigma - t^2 Sigma A_t^-1 Sigma = (1 - t)^2 Sigma A_t^-1,

A_t = (1 - t)^2 I + t^2 Sigma (StraightDP, proposition 3.1), whatever x_t is. In the eigenbasis
of Sigma its trace is a sum over eigenvalues. Derivation, and what the planner makes of it:
docs/maths/planner.md (P1, P2).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpsynth.accounting.checks import AccountingError

POINTS = 64
"""Times at which a bucket's average is taken: midpoints of equal parts."""

Numbers = NDArray[np.float64]


def velocity_trace(t: ArrayLike, weights: ArrayLike, eigenvalues: ArrayLike) -> Numbers:
    """Tr Cov[z - xi | x_t] = V(t) / (1 - t)^2 at times t (n,), as (n,): what no model can predict.

    weights (Y,): shares of the classes, summing to one. eigenvalues (Y, d) of each class's
    covariance, or (1, d) of a shared one. Finite on all of [0, 1]: tr Sigma at 0, at 1 the number
    of directions with variance.

    Raises:
        AccountingError: shapes that do not fit, or numbers out of range.

    >>> velocity_trace([0.0, 0.5, 1.0], [1.0], [[4.0, 1.0]]).tolist()
    [5.0, 5.2, 2.0]
    """
    times, shares, values = _checked(t, weights, eigenvalues)
    noise, data = (1 - times)[:, None, None] ** 2, times[:, None, None] ** 2
    below = noise + data * values
    # At t = 1 a direction without variance is 0/0; it has none before, and none there.
    terms = np.divide(values, below, out=np.zeros_like(below), where=below > 0)
    found: Numbers = (terms.sum(axis=2) * shares).sum(axis=1)
    return found


def posterior_trace(t: ArrayLike, weights: ArrayLike, eigenvalues: ArrayLike) -> Numbers:
    """V(t) = tr Cov[z | x_t, y], averaged over classes y (P1); arguments as in `velocity_trace`.

        V(t) = sum_y pi_y sum_j lambda_yj (1 - t)^2 / ((1 - t)^2 + t^2 lambda_yj)

    >>> posterior_trace([0.0, 0.5, 1.0], [1.0], [[4.0, 1.0]]).tolist()
    [5.0, 1.3, 0.0]
    """
    times = _checked(t, weights, eigenvalues)[0]
    found: Numbers = (1 - times) ** 2 * velocity_trace(t, weights, eigenvalues)
    return found


def midpoints(low: float, high: float) -> Numbers:
    """Times (64,) in [low, high) whose mean of a function is its average there.

    >>> float(midpoints(0.0, 1.0).mean())
    0.5
    """
    return low + (high - low) * (np.arange(POINTS) + 0.5) / POINTS


def _checked(
    t: ArrayLike, weights: ArrayLike, eigenvalues: ArrayLike
) -> tuple[Numbers, Numbers, Numbers]:
    """Times (n,), shares (Y,) and eigenvalues (Y, d) as float64."""
    times, shares, values = (np.asarray(x, dtype=np.float64) for x in (t, weights, eigenvalues))
    fits = times.ndim == shares.ndim == 1 and values.ndim == 2
    if not fits or len(values) not in (1, len(shares)) or not len(shares):
        raise AccountingError(
            f"the trace got times {times.shape}, weights {shares.shape} and eigenvalues "
            f"{values.shape}; expected (n,), (Y,) and (Y, d) or (1, d)"
        )
    if not ((times >= 0) & (times <= 1)).all():
        raise AccountingError("the trace got a time outside [0, 1]")
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise AccountingError("the trace got an eigenvalue that is negative or not finite")
    if not (shares >= 0).all() or not abs(shares.sum() - 1) < 1e-6:
        raise AccountingError("the trace got weights that do not sum to one")
    return times, shares, values
