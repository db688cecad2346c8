"""The moment release of a world, by the real rounds, and what an adversary sees in each block.

He knows the exact sums of all records, and what each canary would add to them: all but the bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.cells import ReleasedCells
from dpsynth.artifacts.cross import ReleasedCross
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.moments import ReleasedMoments
from dpsynth.assess.audit.cross_rounds import cross_statistics
from dpsynth.assess.audit.worlds import Array, Mask, Statistic
from dpsynth.errors import PlanError
from dpsynth.planning.schema import Plan
from dpsynth.private.blocks import Blocks, blocks_of
from dpsynth.private.captioned import Captioned
from dpsynth.private.cells import Frame, assign, release_cells, residuals, shard_sums
from dpsynth.private.cross import add_cross_noise, cross_sums
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, Block, ExactSums
from dpsynth.private.moments import add_noise, class_sums, next_frame
from dpsynth.private.noise import NoiseSource
from dpsynth.private.session import Round, rounds_in

Chunks = Callable[[], Iterator[UnitCodes]]
"""One pass over the records' codes; called anew for every pass."""
Source = Callable[[str], NoiseSource]
"""The noise source of a round, by its slots' numbers."""
Charge = Callable[[Slot], None]
"""Puts a slot's charge on disk, before the records are read."""


@dataclass(frozen=True)
class Population:
    """Who is in a world: the records, and the canaries that its coins include.

    records: the training records' codes in the release space. canaries: all of them (m units, as
    the mechanism takes them); included (m,); several: whether units have several images.
    """

    records: Chunks
    canaries: UnitCodes
    included: Mask
    several: bool = False

    def everyone(self) -> Iterator[UnitCodes]:
        """The records, and after them the included canaries."""
        yield from self.records()
        units = self.canaries
        ones = np.ones(int(self.included.sum()), np.int64) if self.several else None
        yield UnitCodes(units.codes[self.included], units.labels[self.included], ones)


@dataclass(frozen=True)
class ReleasedRounds:
    """What the rounds released: class moments and, of a plan with cells, the last round.

    Of a plan that releases by captions cross moments alone.
    """

    moments: ReleasedMoments | ReleasedCross
    cells: ReleasedCells | None
    statistics: tuple[Statistic, ...]


def release_rounds(
    plan: Plan,
    lock: Lock,
    radius: float,
    who: Population,
    *,
    source: Source,
    charge: Charge,
    captioned: Captioned | None = None,
) -> ReleasedRounds:
    """Carry out the plan's moments stage among `who`, with the lock's noise.

    Args:
        plan: as the world has it.
        lock: of that plan.
        radius: R, the clip radius in the release space.
        who: records and canaries.
        source: see `Source`; the system's in a world without a fault.
        charge: called with every slot before its round reads the records.
        captioned: how captions are read, of a plan that releases by them.

    Raises:
        PlanError: a plan without a moments stage.
    """
    settings = plan.stages.moments
    if settings is None:
        raise PlanError("this plan has no moments stage")
    first, *others = rounds_in(lock)
    slots = _charged(first, lock, charge)
    if captioned is not None:
        return _by_captions(slots, who, source(_stream(slots)), captioned)
    classes = plan.private.conditions
    blocks = blocks_of(slots, radius)
    exact = class_sums(who.everyone(), slots, classes)
    moments = add_noise(exact, blocks, settings.covariance, radius, source(_stream(slots)))
    known = class_sums(who.records(), slots, classes)
    seen = list(_class_statistics(moments, known, blocks, who.canaries, classes))
    cells: ReleasedCells | None = None
    for made in others:
        frame = next_frame(plan, settings, moments, cells)
        slot, *_ = slots = _charged(made, lock, charge)
        cells = release_cells(who.everyone(), frame, slot, source(_stream(slots)))
        known = shard_sums(who.records(), frame, slot)
        seen += _cell_statistics(made.name, cells, known, slot, who.canaries, frame=frame)
    return ReleasedRounds(moments, cells, tuple(seen))


def _by_captions(
    slots: tuple[Slot, ...], who: Population, noise: NoiseSource, captioned: Captioned
) -> ReleasedRounds:
    features_of, space = captioned.features_of, captioned.space
    exact = cross_sums(who.everyone(), features_of, space, slots)
    released = add_cross_noise(exact, slots, space, noise)
    known = cross_sums(who.records(), features_of, space, slots)
    seen = cross_statistics(released, known, slots, who.canaries, captioned)
    return ReleasedRounds(released, None, tuple(seen))


