"""Confidence intervals of shares, and the epsilon that an attack's two error rates rule out.

Bounds are rounded outwards. Derivation: docs/maths/audit.md (R7, R8).
"""

import math
from typing import Literal

from scipy import special

from dpsynth.accounting import checks

Side = Literal["both", "low", "high"]
_OUTWARDS = 1e-12  # relative; the inverse beta function is accurate to about 1e-14


def clopper_pearson(
    successes: int, trials: int, confidence: float = 0.95, side: Side = "both"
) -> tuple[float, float]:
    """Exact interval of a probability from independent trials (Clopper and Pearson 1934).

    Holds at least the stated confidence for every probability and number of trials.

    Args:
        successes: 0 to `trials`.
        trials: 0 or more; none gives [0, 1].
        confidence: above 0, below 1.
        side: "both" splits the error in two; "low" and "high" put all of it on one end, the
            other being 0 or 1.

    Raises:
        AccountingError: a number out of range.

    >>> low, high = clopper_pearson(0, 100)
    >>> low, round(high, 4)
    (0.0, 0.0362)
    """
    n = int(trials)
    k = int(successes)
    if (k, n) != (successes, trials) or not 0 <= k <= n:
        raise checks.AccountingError(
            f"{successes!r} successes in {trials!r} trials; expected whole numbers, no more "
            "successes than trials"
        )
    error = 1 - checks.open_fraction("confidence", confidence)
    if side == "both":
        error /= 2
    low, high = 0.0, 1.0
    if k > 0 and side != "high":
        low = float(special.betaincinv(k, n - k + 1, error)) * (1 - _OUTWARDS)
    if k < n and side != "low":
        high = min(1.0, float(special.betainccinv(k + 1, n - k, error)) * (1 + _OUTWARDS))
    return low, high


def epsilon_from_rates(
    true_positives: int,
    members: int,
    false_positives: int,
    others: int,
    *,
    delta: float,
    confidence: float,
) -> float:
    """Lower bound on epsilon from how often a FIXED attack is right (R8); 0 if nothing is shown.

    TPR <= e^eps FPR + delta and TNR <= e^eps FNR + delta (Kairouz, Oh and Viswanath 2015,
    theorem 2.1), with the two rates' one-sided Clopper-Pearson ends, each at half the error.

    The trials must be independent and the attack fixed before them: repeated runs of the
    mechanism, a trial each. Records of one run are not independent: `one_run` is for those.

    Args:
        true_positives: runs with the record that were called so.
        members: runs with the record.
        false_positives: runs without it that were called runs with it.
        others: runs without the record.
        delta: 0 or more, below 1.
        confidence: above 0, below 1.

    Raises:
        AccountingError: a number out of range.

    >>> round(epsilon_from_rates(1000, 1000, 0, 1000, delta=1e-5, confidence=0.95), 2)
    5.6
    >>> epsilon_from_rates(50, 1000, 50, 1000, delta=1e-5, confidence=0.95)
    0.0
    """
    spare = 0.0 if delta == 0 else checks.open_fraction("delta", delta)
    each = 1 - (1 - checks.open_fraction("confidence", confidence)) / 2
    tpr, _ = clopper_pearson(true_positives, members, each, "low")
    _, fpr = clopper_pearson(false_positives, others, each, "high")
    found = 0.0
    for power, error in ((tpr - spare, fpr), (1 - fpr - spare, 1 - tpr)):
        if power > error > 0:
            found = max(found, math.log(power / error) - _OUTWARDS)
    return found
