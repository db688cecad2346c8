"""The moment release: class moments (StraightDP, section 3.1), then the plan's cell rounds.

A caption release (equation 5) is one round in place of them; so are means alone (section 4.4).
Each round sees the records and what earlier rounds released. Sensitivities in
docs/maths/moments.md, docs/maths/cells.md and docs/maths/cross.md, of units of several images in
docs/maths/units.md; a slot's statistic carries its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.queries import ClassMeans
from dpsynth.accounting.statistics import CellMoments, CellSums, ClassMoments
from dpsynth.artifacts.cells import ReleasedCells, load_cells, save_cells
from dpsynth.artifacts.cross import ReleasedCross, load_cross, save_cross
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.moments import ReleasedMoments, load_moments, save_moments
from dpsynth.artifacts.spending import calibration_hash, spending
from dpsynth.console import progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError
from dpsynth.planning.release import Moments
from dpsynth.planning.rounds import rounds_of
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan, require_allocated
from dpsynth.private.blocks import Blocks, blocks_of
from dpsynth.private.captioned import Captioned, load_captioned
from dpsynth.private.cells import Frame, frame_of, release_cells, shard_sums
from dpsynth.private.cross import add_cross_noise, cross_sums
from dpsynth.private.encoding import UnitCodes, private_stream
from dpsynth.private.lattice import ExactSums
from dpsynth.private.noise import NoiseSource
from dpsynth.private.session import Round, Session, rounds_in
from dpsynth.private.shares import NOWHERE, unit_sums
from dpsynth.private.together import give_sums, require_same_codes, total_sums
from dpsynth.public.projection import load_release_space
from dpsynth.public.within import load_spread
from dpsynth.released import centres as public_centres
from dpsynth.released.estimate import estimate
from dpsynth.vault.checked import require_checked


def release_moments(verified: VerifiedPlan, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Spend the plan's moments stage once: `released/moments.safetensors`, and cells if planned.

    With captions it is `released/cross-moments.safetensors` alone.

    A stage that a crash ended between two rounds goes on with the next one. Every process of
    `ranks` calls this; the main one spends and writes, the others give their sums and return {}.

    Returns:
        What was released, in declared and released values alone.

    Raises:
        PlanError: the plan has no moments stage, or must be planned again after `pretrain`.
        BudgetError: already released, or every slot of a round is spent.
        MissingError: `dpsynth pretrain` has not run, or a file of its own or of an earlier round
            is gone.
        ReplayError: an earlier round's file is not the one that was settled.
        UsageError, DataError: the records were not checked, or do not fit the plan; a public file
            is not the one that the calibration names.
    """
    run, lock, settings = verified.run, verified.lock, verified.plan.stages.moments
    if settings is None:
        raise PlanError("this plan has no moments stage", hint="declare stages.moments and re-plan")
    if not ranks.is_main:
        _follow(verified, ranks)
        return {}
    require_checked(verified)
    require_allocated(verified)
    representation = load_release_space(run, verified.plan).representation
    require_same_codes(representation, ranks)
    captioned = load_captioned(run, verified.plan, representation, ranks)
    # The estimate will need it: refused here, before the budget is spent, and not after.
    load_spread(run, verified.plan)
    alone = lock.last_stage == "moments"
    with spending(
        run, lock, calibration_hash=calibration_hash(run), noise_source=verified.noise_source
    ) as spender:
        session = Session(verified, representation, spender, ranks)
        left = session.unsettled
        if alone and not left:
            spender.close()  # a run that settled but died before its last line
        session.require_possible()
        total = len(session.rounds)
        with progress("releasing moments", total, completed=total - len(left)) as bar:
            session.bar = bar
            released = _rounds(session, verified.plan, settings, captioned)
        ranks.tell({})
        if alone:
            spender.close()
    return _summary(released, session)


Released = ReleasedMoments | ReleasedCells | ReleasedCross


