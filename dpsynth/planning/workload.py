"""From a plan to the mechanism executions it may make: numbered slots with their statistics.

What noise depends on is decided here, from declared values alone.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from dpsynth.accounting import discrete
from dpsynth.accounting.queries import CentralSums, ClassMeans, EmbeddingSums, VoteHistogram
from dpsynth.accounting.statistics import (
    BucketedGradientSums,
    CellMoments,
    CellSums,
    ClassMoments,
    ClippedGradientSum,
    ConfusionMatrix,
    CrossMoments,
    PaperClassSums,
    PaperCrossMoments,
    PaperSecondMoment,
    Statistic,
    sensitivity,
)
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.errors import PlanError
from dpsynth.planning.allocation import held_clips
from dpsynth.planning.captions import CaptionRelease, Template
from dpsynth.planning.groups import mean_groups
from dpsynth.planning.method_slots import Draft, method_draws, method_slots
from dpsynth.planning.release import Blocks, Cells, EvaluationRelease, Moments
from dpsynth.planning.rounds import FIRST, LAST, Rounds, rounds_of
from dpsynth.planning.schema import Plan
from dpsynth.planning.training import Train

GRID_SCALE = 2.0**30
CROSS = "cross-moments"
"""Name of a caption release, and the start of each name where it is several."""
CONFUSION = "confusion"
"""Name of the evaluation stage's one release."""
MAX_SLOTS = 100_000


def active_weights(plan: Plan) -> dict[str, float]:
    """Weights of the active stages, normalised to sum to one.

    The paper's 0.2 and 0.65 become 0.235 and 0.765 (StraightDP, Table 9).
    """
    declared = {name: getattr(plan.stages, name) for name in type(plan.stages).model_fields}
    given = {name: stage.weight for name, stage in declared.items() if stage is not None}
    largest = max(given.values())  # first, so that huge weights do not overflow
    total = sum(weight / largest for weight in given.values())
    return {name: weight / largest / total for name, weight in given.items()}


def block_weights(blocks: Blocks) -> tuple[float, float, float]:
    """(a, b, c) with a^2 + b^2 + c^2 = 1 from the declared shares of the squares."""
    a, b, c = _roots(blocks.count, blocks.sum, blocks.second)
    return a, b, c


def _roots(*shares: float) -> list[float]:
    """Square roots of the shares, their squares normalised to sum to one."""
    largest = max(shares)
    total = sum(share / largest for share in shares)
    return [math.sqrt(share / largest / total) for share in shares]


def released_dim(plan: Plan) -> int:
    """Numbers of a released code: `stages.moments.projection`, or the whole code."""
    moments = plan.stages.moments
    return (moments.projection if moments else None) or plan.representation.code


def has_constant(plan: Plan) -> bool:
    """Whether caption features begin with the constant one, which releases the intercept.

    The paper's own release has none: its intercept is the global mean, released beside.
    """
    moments = plan.stages.moments
    if moments is None or moments.captions is None:
        return False
    return moments.captions.intercept and moments.sensitivity == "tight"


def feature_dim(plan: Plan) -> int:
    """Length m' of a caption's feature vector, with its constant where there is one; 0 without.

    One-hot: the conditions. Slots: an indicator for each value of each slot. Sentence: `width`.
    """
    moments = plan.stages.moments
    release, captions = (moments.captions if moments else None), plan.private.captions
    if release is None:
        return 0
    if release.features == "sentence":
        found = release.width
    elif release.features == "slots" and isinstance(captions, Template):
        found = sum(len(values) for values in captions.values(plan.private.classes))
    else:
        found = plan.private.conditions
    return found + has_constant(plan)


