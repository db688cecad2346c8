"""Mechanism executions as frozen values, apart from any accountant.

What is not accounted for is an `Unaccounted` event, and makes epsilon infinite.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GaussianEvent:
    """One Gaussian mechanism; `noise_multiplier` is its noise over its L2 sensitivity."""

    noise_multiplier: float


@dataclass(frozen=True)
class PoissonGaussianEvent:
    """`steps` Gaussian mechanisms, each on a fresh Poisson sample at `rate`."""

    noise_multiplier: float
    rate: float
    steps: int


@dataclass(frozen=True)
class ComposedEvent:
    """Several events that one charge pays for together, such as steps of different clips."""

    parts: tuple[PoissonGaussianEvent, ...]

    @property
    def noise_multiplier(self) -> float:
        """The least of the parts': noise over the largest sensitivity."""
        return min(part.noise_multiplier for part in self.parts)


@dataclass(frozen=True)
class Unaccounted:
    """Something that touched private data and that no accountant here knows."""

    what: str


Event = GaussianEvent | PoissonGaussianEvent | ComposedEvent | Unaccounted
