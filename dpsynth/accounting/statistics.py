"""What a mechanism sums over the records, and how far one record can move that sum.

A charge carries one of these values and its absolute noise; `sensitivity` is derived here,
never read from the charge. All are in whitened units: codes z are clipped to norm R and then
divided by R, residuals about a cell's centre likewise by rho. Adjacency is add-or-remove-one
record. Derivations, with the equation numbers named below: docs/maths/accounting.md.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dpsynth.accounting import checks
from dpsynth.accounting.queries import CentralSums, ClassMeans, EmbeddingSums, VoteHistogram
from dpsynth.errors import ReplayError


@dataclass(frozen=True)
class ClassMoments:
    """Counts, sums and second moments by class, released together (equation A1).

    One record of class y with code z, ||z|| <= R, adds `count` to the count of y, `sum` z/R
    to the sum of y, and `second` zz^T/R^2 to one second moment (that of y, or the shared
    one). A second moment is stored as its upper triangle of d(d+1)/2 numbers with the
    off-diagonal ones times sqrt(2), so that its L2 norm is the matrix's Frobenius norm.

    >>> sensitivity(ClassMoments(0.6, 0.64, 0.48, "class", classes=10, dim=48))
    1.0
    """

    count: float
    sum: float
    second: float
    covariance: Literal["class", "shared"]
    classes: int
    dim: int

    kind: ClassVar[str] = "class-moments"

    def __post_init__(self) -> None:
        checks.coerce(self, count=checks.positive, sum=checks.positive, second=checks.positive)
        checks.coerce(self, classes=checks.whole, dim=checks.whole)
        if self.covariance not in ("class", "shared"):
            raise checks.AccountingError(
                f"covariance is {self.covariance!r}; expected 'class' or 'shared'"
            )

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class CellSums:
    """Counts and sums of residuals by cells inside each class, released together (A13).

    One record of class y in cell k of that class (the nearest centre, ties to the lowest k),
    residual u = z - centre with ||u|| <= rho, adds `count` to the count of (y, k) and `sum`
    u/rho to its sum. `cells` is the most cells of one class; the sensitivity holds no number
    of cells, since a record is in one. Centres and rho come from earlier rounds (A15).

    >>> sensitivity(CellSums(0.6, 0.8, classes=10, cells=16, dim=48))
    1.0
    """

    count: float
    sum: float
    classes: int
    cells: int
    dim: int

    kind: ClassVar[str] = "cell-sums"

    def __post_init__(self) -> None:
        checks.coerce(self, count=checks.positive, sum=checks.positive)
        checks.coerce(self, classes=checks.whole, cells=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class CellMoments:
    """Counts, sums and second moments of residuals by cells, released together (A14).

    As `CellSums`, and the record adds `second` uu^T/rho^2 to the second moment of (y, k),
    stored as in `ClassMoments`.

    >>> sensitivity(CellMoments(0.6, 0.64, 0.48, classes=10, cells=16, dim=48))
    1.0
    """

    count: float
    sum: float
    second: float
    classes: int
    cells: int
    dim: int

    kind: ClassVar[str] = "cell-moments"

    def __post_init__(self) -> None:
        checks.coerce(self, count=checks.positive, sum=checks.positive, second=checks.positive)
        checks.coerce(self, classes=checks.whole, cells=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class PaperClassSums:
    """Counts and sums (n_y, S_y / 2R) with the paper's constant 2 (equation A2).

    StraightDP, proposition B.9: the constant covers replacement, hence also add-or-remove.

    >>> sensitivity(PaperClassSums(classes=10, dim=32))
    2.0
    """

    classes: int
    dim: int

    kind: ClassVar[str] = "paper-class-sums"

    def __post_init__(self) -> None:
        checks.coerce(self, classes=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class PaperSecondMoment:
    """(1/N) sum zz^T / R^2 with the paper's constant 2/N, N the declared capacity (A3).

    >>> sensitivity(PaperSecondMoment(capacity=1000, dim=32))
    0.002
    """

    capacity: int
    dim: int

    kind: ClassVar[str] = "paper-second-moment"

    def __post_init__(self) -> None:
        checks.coerce(self, capacity=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class CrossMoments:
    """Second moments of the concatenated (code, caption feature), released together (X1).

    One record with code z, ||z|| <= R, and feature vector f, ||f|| <= Rf, adds `caption`
    ff^T/Rf^2, `cross` zf^T/(R Rf) and `second` zz^T/R^2; the symmetric ones are stored as in
    `ClassMoments`. A constant feature makes counts and sums part of them: StraightDP,
    equation 5 and proposition B.10 with one joint bound (docs/maths/cross.md). `features` and
    `dim` are the lengths of f and z.

    >>> sensitivity(CrossMoments(0.48, 0.64, 0.6, features=11, dim=32))
    1.0
    """

    caption: float
    cross: float
    second: float
    features: int
    dim: int

    kind: ClassVar[str] = "cross-moments"

    def __post_init__(self) -> None:
        checks.coerce(self, caption=checks.positive, cross=checks.positive, second=checks.positive)
        checks.coerce(self, features=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class PaperCrossMoments:
    """(1/N) (sum ze^T / (R Rtxt), sum ee^T / Rtxt^2) with the paper's constant (equation X3).

    StraightDP, proposition B.10: 2 sqrt(2) / N covers replacement, hence also add-or-remove; N is
    the declared capacity.

    >>> round(sensitivity(PaperCrossMoments(capacity=1000, features=10, dim=32)), 9)
    0.002828427
    """

    capacity: int
    features: int
    dim: int

    kind: ClassVar[str] = "paper-cross-moments"

    def __post_init__(self) -> None:
        checks.coerce(self, capacity=checks.whole, features=checks.whole, dim=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class ConfusionMatrix:
    """Answers of a fixed classifier by true and given class, and their number, together (V1).

    One record of class y that the classifier takes for c adds `cell` to the cell (y, c), and
    `total` to the number of all answers. Derivation: docs/maths/evaluation.md.

    >>> sensitivity(ConfusionMatrix(0.8, 0.6, classes=10))
    1.0
    """

    cell: float
    total: float
    classes: int

    kind: ClassVar[str] = "confusion-matrix"

    def __post_init__(self) -> None:
        checks.coerce(self, cell=checks.positive, total=checks.positive, classes=checks.whole)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class ClippedGradientSum:
    """The sum of one clipped gradient a record, each of L2 norm at most `clip` (A4).

    >>> sensitivity(ClippedGradientSum(clip=1.5))
    1.5
    """

    clip: float

    kind: ClassVar[str] = "clipped-gradient-sum"

    def __post_init__(self) -> None:
        checks.coerce(self, clip=checks.positive)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


@dataclass(frozen=True)
class BucketedGradientSums:
    """Sums of clipped gradients whose clip depends on the step's time bucket (A17).

    `clips`: C_1..C_K. The n steps of one execution take the buckets in turn from the first:
    step i (from 0) clips to C_k, k = i mod K. One absolute noise serves them all, so a bucket with
    a larger clip has less noise for its sensitivity, and spends more.

    >>> statistic = BucketedGradientSums(clips=(0.5, 1.5))
    >>> sensitivity(statistic), statistic.steps_by_clip(5)
    (1.5, {0.5: 3, 1.5: 2})
    """

    clips: tuple[float, ...]

    kind: ClassVar[str] = "bucketed-gradient-sums"

    def __post_init__(self) -> None:
        checks.coerce(self, clips=checks.positives)

    def clip_of(self, step: int) -> float:
        """Clip of step `step` of an execution, counted from 0."""
        return self.clips[step % len(self.clips)]

    def steps_by_clip(self, steps: int) -> dict[float, int]:
        """How many of an execution's first `steps` steps have each clip; those with none left out.

        Buckets of one clip are one entry. Costs K, whatever `steps` is.
        """
        found: dict[float, int] = {}
        full, rest = divmod(checks.whole("steps", steps), len(self.clips))
        for number, clip in enumerate(self.clips):
            if count := full + (number < rest):
                found[clip] = found.get(clip, 0) + count
        return found

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return {**_to_json(self), "clips": list(self.clips)}


Statistic = (
    ClassMoments
    | ClassMeans
    | CellSums
    | CellMoments
    | EmbeddingSums
    | PaperClassSums
    | PaperSecondMoment
    | CrossMoments
    | PaperCrossMoments
    | ConfusionMatrix
    | VoteHistogram
    | CentralSums
    | ClippedGradientSum
    | BucketedGradientSums
)

_KINDS: dict[str, type[Statistic]] = {
    cls.kind: cls
    for cls in (
        ClassMoments,
        ClassMeans,
        CellSums,
        CellMoments,
        EmbeddingSums,
        PaperClassSums,
        PaperSecondMoment,
        CrossMoments,
        PaperCrossMoments,
        ConfusionMatrix,
        VoteHistogram,
        CentralSums,
        ClippedGradientSum,
        BucketedGradientSums,
    )
}


def sensitivity(statistic: Statistic) -> float:
    """Largest L2 move of `statistic` when one record is added or removed, whitened units."""
    match statistic:
        case ClassMoments() | CellMoments():
            return math.hypot(statistic.count, statistic.sum, statistic.second)
        case ClassMeans() | CellSums() | EmbeddingSums():
            return math.hypot(statistic.count, statistic.sum)
        case CrossMoments():
            return math.hypot(statistic.caption, statistic.cross, statistic.second)
        case ConfusionMatrix():
            return math.hypot(statistic.cell, statistic.total)
        case VoteHistogram() | CentralSums():
            return 1.0
        case PaperClassSums():
            return 2.0
        case PaperSecondMoment():
            return 2.0 / statistic.capacity
        case PaperCrossMoments():
            # Rounded up: 2 sqrt(2) is no float.
            return math.nextafter(2.0 * math.sqrt(2.0), math.inf) / statistic.capacity
        case ClippedGradientSum():
            return statistic.clip
        case BucketedGradientSums():
            return max(statistic.clips)  # of one step; accounting composes each bucket's own
    raise checks.AccountingError(
        f"{type(statistic).__name__} is no statistic whose sensitivity is known here"
    )


def statistic_from_json(spec: object) -> Statistic:
    """The statistic that `to_json` wrote.

    Raises:
        ReplayError: an unknown `kind`, a missing or unknown key, or a value out of range.

    >>> statistic_from_json({"kind": "clipped-gradient-sum", "clip": 1.0})
    ClippedGradientSum(clip=1.0)
    """
    if not isinstance(spec, dict):
        raise ReplayError(f"a statistic is {type(spec).__name__}; expected a JSON object")
    kind = spec.get("kind")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ReplayError(f"statistic kind {kind!r} is unknown; expected one of {sorted(_KINDS)}")
    fields = {key: value for key, value in spec.items() if key != "kind"}
    expected = {field.name for field in dataclasses.fields(cls)}
    if fields.keys() != expected:
        raise ReplayError(
            f"statistic {kind} has keys {sorted(map(str, fields))}; expected {sorted(expected)}"
        )
    try:
        return cls(**fields)
    except checks.AccountingError as error:
        raise ReplayError(f"statistic {kind}: {error.message}") from error


def _to_json(statistic: Statistic) -> dict[str, Any]:
    return {"kind": statistic.kind, **dataclasses.asdict(statistic)}