def moment_statistics(
    plan: Plan, moments: Moments, multiplier: float | None = None
) -> list[tuple[str, Statistic, float]]:
    """Name, statistic and share of each release of the moments stage (section 3.1), in order.

    The share is that of 1/sigma^2: sigma is the stage's noise multiplier over its root. Rounds
    share one Gaussian (A16); each of the paper's two mechanisms has the multiplier whole.
    `multiplier`: the stage's, on which the groups of means may rest; None: the most groups.
    """
    if moments.captions is not None:
        return list(_caption_statistics(plan, moments, moments.captions))
    classes, dim = plan.private.conditions, released_dim(plan)
    if moments.sensitivity == "paper":
        return [
            ("moments-sums", PaperClassSums(classes=classes, dim=dim), 1.0),
            ("moments-second", PaperSecondMoment(capacity=plan.private.capacity, dim=dim), 1.0),
        ]
    if moments.covariance == "public":
        return [(FIRST, _means_statistic(plan, moments, multiplier), 1.0)]
    a, b, c = block_weights(moments.blocks)
    statistic = ClassMoments(
        count=a, sum=b, second=c, covariance=moments.covariance, classes=classes, dim=dim
    )
    rounds = rounds_of(plan)
    if moments.cells is None or rounds is None:
        return [(FIRST, statistic, 1.0)]
    found = _cell_statistics(moments.cells, rounds, classes, dim)
    return [(name, found.get(name, statistic), share) for name, share in rounds.releases]


def _means_statistic(plan: Plan, moments: Moments, multiplier: float | None) -> ClassMeans:
    """Counts and sums alone (docs/maths/moments.md, M6)."""
    a, b = _roots(moments.blocks.count, moments.blocks.sum)
    dim = released_dim(plan)
    groups = mean_groups(
        moments,
        classes=plan.private.conditions,
        capacity=plan.private.capacity,
        dim=dim,
        weight=b,
        multiplier=multiplier,
    )
    return ClassMeans(count=a, sum=b, classes=groups, dim=dim)


def _caption_statistics(
    plan: Plan, moments: Moments, release: CaptionRelease
) -> Iterator[tuple[str, Statistic, float]]:
    """The cross moments (docs/maths/cross.md, X1), or the paper's three mechanisms (X3)."""
    features, dim, capacity = feature_dim(plan), released_dim(plan), plan.private.capacity
    if moments.sensitivity == "paper":
        yield f"{CROSS}-sums", PaperClassSums(classes=1, dim=dim), 1.0
        yield f"{CROSS}-second", PaperSecondMoment(capacity=capacity, dim=dim), 1.0
        yield f"{CROSS}-captions", PaperCrossMoments(capacity, features, dim), 1.0
        return
    blocks = release.blocks
    a, b, c = _roots(blocks.caption, blocks.cross, blocks.second)
    yield CROSS, CrossMoments(caption=a, cross=b, second=c, features=features, dim=dim), 1.0


def _cell_statistics(cells: Cells, rounds: Rounds, classes: int, dim: int) -> dict[str, Statistic]:
    """Statistics of the cell rounds, by name: counts and sums, in the last one all three."""
    a, b, c = block_weights(cells.blocks)
    last = CellMoments(count=a, sum=b, second=c, classes=classes, cells=rounds.most, dim=dim)
    a, b = _roots(cells.blocks.count, cells.blocks.sum)
    lloyd = CellSums(count=a, sum=b, classes=classes, cells=rounds.most, dim=dim)
    return {**dict.fromkeys(rounds.lloyd_names, lloyd), LAST: last}


def slots(
    plan: Plan, multipliers: Mapping[str, float], clips: tuple[float, ...] | None = None
) -> tuple[Slot, ...]:
    """All slots in planned order, each with the noise of its stage's multiplier.

    `clips`: of the time buckets, for plans with an allocation; the uniform one where None.
    """
    made = [
        *_moment_slots(plan, multipliers),
        *method_slots(plan, multipliers),
        *_train_slots(plan, multipliers, clips),
        *_evaluation_slots(plan, multipliers),
    ]
    return tuple(
        Slot(id=number, stage=stage, name=name, statistic=statistic,
             noise_std=noise_std(statistic, multipliers[stage], share),
             rate=rate, steps=steps, spare=spare)
        for number, (stage, name, statistic, share, rate, steps, spare) in enumerate(made, start=1)
    )  # fmt: skip


