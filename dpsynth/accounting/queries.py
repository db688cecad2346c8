"""Sums without second moments: means, mean embeddings, votes, class sums of subsets.

As the statistics of `accounting.statistics`, which lists them; adjacency is add-or-remove-one.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from dpsynth.accounting import checks


@dataclass(frozen=True)
class ClassMeans:
    """Counts and sums by class, released together, and no second moments (equation A18).

    One record of class y with code z, ||z|| <= R, adds `count` to the count of y and `sum` z/R to
    the sum of y. `classes` is 1 where all records are one group. Derivation: docs/maths/moments.md,
    M6.

    >>> from dpsynth.accounting.statistics import sensitivity
    >>> sensitivity(ClassMeans(0.6, 0.8, classes=102, dim=64))
    1.0
    """

    count: float
    sum: float
    classes: int
    dim: int

    kind: ClassVar[str] = "class-means"

    def __post_init__(self) -> None:
        checks.coerce(self, count=checks.positive, sum=checks.positive)
        checks.coerce(self, classes=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class EmbeddingSums:
    """Counts and sums of feature vectors by class, released together (equation E1).

    One record of class y with features f, ||f|| <= 1, adds `count` to the count of y and `sum` f
    to the sum of y: a mean embedding of DP-MERF, DP-HP or DP-NTK. Label-free records are of one
    class. Derivation: docs/maths/embeddings.md.

    >>> from dpsynth.accounting.statistics import sensitivity
    >>> sensitivity(EmbeddingSums(0.6, 0.8, classes=10, dim=10_000))
    1.0
    """

    count: float
    sum: float
    classes: int
    dim: int

    kind: ClassVar[str] = "embedding-sums"

    def __post_init__(self) -> None:
        checks.coerce(self, count=checks.positive, sum=checks.positive)
        checks.coerce(self, classes=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class VoteHistogram:
    """Votes for the members of a released population, one bin a member (equation P1).

    One record adds 1 to the bin of the member nearest to it in a public feature space; a unit of
    several images adds a vector of L2 norm at most 1. `bins`: members of all classes together.
    Private Evolution (Lin et al. 2024, Algorithm 2); derivation: docs/maths/votes.md.

    >>> from dpsynth.accounting.statistics import sensitivity
    >>> sensitivity(VoteHistogram(bins=10_000))
    1.0
    """

    bins: int

    kind: ClassVar[str] = "votes"

    def __post_init__(self) -> None:
        checks.coerce(self, bins=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return {"kind": self.kind, "bins": self.bins}


@dataclass(frozen=True)
class CentralSums:
    """Sums of codes by class over one Poisson subset of the records (equation Z1).

    One record of class y with code z, ||z|| <= R, that its coin takes in adds z/R to the sum of
    y. Each step of an execution takes a fresh subset and fresh noise: a slot has a rate and steps,
    one step a central image of every class. DP-FETA (Li et al. 2025, section on central images);
    derivation: docs/maths/central.md.

    >>> from dpsynth.accounting.statistics import sensitivity
    >>> sensitivity(CentralSums(classes=10, dim=48))
    1.0
    """

    classes: int
    dim: int

    kind: ClassVar[str] = "central-sums"

    def __post_init__(self) -> None:
        checks.coerce(self, classes=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return {"kind": self.kind, "classes": self.classes, "dim": self.dim}
