"""The Gaussian mechanism in closed form, at sensitivity 1.

Balle and Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy", theorem 8:

    delta(epsilon) = Phi(1/(2 sigma) - epsilon sigma) - e^epsilon Phi(-1/(2 sigma) - epsilon sigma)

Both densities agree at the two arguments up to e^epsilon, so the difference is taken between
Mills ratios and stays accurate in the far tail. Needs the standard library alone.
"""

import math
from collections.abc import Callable

from dpsynth.accounting import checks

_BISECTIONS = 200
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def log_delta(epsilon: float, sigma: float) -> float:
    """Natural logarithm of the smallest delta of N(0, sigma^2) at `epsilon` >= 0.

    >>> round(log_delta(50.0, 1.0), 3)
    -1233.869
    """
    near = epsilon * sigma - 0.5 / sigma
    far = epsilon * sigma + 0.5 / sigma
    log_density = -0.5 * near * near - _LOG_SQRT_2PI
    if near < 0:
        mass = _upper_tail(near) - math.exp(log_density) * _mills(far)
        return math.log(mass) if mass > 0 else -math.inf
    difference = _mills(near) - _mills(far)
    return log_density + math.log(difference) if difference > 0 else -math.inf


def delta(epsilon: float, sigma: float) -> float:
    """Smallest delta of a Gaussian mechanism of noise `sigma` at `epsilon`.

    >>> round(delta(1.0, 1.0), 6)
    0.126937
    """
    epsilon = 0.0 if epsilon == 0 else checks.positive("epsilon", epsilon)
    return math.exp(log_delta(epsilon, checks.positive("sigma", sigma)))


def epsilon(delta: float, sigma: float) -> float:
    """Smallest epsilon of a Gaussian mechanism of noise `sigma` at `delta`, rounded up.

    >>> round(epsilon(1e-5, 1.0), 4)
    4.3772
    """
    target = math.log(checks.open_fraction("delta", delta))
    sigma = checks.positive("sigma", sigma)
    if log_delta(0.0, sigma) <= target:
        return 0.0
    # Mass beyond epsilon is at most the tail of the privacy loss N(1/2s^2, 1/s^2).
    high = 0.5 / sigma**2 + math.sqrt(-2 * target) / sigma
    return _smallest(lambda value: log_delta(value, sigma) <= target, 0.0, high)


def sigma(epsilon: float, delta: float) -> float:
    """Smallest noise whose Gaussian mechanism is (`epsilon`, `delta`)-private, rounded up.

    >>> round(sigma(1.0, 1e-5), 4)
    3.7306
    """
    epsilon = checks.positive("epsilon", epsilon)
    target = math.log(checks.open_fraction("delta", delta))
    low = high = 1.0
    while log_delta(epsilon, high) > target:
        high *= 2
    while log_delta(epsilon, low) <= target:
        low /= 2
    return _smallest(lambda value: log_delta(epsilon, value) <= target, low, high)


def _smallest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Upper end of the bracket around the point from which `holds` stays true."""
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _upper_tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2))


def _mills(x: float) -> float:
    """Upper tail over density of the standard normal at x >= 0."""
    if x < 12:
        return _upper_tail(x) * math.exp(0.5 * x * x + _LOG_SQRT_2PI)
    fraction = x
    for k in range(60, 0, -1):  # Laplace's continued fraction, far past convergence
        fraction = x + k / fraction
    return 1 / fraction