def _moment_slots(plan: Plan, multipliers: Mapping[str, float]) -> Iterator[Draft]:
    moments = plan.stages.moments
    if moments is None or "moments" not in multipliers:
        return
    releases = moment_statistics(plan, moments, multipliers["moments"])
    for name, statistic, share in releases:
        yield "moments", name, statistic, share, None, None, False
    for number in range(1, moments.spares + 1):
        for name, statistic, share in releases:
            yield "moments", f"{name}-spare-{number}", statistic, share, None, None, True


def _train_slots(
    plan: Plan, multipliers: Mapping[str, float], clips: tuple[float, ...] | None
) -> Iterator[Draft]:
    train = plan.stages.train
    if train is None or "train" not in multipliers:
        return
    statistic: Statistic = ClippedGradientSum(clip=train.clip)
    if train.allocation is not None:
        statistic = BucketedGradientSums(clips=clips or (train.clip,) * train.buckets)
    for number, steps in enumerate(chunks(train), start=1):
        yield "train", f"train-{number:04d}", statistic, 1.0, train.rate, steps, False


def matrix_statistic(plan: Plan, evaluation: EvaluationRelease) -> ConfusionMatrix:
    """What the evaluation stage releases: its weights by the declared shares (V1)."""
    a, b = _roots(evaluation.blocks.cell, evaluation.blocks.total)
    return ConfusionMatrix(cell=a, total=b, classes=len(plan.private.classes))


def _evaluation_slots(plan: Plan, multipliers: Mapping[str, float]) -> Iterator[Draft]:
    """The confusion matrix and its spares: the last slots of all, for it needs the samples."""
    evaluation = plan.stages.evaluation
    if evaluation is None or "evaluation" not in multipliers:
        return
    statistic = matrix_statistic(plan, evaluation)
    yield "evaluation", CONFUSION, statistic, 1.0, None, None, False
    for number in range(1, evaluation.spares + 1):
        yield "evaluation", f"{CONFUSION}-spare-{number}", statistic, 1.0, None, None, True


def chunks(train: Train) -> list[int]:
    """Steps of each charged chunk; the last may be shorter.

    >>> chunks(Train(rate=0.02, steps=250, chunk=100))
    [100, 100, 50]
    """
    full, rest = divmod(train.steps, train.chunk)
    if full > MAX_SLOTS:
        raise PlanError(
            f"stages.train: {train.steps} steps in chunks of {train.chunk} make more than "
            f"{MAX_SLOTS} slots",
            hint="raise stages.train.chunk",
        )
    return [train.chunk] * full + ([rest] if rest else [])


def noise_std(statistic: Statistic, multiplier: float, share: float = 1.0) -> float:
    """Absolute noise of at least `multiplier` / sqrt(`share`) times the sensitivity.

    Rounded up, never down, so that releases whose shares sum to one tell no more than one
    Gaussian of `multiplier` does (A16).
    """
    wanted = _at_least(multiplier, share)
    bound = sensitivity(statistic)
    std = wanted * bound
    while std / bound < wanted:
        std = math.nextafter(std, math.inf)
    return std


def _at_least(multiplier: float, share: float) -> float:
    """The noise multiplier of a release that has `share` of 1/sigma^2, rounded up exactly.

    Raises PlanError for a multiplier that is no finite number above 0, or leaves none.
    """
    wanted = multiplier / math.sqrt(share) if _is_noise(multiplier) else math.nan
    if not _is_noise(wanted):
        raise PlanError(f"a noise multiplier must be finite and above 0, got {multiplier!r}")
    least = Fraction(multiplier) ** 2
    while Fraction(wanted) ** 2 * Fraction(share) < least:
        wanted = math.nextafter(wanted, math.inf)
    return wanted