def _rounds(
    session: Session, plan: Plan, settings: Moments, captioned: Captioned | None
) -> dict[Round, Released]:
    """Every round in order, and what it released, now or in an earlier session."""
    first = session.rounds[0]
    if captioned is not None:
        return {first: _caption_round(session, captioned)}
    moments = _class_round(session, plan, settings)
    return {first: moments, **dict(_cell_rounds(session, plan, settings, moments))}


def _follow(verified: VerifiedPlan, ranks: Ranks) -> None:
    """Give the shard's sums for every round that the main process tells of, once it is charged."""
    representation = load_release_space(verified.run, verified.plan).representation
    require_same_codes(representation, ranks)
    captioned = load_captioned(verified.run, verified.plan, representation, ranks)
    stream = private_stream(verified, representation, ranks, passes=len(rounds_in(verified.lock)))
    while told := ranks.tell(None):
        slots = tuple(verified.lock.slots[number - 1] for number in told["charged"])
        if isinstance(slots[0].statistic, CellSums | CellMoments):
            frame = Frame.from_bytes(ranks.tell_bytes(None))
            exact = shard_sums(stream, frame, slots[0])
        elif captioned is not None:
            exact = cross_sums(stream, captioned.features_of, captioned.space, slots)
        else:
            exact = class_sums(stream, slots, verified.plan.private.conditions)
        give_sums(exact, ranks)


def _caption_round(session: Session, captioned: Captioned) -> ReleasedCross:
    """The one round of a caption release: outer products of codes and caption features."""

    def mechanism(
        slots: tuple[Slot, ...], data: Iterator[UnitCodes], noise: NoiseSource
    ) -> ReleasedCross:
        exact = cross_sums(data, captioned.features_of, captioned.space, slots)
        return add_cross_noise(total_sums(exact, session.ranks), slots, captioned.space, noise)

    made = session.rounds[0]
    known = session.settled(made, load_cross)
    return session.spend(made, mechanism, save_cross) if known is None else known


def _class_round(session: Session, plan: Plan, settings: Moments) -> ReleasedMoments:
    """The first round: counts, sums and second moments by class, of codes in the ball R."""
    radius = session.radius

    def mechanism(
        slots: tuple[Slot, ...], data: Iterator[UnitCodes], noise: NoiseSource
    ) -> ReleasedMoments:
        exact = total_sums(class_sums(data, slots, plan.private.conditions), session.ranks)
        return add_noise(exact, blocks_of(slots, radius), settings.covariance, radius, noise)

    made = session.rounds[0]
    known = session.settled(made, load_moments)
    if known is not None:
        return known
    return session.spend(made, mechanism, save_moments)


def class_sums(chunks: Iterable[UnitCodes], slots: tuple[Slot, ...], classes: int) -> ExactSums:
    """Exact sums of the class round: of records, or of units by their shares. Never released.

    One pass over one chunk or more, each of whole units. Where the release has one second moment
    for all classes, there is one here: seconds (1, d, d). Of means alone there is none, and one
    group for all `classes` where the lock's statistic says so.

    Raises PlanError where the slots' statistic does not hold for units of several images, or is of
    another number of classes.
    """
    first, last = slots[0].statistic, slots[-1].statistic
    pooled = not (isinstance(last, ClassMoments) and last.covariance == "class")
    means = isinstance(first, ClassMeans)
    groups = first.classes if isinstance(first, ClassMeans) else classes
    return unit_sums(
        chunks,
        groups,
        lambda chunk: (chunk.codes, groups_of(chunk.labels, groups, classes)),
        first,
        second=not means,
        pooled=pooled and not means,
    )


def groups_of(labels: NDArray[np.int64], groups: int, classes: int) -> NDArray[np.int64]:
    """The group (n,) that each record's counts and sums go to: its class, or 0 for all of them.

    A label that is no class has no group, also where there is one for all.
    Raises PlanError where the groups are neither the classes nor one.
    """
    if groups == classes:
        return labels
    if groups != 1:
        raise PlanError(f"the lock releases means of {groups} groups, and there are {classes}")
    return np.where((labels >= 0) & (labels < classes), 0, NOWHERE)


