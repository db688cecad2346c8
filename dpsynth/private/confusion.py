"""The evaluation stage: a confusion matrix of the held-out records, released with noise.

The classifier learns from released samples alone (`released.probe`) and is fixed before the charge,
so a record moves one cell and the number of answers. Sensitivity, units of several images and
composition: docs/maths/evaluation.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting.statistics import ConfusionMatrix
from dpsynth.artifacts.confusion import NAME, ReleasedConfusion, save_confusion
from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import MODEL
from dpsynth.artifacts.spending import Spender, calibration_hash, spending
from dpsynth.console import progress
from dpsynth.errors import BudgetError, MissingError, PlanError, typed
from dpsynth.planning.schema import Private, SourceHeldOut
from dpsynth.planning.verify import VerifiedPlan, require_allocated
from dpsynth.planning.workload import CONFUSION
from dpsynth.private.blocks import UP
from dpsynth.private.lattice import CODE_MAX, SHARE_BITS, Block
from dpsynth.private.noise import NoiseSource
from dpsynth.private.shares import unit_shares, weights_of
from dpsynth.released.handout import hand_out
from dpsynth.released.probe import Answer, Probe, trained_probe
from dpsynth.released.scores import read_scores
from dpsynth.vault import PrivacyUnits, Record, open_private
from dpsynth.vault.checked import require_checked

_EARLIER = (
    ("moments", "release-moments"),
    ("embedding", "release-embedding"),
    ("votes", "evolve"),
    ("central", "release-central"),
    ("train", "train"),
)
_UNITS = 1024  # units of several images that are clipped at once


@dataclass(frozen=True)
class ExactMatrix:
    """Answers by true and given class, and their number, in whole steps of 2^-bits.

    cells (Y, Y) and total (): Python ints or int64. Never released, dies in the mechanism.
    """

    cells: NDArray[np.int64]
    total: int
    bits: int


def release_evaluation(verified: VerifiedPlan) -> dict[str, Any]:
    """Spend the plan's evaluation stage once: `released/confusion.safetensors`, and its scores.

    The last stage: it closes the transcript and makes `released/` whole.

    Returns:
        What was released, and the scores that follow from it, in released values alone.

    Raises:
        PlanError: the plan has no evaluation stage, or must be planned again after `pretrain`.
        BudgetError: already released, every slot is spent, or the run is closed.
        MissingError: an earlier stage or the samples are missing.
        UsageError, DataError: the records were not checked, or the samples are damaged, or not what
            the plan's sampler drew.
        ReplayError: a released file is not what was settled.
    """
    run, lock = verified.run, verified.lock
    if verified.plan.stages.evaluation is None:
        raise PlanError(
            "this plan has no evaluation stage",
            hint="declare `evaluation: {}` under stages, and plan a new run (its budget adds up)",
        )
    require_checked(verified)
    require_allocated(verified)
    with spending(
        run, lock, calibration_hash=calibration_hash(run), noise_source=verified.noise_source
    ) as spender:
        if spender.settled_digest(CONFUSION) is not None:
            spender.close()  # a run that settled but died before its last line,
            hand_out(run)  # or before `released/` was whole
        slot = spender.release_slot(CONFUSION)
        _require_turn(spender, run, lock)
        held_out = open_private(verified).held_out  # reads nothing before it is iterated
        _require_source(verified.plan.private, run)
        blocks = matrix_blocks(slot, several=verified.plan.budget.column is not None)
        probe = trained_probe(verified)
        noise = NoiseSource.for_run(lock, str(slot.id))
        spender.charge(slot)  # on disk before the held-out records are opened
        with progress("asking the probe about held-out records"):
            exact = exact_matrix(held_out, probe.answer, statistic_of(slot))
        released = add_noise(exact, blocks, probe, noise)
        reach("mechanism:done")
        save_confusion(run.released / NAME, released)
        spender.settle(slot, run.released / NAME)
        spender.close()
    hand_out(run)
    return {"released": NAME, "slots": [slot.name], **read_scores(run.released)}


def _require_turn(spender: Spender, run: RunDir, lock: Lock) -> None:
    """Every other stage comes first: this one closes the run, and measures what they made."""
    state = spender.state
    if state.closed:
        raise BudgetError(
            "the run is closed: nothing more can be charged",
            hint="plan a new run; the ledger adds both budgets",
        )
    for stage, command in _EARLIER:
        groups = lock.releases(stage).values()
        left = [
            group
            for group in groups
            if not any(slot.id in state.settled for slot in group)
            and any(slot.id not in state.charged for slot in group)
        ]
        if left or (stage == "train" and groups and not (run.released / MODEL).is_file()):
            raise MissingError(
                f"the {stage} stage comes first: this one closes the run",
                hint=typed("dpsynth", command, run.root),
            )


def _require_source(private: Private, run: RunDir) -> None:
    """A path that leads nowhere, such as that of a disk not attached, must not cost the charge.

    The declared paths alone: no record that lies there decides whether the stage runs.
    """
    rule = private.held_out
    source = rule.source if isinstance(rule, SourceHeldOut) else private.source
    if not all(path.exists() for _, path in source if isinstance(path, Path)):
        raise MissingError(
            "the held-out records are not where the plan says; nothing was charged",
            hint="put them back where the plan says, then "
            + typed("dpsynth", "release-evaluation", run.root),
        )


def statistic_of(slot: Slot) -> ConfusionMatrix:
    """What the slot releases. Raises PlanError for anything but a confusion matrix."""
    if not isinstance(slot.statistic, ConfusionMatrix):
        raise PlanError("the lock's evaluation stage is not a release that this version knows")
    return slot.statistic


def matrix_blocks(slot: Slot, *, several: bool) -> tuple[Block, Block]:
    """Noise scales of cells and total (V4), in steps of 2^-16 for units of several images.

    Raises PlanError: a statistic that is no confusion matrix, or noise out of range.
    """
    statistic = statistic_of(slot)
    made = [Block(1.0, slot.noise_std / w * UP) for w in (statistic.cell, statistic.total)]
    if several:
        made = [block.finer(SHARE_BITS) for block in made]
    for block in made:
        block.check()
    return made[0], made[1]


def add_noise(
    exact: ExactMatrix, blocks: tuple[Block, Block], probe: Probe, noise: NoiseSource
) -> ReleasedConfusion:
    """Discrete Gaussian noise on the exact counts, fresh for every entry."""
    of_cells, of_total = blocks
    total = of_total.release(np.array([exact.total], object), noise)
    return ReleasedConfusion(
        cells=of_cells.release(exact.cells.astype(object), noise),
        total=float(total[0]),
        cell_std=of_cells.real_std,
        total_std=of_total.real_std,
        samples_sha256=probe.samples_sha256,
        samples=probe.samples,
        steps=probe.steps,
        seed=probe.seed,
    )


def exact_matrix(units: PrivacyUnits, answer: Answer, statistic: ConfusionMatrix) -> ExactMatrix:
    """Exact sums over units of what each adds (V1), a unit of several clipped as one vector (V3).

    A record whose label is not declared, or that has no answer, adds nothing; where a record is a
    unit, a unit adds its first record alone. No unit at all: zeros. Never released.
    """
    running = _Running(statistic, several=units.most is not None)
    for unit in units.records():
        running.add(_cells_of(unit if running.several else unit[:1], answer, statistic.classes))
    return running.matrix()


def _cells_of(unit: list[Record], answer: Answer, classes: int) -> list[int]:
    """The cell of each record that counts, y * Y + c."""
    found = []
    for record in unit:
        given = answer(record.image) if 0 <= record.label < classes else None
        if given is not None and 0 <= given < classes:
            found.append(record.label * classes + given)
    return found


class _Running:
    """Sums of units that came so far; units of several wait until some are clipped together."""

    def __init__(self, statistic: ConfusionMatrix, *, several: bool) -> None:
        self.several = several
        self._statistic, self._total = statistic, 0
        self._flat = np.zeros(statistic.classes**2, np.int64)
        self._waiting: list[list[int]] = []

    def add(self, cells: list[int]) -> None:
        """Add one unit: the cells of its records."""
        if not cells:
            return
        if self.several:
            self._waiting.append(cells)
            if len(self._waiting) >= _UNITS:
                self._clip()
        else:
            self._flat[cells[0]] += 1
            self._total += 1

    def matrix(self) -> ExactMatrix:
        """The sums of all units."""
        if self._waiting:
            self._clip()
        side = self._statistic.classes
        bits = SHARE_BITS if self.several else 0
        return ExactMatrix(self._flat.reshape(side, side), self._total, bits)

    def _clip(self) -> None:
        cells = np.concatenate([np.array(unit, np.int64) for unit in self._waiting])
        sizes = np.array([len(unit) for unit in self._waiting], np.int64)
        shares = answer_shares(cells, sizes, self._statistic)
        np.add.at(self._flat, cells, shares)
        self._total += int(shares.sum())
        self._waiting = []


def answer_shares(
    cells: NDArray[np.int64], sizes: NDArray[np.int64], statistic: ConfusionMatrix
) -> NDArray[np.int64]:
    """Numerator k of k / 2^16 of each answer's unit (n,), by `unit_shares` (V3).

    cells (n,): of the answers of each unit, side by side; sizes (u,): how many a unit has. An
    answer goes in as a code of length one: all pairs of a unit's answers have product one.
    """
    codes = np.full((len(cells), 1), CODE_MAX, np.int64)
    return unit_shares(codes, cells, sizes, weights_of(statistic))
