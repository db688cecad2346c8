"""Settings of central images (DP-FETA, Li et al. 2025): noisy means of random class subsets."""

from typing import Annotated

from pydantic import Field

from dpsynth.accounting.queries import CentralSums
from dpsynth.planning.section import Fraction, PositiveFloat, PositiveInt, Rate, Section

NAME = "central"
"""Name of the one release, and of its file."""


class WarmUp(Section):
    """Post-processing: the velocity model learns the central images before it sees a record.

    horizon: times above it are not learned from them: a central image says what a class looks like
        from afar, not how sharp an image is. 1: all times, as in the paper.
    """

    steps: PositiveInt = 1_000
    batch: PositiveInt = 256
    learning_rate: PositiveFloat = 1e-3
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.99
    label_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    horizon: Rate = 1.0


class Central(Section):
    """Central images of each class, one execution of the mechanism each, all in one slot.

    weight: the stage's share, as in the other stages.
    images: central images a class.
    rate: probability of each record to be in one subset; a subset is drawn for each image.
    clip: norm that a code is cut to, in the representation's units; its own radius if None.
    """

    weight: PositiveFloat = 0.2
    images: PositiveInt = 50
    rate: Fraction = 0.1
    clip: PositiveFloat | None = None
    spares: Annotated[int, Field(ge=0, le=3)] = 0
    warm_up: WarmUp = WarmUp()

    def divisor(self, capacity: int, classes: int) -> float:
        """What a class's sum is divided by: the declared q N / Y, never a number of records.

        >>> Central(rate=0.1).divisor(60_000, 10)
        600.0
        """
        return self.rate * capacity / classes

    def statistic(self, classes: int, dim: int) -> CentralSums:
        """What a step of the slot releases; the slot has this rate and `images` steps."""
        return CentralSums(classes=classes, dim=dim)
