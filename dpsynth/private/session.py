"""The rounds of a moments stage, in one spending session: each is charged, made and settled.

A session goes on where an earlier one ended: what was settled is read back from its file, and
the next round is paid for by its own slot, or by its spare where a crash forfeited that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dpsynth.accounting.statistics import CellMoments, CellSums
from dpsynth.artifacts.cells import NAME as CELLS_NAME
from dpsynth.artifacts.cells import lloyd_name
from dpsynth.artifacts.cross import NAME as CROSS_NAME
from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.moments import NAME as MOMENTS_NAME
from dpsynth.artifacts.spending import Spender
from dpsynth.console import Bar
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import ReplayError
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.blocks import blocks_of
from dpsynth.private.cross import cross_blocks, is_cross
from dpsynth.private.encoding import CodeStream, UnitCodes, private_stream
from dpsynth.private.lattice import SHARE_BITS
from dpsynth.private.noise import NoiseSource
from dpsynth.public.representation import Representation

Released = TypeVar("Released")
# What a round makes of one pass over the units' codes; its slots pay, its noise is its own.
Mechanism = Callable[[tuple[Slot, ...], Iterator[UnitCodes], NoiseSource], Released]


@dataclass(frozen=True)
class Round:
    """One round: the releases that are charged for it, and the file that they settle with."""

    releases: tuple[str, ...]
    file: str

    @property
    def name(self) -> str:
        """What the file is called, without its ending."""
        return Path(self.file).stem


def rounds_in(lock: Lock) -> tuple[Round, ...]:
    """The rounds of a lock's moments stage in planned order: class moments, then each cell round.

    A caption release is one round, in place of them. The paper's mechanisms are one round: they
    are drawn from the same sums, into one file.
    """
    slots = [slot for slot in lock.stage_slots("moments") if not slot.spare]
    first = tuple(s.name for s in slots if not isinstance(s.statistic, CellSums | CellMoments))
    moved = [s.name for s in slots if isinstance(s.statistic, CellSums)]
    last = [s.name for s in slots if isinstance(s.statistic, CellMoments)]
    return (
        Round(first, CROSS_NAME if is_cross(slots) else MOMENTS_NAME),
        *(Round((name,), lloyd_name(number)) for number, name in enumerate(moved, start=1)),
        *(Round((name,), CELLS_NAME) for name in last),
    )


def read_settled(
    path: Path, digest: str | None, load: Callable[[Path], Released]
) -> Released | None:
    """What a round released, read back from its file; None while nothing settled (no digest).

    Raises MissingError or ReplayError where the file is gone or another one by now.
    """
    if digest is None:
        return None
    if sha256_file(path) != digest:
        raise ReplayError(
            f"{path.name} is not what the transcript settled: no later round may rest on it",
            hint="restore the file, or plan a new run (its budget adds up)",
        )
    return load(path)


class Hundredths:
    """One unit of a bar, moved by whole hundredths of what is told."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._told, self._shown = bar, 0.0, 0

    def moved(self, share: float) -> None:
        """Take a share of the whole; the bar moves where a hundredth is full."""
        self._told += share
        self._to(min(99, int(100 * self._told)))

    def finish(self) -> None:
        """Move to the end."""
        self._to(100)

    def _to(self, place: int) -> None:
        if place > self._shown:
            self._bar.advance((place - self._shown) / 100)
            self._shown = place


class Session:
    """Rounds of one run under its spending lock. The records are read after a charge.

    Once in all where their codes are kept (`encoding.is_kept`), else once a round.
    """

    def __init__(
        self,
        verified: VerifiedPlan,
        representation: Representation,
        spender: Spender,
        ranks: Ranks = ALONE,
    ) -> None:
        """`ranks`: the processes that hold the records; a session is the main one's."""
        self._verified, self._representation, self._spender = verified, representation, spender
        self.ranks = ranks
        self.rounds = rounds_in(verified.lock)
        self.charged: list[str] = []
        self._stream: CodeStream | None = None
        self.bar = Bar(None, None, None)

    @property
    def unsettled(self) -> tuple[Round, ...]:
        """The rounds that are left to do, in order."""
        return tuple(made for made in self.rounds if self._digest(made) is None)

    @property
    def radius(self) -> float:
        """The clip radius of what is released: R, in the release space."""
        return self._representation.radius

    def require_possible(self) -> None:
        """Refuse, before anything is charged, what cannot be done to the end.

        Raises:
            BudgetError: every round was released, or one that is left has no slot.
            PlanError: noise out of range, or a statistic that this version does not know.
        """
        for made in self.unsettled or self.rounds:
            slots, radius = self._slots(made), self._representation.radius
            scales = (
                cross_blocks(slots, radius, 1.0) if is_cross(slots) else blocks_of(slots, radius)
            )
            if self._verified.plan.budget.column is not None:
                scales.finer(SHARE_BITS)

    def settled(self, made: Round, load: Callable[[Path], Released]) -> Released | None:
        """What a round released, read back; None while it is not settled.

        Raises MissingError or ReplayError where the file is gone or another one by now.
        """
        return read_settled(self._path(made), self._digest(made), load)

    def spend(
        self, made: Round, mechanism: Mechanism[Released], save: Callable[[Path, Released], None]
    ) -> Released:
        """Charge a round on disk, make it, write its file, settle it.

        `bar` moves by whole hundredths of the source: of finer steps a number of records follows.
        """
        slots = self._slots(made)
        stream = "+".join(str(slot.id) for slot in slots)
        noise = NoiseSource.for_run(self._verified.lock, stream)
        for slot in slots:
            self._spender.charge(slot)
            self.charged.append(slot.name)
        self.ranks.tell({"charged": [slot.id for slot in slots]})  # only now: it is on disk
        steps = Hundredths(self.bar)
        released = mechanism(slots, self._read().chunks(steps.moved), noise)
        steps.finish()
        reach("mechanism:done")
        save(self._path(made), released)
        for slot in slots:
            self._spender.settle(slot, self._path(made))
        return released

    def _read(self) -> CodeStream:
        """The units' codes. Reading starts with the first pass, which comes after a charge."""
        if self._stream is None:
            self._stream = private_stream(
                self._verified, self._representation, self.ranks, passes=len(self.unsettled)
            )
        return self._stream

    def _slots(self, made: Round) -> tuple[Slot, ...]:
        """Own slot of each release, or a free spare. BudgetError: settled, or none is left."""
        return tuple(self._spender.release_slot(name) for name in made.releases)

    def _digest(self, made: Round) -> str | None:
        """The hash that the round settled with. Its releases settle with one file."""
        digests = (self._spender.settled_digest(name) for name in made.releases)
        return next((digest for digest in digests if digest is not None), None)

    def _path(self, made: Round) -> Path:
        return self._verified.run.released / made.file