def _cell_rounds(
    session: Session, plan: Plan, settings: Moments, moments: ReleasedMoments
) -> Iterator[tuple[Round, ReleasedCells]]:
    """Each cell round in turn. Its frame is made before its charge, of what is released by then."""
    before: ReleasedCells | None = None
    for made in session.rounds[1:]:
        cells = session.settled(made, load_cells)
        if cells is None:
            frame = next_frame(plan, settings, moments, before)
            mechanism = partial(_cell_round, frame, session.ranks)
            cells = session.spend(made, mechanism, save_cells)
        yield made, cells
        before = cells


def _cell_round(
    frame: Frame,
    ranks: Ranks,
    slots: tuple[Slot, ...],
    data: Iterator[UnitCodes],
    noise: NoiseSource,
) -> ReleasedCells:
    if ranks.world > 1:
        ranks.tell_bytes(frame.to_bytes())  # the same bits for all: their machines may round apart
    return release_cells(data, frame, slots[0], noise, ranks)


def next_frame(
    plan: Plan, settings: Moments, moments: ReleasedMoments, before: ReleasedCells | None
) -> Frame:
    """The cells of the next round, from released values: k-means of draws, or moved centres.

    A Lloyd cell moves only where its noisy count is above its noise and `least_count`.
    Raises PlanError for a plan without cells.
    """
    rounds = rounds_of(plan)
    if rounds is None:
        raise PlanError("this plan declares no cells", hint="declare stages.moments.cells")
    gaussians, radius, seed = estimate(moments, settings), moments.radius, plan.public_seed
    if before is None:
        cells = public_centres.cells_by_class(
            moments.counts, moments.count_std, most=rounds.most, capacity=plan.private.capacity
        )
        centres, used = public_centres.first_centres(
            gaussians, cells, radius, seed, most=rounds.most
        )
    else:
        least = max(settings.least_count, before.count_std)
        centres, used = public_centres.moved_centres(before, least), before.used
    rho = public_centres.residual_radius(gaussians, centres, used, radius, seed + 1)
    return frame_of(centres, used, radius=rho, clip=radius)


def add_noise(
    exact: ExactSums, blocks: Blocks, covariance: str, radius: float, noise: NoiseSource
) -> ReleasedMoments:
    """The class round's mechanism: discrete Gaussian noise on exact sums, fresh for every entry."""
    blocks = blocks.finer(exact.bits)
    seconds = exact.seconds if covariance == "class" else exact.seconds.sum(axis=0, keepdims=True)
    noisy = blocks.release(replace(exact, seconds=seconds), noise)
    none = covariance == "public"
    if (noisy.seconds is None) is not none:
        raise PlanError("the lock's first round does not release the plan's second moments")
    dim = noisy.sums.shape[1]
    return ReleasedMoments(
        counts=noisy.counts,
        sums=noisy.sums,
        seconds=np.zeros((0, dim, dim)) if noisy.seconds is None else noisy.seconds,
        count_std=blocks.counts.real_std,
        sum_std=blocks.sums.real_std,
        second_std=blocks.second_std,
        radius=radius,
        covariance=covariance,
    )


def _summary(released: dict[Round, Released], session: Session) -> dict[str, Any]:
    """Declared and released values; `slots` are those charged now, `rounds` all that there are."""
    first, found = session.rounds[0], released[session.rounds[0]]
    of_first = _noise(found)
    if isinstance(found, ReleasedMoments):
        # Of the class moments beside their noise; the radius stands with the rounds alone.
        sizes = {"classes": found.classes, "dim": found.dim, "covariance": found.covariance}
        of_first = {**sizes, **{key: of_first[key] for key in of_first if key != "radius"}}
    return {
        "released": first.file,
        "slots": session.charged,
        **of_first,
        "rounds": {
            made.name: {"released": made.file, **_noise(one)} for made, one in released.items()
        },
    }


def _noise(released: Released) -> dict[str, Any]:
    names: tuple[str, ...] = ("count_std", "sum_std", "second_std", "radius")
    if isinstance(released, ReleasedCross):
        names = ("dim", "features", "ff_std", "zf_std", "zz_std", "radius", "feature_radius")
    return {name: getattr(released, name) for name in names}
