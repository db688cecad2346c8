"""The moment release: class moments (StraightDP, section 3.1), then the plan's cell rounds.

Each round sees the records and what earlier rounds released. Sensitivities in
docs/maths/moments.md and docs/maths/cells.md, of units of several images in docs/maths/units.md;
a slot's statistic carries its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from dpsynth.accounting.statistics import CellMoments, CellSums, ClassMoments
from dpsynth.artifacts.cells import ReleasedCells, load_cells, save_cells
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.moments import NAME, ReleasedMoments, load_moments, save_moments
from dpsynth.artifacts.spending import calibration_hash, spending
from dpsynth.console import progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError
from dpsynth.planning.release import Moments
from dpsynth.planning.rounds import rounds_of
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.blocks import Blocks, blocks_of
from dpsynth.private.cells import Frame, frame_of, release_cells, shard_sums
from dpsynth.private.encoding import UnitCodes, private_stream
from dpsynth.private.lattice import ExactSums
from dpsynth.private.noise import NoiseSource
from dpsynth.private.session import Round, Session, rounds_in
from dpsynth.private.shares import unit_sums
from dpsynth.private.together import give_sums, require_same_codes, total_sums
from dpsynth.public.representation import load_representation
from dpsynth.public.within import load_within
from dpsynth.released import centres as public_centres
from dpsynth.released.estimate import estimate
from dpsynth.vault.checked import require_checked


def release_moments(verified: VerifiedPlan, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Spend the plan's moments stage once: `released/moments.safetensors`, and cells if planned.

    A stage that a crash ended between two rounds goes on with the next one. Every process of
    `ranks` calls this; the main one spends and writes, the others give their sums and return {}.

    Returns:
        What was released, in declared and released values alone.

    Raises:
        PlanError: the plan has no moments stage.
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
    representation = load_representation(run, verified.plan)
    require_same_codes(representation, ranks)
    # The estimate will need it: refused here, before the budget is spent, and not after.
    load_within(run, verified.plan)
    alone = verified.plan.stages.train is None
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
            moments = _class_round(session, verified.plan, settings, representation.radius)
            cells = dict(_cell_rounds(session, verified.plan, settings, moments))
        ranks.tell({})
        if alone:
            spender.close()
    return _summary(moments, cells, session)


def _follow(verified: VerifiedPlan, ranks: Ranks) -> None:
    """Give the shard's sums for every round that the main process tells of, once it is charged."""
    representation = load_representation(verified.run, verified.plan)
    require_same_codes(representation, ranks)
    stream = private_stream(verified, representation, ranks, passes=len(rounds_in(verified.lock)))
    while told := ranks.tell(None):
        slots = tuple(verified.lock.slots[number - 1] for number in told["charged"])
        if isinstance(slots[0].statistic, CellSums | CellMoments):
            frame = Frame.from_bytes(ranks.tell_bytes(None))
            exact = shard_sums(stream, frame, slots[0])
        else:
            exact = class_sums(stream, slots, len(verified.plan.private.classes))
        give_sums(exact, ranks)


def _class_round(session: Session, plan: Plan, settings: Moments, radius: float) -> ReleasedMoments:
    """The first round: counts, sums and second moments by class, of codes in the ball R."""

    def mechanism(
        slots: tuple[Slot, ...], data: Iterator[UnitCodes], noise: NoiseSource
    ) -> ReleasedMoments:
        exact = total_sums(class_sums(data, slots, len(plan.private.classes)), session.ranks)
        return add_noise(exact, blocks_of(slots, radius), settings.covariance, radius, noise)

    made = session.rounds[0]
    known = session.settled(made, load_moments)
    if known is not None:
        return known
    return session.spend(made, mechanism, save_moments)


def class_sums(chunks: Iterable[UnitCodes], slots: tuple[Slot, ...], classes: int) -> ExactSums:
    """Exact sums of the class round: of records, or of units by their shares. Never released.

    One pass over one chunk or more, each of whole units. Where the release has one second moment
    for all classes, there is one here: seconds (1, d, d).

    Raises PlanError where the slots' statistic does not hold for units of several images.
    """
    last = slots[-1].statistic
    pooled = not (isinstance(last, ClassMoments) and last.covariance == "class")
    return unit_sums(
        chunks,
        classes,
        lambda chunk: (chunk.codes, chunk.labels),
        slots[0].statistic,
        pooled=pooled,
    )


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
    if noisy.seconds is None:
        raise PlanError("the lock's first round releases no second moment")
    return ReleasedMoments(
        counts=noisy.counts,
        sums=noisy.sums,
        seconds=noisy.seconds,
        count_std=blocks.counts.real_std,
        sum_std=blocks.sums.real_std,
        second_std=blocks.second_std,
        radius=radius,
        covariance=covariance,
    )


def _summary(
    moments: ReleasedMoments, cells: dict[Round, ReleasedCells], session: Session
) -> dict[str, Any]:
    """Declared and released values; `slots` are those charged now, `rounds` all that there are."""
    first = session.rounds[0]
    rounds = {first.name: {"released": first.file, **_noise(moments)}}
    rounds |= {made.name: {"released": made.file, **_noise(found)} for made, found in cells.items()}
    return {
        "released": NAME,
        "slots": session.charged,
        "classes": moments.classes,
        "dim": moments.dim,
        "covariance": moments.covariance,
        **{key: value for key, value in _noise(moments).items() if key != "radius"},
        "rounds": rounds,
    }


def _noise(released: ReleasedMoments | ReleasedCells) -> dict[str, Any]:
    names = ("count_std", "sum_std", "second_std", "radius")
    return {name: getattr(released, name) for name in names}
