"""Exposure of planted canaries: their rank among candidates that might have been planted.

Carlini, Liu, Erlingsson, Kos and Song, "The Secret Sharer" (2019), definition 5:
exposure(s) = log2 |R| - log2 rank(s), by the rank of a planted secret among all candidates R.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import UsageError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Exposure:
    """Exposure of p planted canaries beside c candidates that were not planted.

    bits (p,): log2(c + 1) - log2 rank. most: log2(c + 1), of a canary ahead of all candidates.
    expected: mean of bits if ranks are uniform; spread: deviation of a mean of p such, as if
    canaries were ranked independently. extracted: canaries of rank 1; by_chance: as many are
    expected there.
    """

    bits: Array
    most: float
    expected: float
    spread: float
    extracted: int
    by_chance: float

    @property
    def mean(self) -> float:
        """Mean exposure in bits."""
        return float(self.bits.mean())

    def to_json(self) -> dict[str, float | int]:
        """A summary, as JSON values."""
        return {
            "canaries": len(self.bits),
            "mean": self.mean,
            "largest": float(self.bits.max()),
            "most": self.most,
            "expected_by_chance": self.expected,
            "spread_by_chance": self.spread,
            "extracted": self.extracted,
            "extracted_by_chance": self.by_chance,
        }


def exposure(planted: Array, candidates: Array) -> Exposure:
    """Rank each planted canary among the candidates; a tie ranks behind all its equals.

    Args:
        planted: scores (p,), higher for rather planted.
        candidates: scores (c,) of canaries made in the same way and not planted.

    Raises:
        UsageError: no canary on one of the sides, or a score that is not a number.

    >>> found = exposure(np.array([9.0, 1.0]), np.array([1.0, 2.0, 3.0]))
    >>> found.bits.tolist(), found.extracted
    ([2.0, 0.0], 1)
    """
    if not len(planted) or not len(candidates):
        raise UsageError(
            f"exposure needs planted canaries and candidates beside them, got {len(planted)} and "
            f"{len(candidates)}"
        )
    if np.isnan(planted).any() or np.isnan(candidates).any():
        raise UsageError("a canary's score is not a number")
    # Candidates that score at least as much stand before it.
    before = len(candidates) - np.searchsorted(np.sort(candidates), planted, side="left")
    ranks = np.arange(1, len(candidates) + 2)
    chance = np.log2(len(ranks)) - np.log2(ranks)
    return Exposure(
        bits=np.log2(len(ranks)) - np.log2(1 + before),
        most=float(np.log2(len(ranks))),
        expected=float(chance.mean()),
        spread=float(chance.std() / np.sqrt(len(planted))),
        extracted=int((before == 0).sum()),
        by_chance=len(planted) / len(ranks),
    )