def _is_noise(value: Any) -> bool:
    """Whether this is a finite number above 0; a lock may hold anything."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max


def follows(lock: Lock, plan: Plan) -> bool:
    """Whether a lock is that of `plan`: nothing in it is trusted but each stage's noise.

    And, in plans with an allocation, the clip of each time bucket: like noise, both are public
    choices, and what they cost follows from the slots.
    """
    train = plan.stages.train
    allocated = train is not None and train.allocation is not None
    clips = held_clips(lock.allocation, train) if train is not None else None
    if (lock.allocation is not None) != allocated or (clips is not None) != allocated:
        return False
    noise = {stage: row["noise_multiplier"] for stage, row in lock.by_stage.items()}
    weights = active_weights(plan)
    return (
        lock.facts == plan.facts()
        and lock.budget == plan.budget.model_dump()
        and lock.delta_slack >= delta_slack(plan)
        and set(noise) == set(weights)
        and all(lock.by_stage[stage].get("share", own) == own for stage, own in weights.items())
        and all(map(_is_noise, noise.values()))
        and lock.slots == slots(plan, noise, clips)
    )


def delta_slack(plan: Plan) -> float:
    """Share of delta that pays for the discrete noise of every released slot, spares included.

    The releases draw on integer grids of scale 2^30 or finer (accounting, equation A8).
    """
    moments, evaluation = plan.stages.moments, plan.stages.evaluation
    statistics: list[Statistic] = []
    if moments is not None:
        found = [statistic for _, statistic, _ in moment_statistics(plan, moments)]
        statistics += found * (1 + moments.spares)
    if evaluation is not None:
        statistics += [matrix_statistic(plan, evaluation)] * (1 + evaluation.spares)
    drawn = [*((statistic, None) for statistic in statistics), *method_draws(plan)]
    return slack_of(drawn, plan.budget.epsilon)


def slack_of(drawn: Iterable[tuple[Statistic, int | None]], epsilon: float) -> float:
    """Share of delta that pays for the discrete noise of these releases.

    `drawn`: the statistic of each release and its steps, each of which draws noise of its own;
    None for a release without steps.
    """
    numbers = sum(coordinates(statistic) * (steps or 1) for statistic, steps in drawn)
    return discrete.delta_slack(numbers, GRID_SCALE, epsilon) if numbers else 0.0


def coordinates(statistic: Statistic) -> int:
    """How many numbers a released statistic has; symmetric matrices count their upper triangle.

    >>> coordinates(PaperClassSums(classes=10, dim=32))
    330
    """
    match statistic:
        case ClassMoments(classes=classes, dim=dim, covariance=covariance):
            matrices = classes if covariance == "class" else 1
            return classes * (1 + dim) + matrices * _triangle(dim)
        case CellSums(classes=classes, cells=cells, dim=dim):
            return classes * cells * (1 + dim)
        case CellMoments(classes=classes, cells=cells, dim=dim):
            return classes * cells * (1 + dim + _triangle(dim))
        case PaperClassSums(classes=classes, dim=dim):
            return classes * (1 + dim)
        case PaperSecondMoment(dim=dim):
            return _triangle(dim)
        case CrossMoments(features=features, dim=dim):
            return _triangle(features) + dim * features + _triangle(dim)
        case PaperCrossMoments(features=features, dim=dim):
            return _triangle(features) + dim * features
        case ConfusionMatrix(classes=classes):
            return classes * classes + 1
        case ClassMeans(classes=classes, dim=dim) | EmbeddingSums(classes=classes, dim=dim):
            return classes * (1 + dim)
        case VoteHistogram(bins=bins):
            return bins
        case CentralSums(classes=classes, dim=dim):
            return classes * dim  # of one step
        case ClippedGradientSum() | BucketedGradientSums():
            return 0  # its noise is continuous


def _triangle(size: int) -> int:
    """Numbers in the upper triangle of a symmetric matrix."""
    return size * (size + 1) // 2
