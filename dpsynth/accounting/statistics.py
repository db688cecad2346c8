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
        _coerce(self, count=checks.positive, sum=checks.positive, second=checks.positive)
        _coerce(self, classes=checks.whole, dim=checks.whole)
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
        _coerce(self, count=checks.positive, sum=checks.positive)
        _coerce(self, classes=checks.whole, cells=checks.whole, dim=checks.whole)

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
        _coerce(self, count=checks.positive, sum=checks.positive, second=checks.positive)
        _coerce(self, classes=checks.whole, cells=checks.whole, dim=checks.whole)

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
        _coerce(self, classes=checks.whole, dim=checks.whole)

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
        _coerce(self, capacity=checks.whole, dim=checks.whole)

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
        _coerce(self, clip=checks.positive)

    def to_json(self) -> dict[str, Any]:
        """The fields and `kind`, as JSON values."""
        return _to_json(self)


Statistic = (
    ClassMoments | CellSums | CellMoments | PaperClassSums | PaperSecondMoment | ClippedGradientSum
)

_KINDS: dict[str, type[Statistic]] = {
    cls.kind: cls
    for cls in (
        ClassMoments,
        CellSums,
        CellMoments,
        PaperClassSums,
        PaperSecondMoment,
        ClippedGradientSum,
    )
}


def sensitivity(statistic: Statistic) -> float:
    """Largest L2 move of `statistic` when one record is added or removed, whitened units."""
    match statistic:
        case ClassMoments() | CellMoments():
            return math.hypot(statistic.count, statistic.sum, statistic.second)
        case CellSums():
            return math.hypot(statistic.count, statistic.sum)
        case PaperClassSums():
            return 2.0
        case PaperSecondMoment():
            return 2.0 / statistic.capacity
        case ClippedGradientSum():
            return statistic.clip
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


def _coerce(statistic: Any, **rules: Any) -> None:
    """Put each field through its check; frozen values are set once, here."""
    for name, rule in rules.items():
        object.__setattr__(statistic, name, rule(name, getattr(statistic, name)))


def _to_json(statistic: Statistic) -> dict[str, Any]:
    return {"kind": statistic.kind, **dataclasses.asdict(statistic)}