def _charged(made: Round, lock: Lock, charge: Charge) -> tuple[Slot, ...]:
    slots = tuple(next(s for s in lock.slots if s.name == name) for name in made.releases)
    for slot in slots:
        charge(slot)
    return slots


def _stream(slots: tuple[Slot, ...]) -> str:
    """The name of a round's noise, as a spending session gives it."""
    return "+".join(str(slot.id) for slot in slots)


@dataclass(frozen=True)
class _Sums:
    """counts (G,), sums (G, d), seconds (G', d, d) or None: released in real units, or exact."""

    counts: NDArray[np.generic]
    sums: NDArray[np.generic]
    seconds: NDArray[np.generic] | None


@dataclass(frozen=True)
class _Placed:
    """Canaries' codes or residuals (m, d) in whole steps, and the groups (m,) that they add to."""

    codes: NDArray[np.int64]
    groups: NDArray[np.int64]
    second_groups: NDArray[np.int64]


def _class_statistics(
    moments: ReleasedMoments, known: ExactSums, blocks: Blocks, canaries: UnitCodes, classes: int
) -> Iterator[Statistic]:
    pooled = len(moments.seconds) == 1
    seconds = known.seconds.sum(axis=0, keepdims=True) if pooled else known.seconds
    groups = canaries.labels if moments.classes == classes else np.zeros_like(canaries.labels)
    yield from _statistics(
        "moments",
        _Sums(moments.counts, moments.sums, moments.seconds),
        _Sums(known.counts, known.sums, seconds),
        blocks.finer(known.bits),
        _Placed(canaries.codes.astype(np.int64), groups, groups * (not pooled)),
    )


def _cell_statistics(
    name: str,
    cells: ReleasedCells,
    known: ExactSums,
    slot: Slot,
    canaries: UnitCodes,
    *,
    frame: Frame,
) -> Iterator[Statistic]:
    groups = assign(canaries.codes, canaries.labels, frame)
    classes, most, dim = frame.centres.shape
    released = _Sums(
        cells.counts.reshape(-1),
        cells.sums.reshape(-1, dim),
        None if cells.seconds is None else cells.seconds.reshape(classes * most, dim, dim),
    )
    yield from _statistics(
        name,
        released,
        _Sums(known.counts, known.sums, known.seconds),
        blocks_of([slot], frame.radius).finer(known.bits),
        _Placed(residuals(canaries.codes, groups, frame), groups, groups),
    )


def _statistics(
    release: str, released: _Sums, exact: _Sums, blocks: Blocks, placed: _Placed
) -> Iterator[Statistic]:
    """Blocks in the order in which `Blocks.release` draws their noise.

    `blocks` are in the steps of `exact`, of which a canary's own step has 2^bits.
    """
    whole = float(1 << blocks.bits)  # a canary counts by a whole share of itself
    real = placed.codes.astype(np.float64)
    axes = np.arange(real.shape[1])
    inner = placed.groups[:, None] * len(axes) + axes

    def block(part: str, scale: Block, sums: tuple[Any, Any], at: Any, values: Array) -> Statistic:
        noisy, known = (np.asarray(one.reshape(-1), np.float64) for one in sums)
        values = values * (whole * scale.unit)
        return Statistic(release, part, noisy, known * scale.unit, scale.real_std, at, values)

    counted, ones = placed.groups[:, None], np.ones((len(real), 1))
    yield block("counts", blocks.counts, (released.counts, exact.counts), counted, ones)
    yield block("sums", blocks.sums, (released.sums, exact.sums), inner, real)
    if blocks.second is None or released.seconds is None or exact.seconds is None:
        return
    seconds = released.seconds, exact.seconds
    diagonals = seconds[0][:, axes, axes], seconds[1][:, axes, axes]
    at = placed.second_groups[:, None] * len(axes) + axes
    yield block("diagonal", blocks.second[0], diagonals, at, np.square(real))
    row, column = np.triu_indices(len(axes), k=1)
    others = seconds[0][:, row, column], seconds[1][:, row, column]
    at = placed.second_groups[:, None] * len(row) + np.arange(len(row))
    products = real[:, row] * real[:, column]
    yield block("off-diagonal", blocks.second[1], others, at, products)


def real_codes(units: UnitCodes, radius: float) -> Array:
    """Codes (n, d) in real units, on the clip's grid."""
    found: Array = units.codes * (radius / CODE_MAX)
    return found
