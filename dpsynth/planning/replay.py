"""Replay: recompute epsilon from the charges alone, and check that nothing was altered.

Needs neither data nor torch. The sensitivity of each charge is derived from its statistic,
never read. Replay cannot prove that noise was drawn: a transcript shows what was declared.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpsynth.accounting.compose import EpsilonBounds, epsilon
from dpsynth.accounting.statistics import PaperClassSums, PaperCrossMoments, PaperSecondMoment
from dpsynth.artifacts.files import canonical_json
from dpsynth.artifacts.lock import Lock, plan_hash
from dpsynth.artifacts.settled import charged_calibrations, out_of_order
from dpsynth.artifacts.transcript import Line
from dpsynth.errors import DpsynthError, ReplayError, UsageError
from dpsynth.planning.charges import Charge, Row, compose, gathered, read_charges, rows
from dpsynth.planning.evidence import Evidence, gather
from dpsynth.planning.schema import Plan
from dpsynth.planning.units import read_unit, unit_words
from dpsynth.planning.workload import follows, slack_of

CANNOT_PROVE = (
    "Replay checks what was declared and charged. It cannot prove that noise was drawn, or that "
    "the data was touched only through these charges."
)
_OF_RECORDS = (PaperClassSums, PaperSecondMoment, PaperCrossMoments)
# Composed values of equal charges are equal; this covers printing them in a manifest alone.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class RunReplay:
    """One transcript that holds. `epsilon` is composed over all charges, rounded up."""

    target: str
    run_id: str
    plan_hash: str
    charges: int
    settled: int
    forfeited: int
    closed: bool
    epsilon: float
    optimistic: float
    delta: float
    budget: dict[str, Any]
    rows: tuple[Row, ...]
    head: str
    head_checked: str | None
    lock_checked: bool
    unsafe: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ReplayReport:
    """What `replay` found. `epsilon`, `delta`: sums over runs, which one after another add up.

    `joint` composes all runs' charges at the summed delta; it holds only if no run's plan
    was chosen after looking at another's release. None for a single run.
    """

    runs: tuple[RunReplay, ...]
    epsilon: float
    delta: float
    joint: float | None
    budget: tuple[float, float | None] | None
    notes: tuple[str, ...]

    @property
    def unsafe(self) -> bool:
        """Whether some noise came from a fixed seed: then nothing is private."""
        return any(run.unsafe for run in self.runs)

    @property
    def ok(self) -> bool:
        """Whether everything holds and the noise was declared to be real."""
        return not self.unsafe

    @property
    def verdict(self) -> str:
        """One line for people."""
        if self.unsafe:
            return "UNSAFE: the noise came from a fixed seed; nothing here is private"
        unchecked = any(run.head_checked is None for run in self.runs)
        what = "the transcript holds" if len(self.runs) == 1 else "the transcripts hold"
        return f"{what}: consistent, head not checked" if unchecked else what

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "joint": self.joint,
            "budget": self.budget,
            "runs": [asdict(run) for run in self.runs],
            "notes": [*self.notes, CANNOT_PROVE],
        }


def replay(
    *targets: Path,
    head: str | None = None,
    partial: bool = False,
    budget: tuple[float, float | None] | None = None,
) -> ReplayReport:
    """Replay transcripts, run folders or hand-out folders.

    Args:
        targets: at least one path.
        head: the hash that the (single) transcript's last line must have, from elsewhere.
        partial: accept a transcript that was not closed, or whose last line a crash tore.
        budget: (epsilon, delta or None) that the sum over all targets must keep.

    Raises:
        ReplayError: something was altered, is over its budget, or is no subset of its lock.
        MissingError: a target does not exist.
        UsageError: no target, or `head` with several.
    """
    if not targets:
        raise UsageError("nothing to replay", hint="dpsynth replay RUN")
    if head is not None and len(targets) > 1:
        raise UsageError(
            "--head goes with one transcript", hint="replay each with its own --head first"
        )
    with _without_collection():
        found, notes = _distinct([gather(path, head=head, partial=partial) for path in targets])
        runs = tuple(_replayed(evidence) for evidence in found)
    total = sum(run.epsilon for run in runs)
    delta = sum(run.delta for run in runs)
    joint = _joint(found, delta) if len(runs) > 1 else None
    if budget is not None:
        _within(total, delta, budget)
    return ReplayReport(runs, total, delta, joint, budget, (*notes, *_mixed_units(runs)))


def _mixed_units(runs: Sequence[RunReplay]) -> list[str]:
    """A sum over runs holds for the smallest unit that they share: one record, if that is all."""
    units = dict.fromkeys(unit_words(run.budget["unit"]) for run in runs)
    if len(units) < 2:
        return []
    return [
        f"the runs protect different units ({'; '.join(units)}): their sum holds for one record, "
        "not for all images of one of them"
    ]


@contextmanager
def _without_collection() -> Iterator[None]:
    """Parsed lines hold no cycles; looking for some would take a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _distinct(found: Sequence[Evidence]) -> tuple[list[Evidence], list[str]]:
    """Drop what is the same transcript, or an earlier state of it; refuse forks of one run."""
    kept: dict[str, Evidence] = {}
    notes = []
    for evidence in found:
        run_id = str(evidence.lines[0]["run_id"])
        known = kept.get(run_id)
        if known is None:
            kept[run_id] = evidence
            continue
        short, long = sorted((known, evidence), key=lambda item: len(item.lines))
        if long.lines[len(short.lines) - 1]["hash"] != short.head:
            raise ReplayError(
                f"{known.target} and {evidence.target} are one run told in two ways",
                hint="a run's transcript only grows; ask which copy is the true one",
            )
        kept[run_id] = long
        notes.append(f"{short.target} is the same run as {long.target}: counted once")
    return list(kept.values()), notes


def _replayed(evidence: Evidence) -> RunReplay:
    opened = evidence.lines[0]
    lines = [line for line in evidence.lines if line["kind"] == "charge"]
    budget, slack = _budget_of(opened)
    if evidence.lock is not None:
        _check_lock(evidence.lock, opened, lines)
        _check_rounds(evidence.lock, evidence.lines)
    _same_sources(opened, lines)
    charges = read_charges(lines)
    drawn = ((charge.statistic, charge.steps) for charge in charges)
    if slack < slack_of(drawn, budget["epsilon"]):
        raise ReplayError("the transcript's delta_slack does not pay for its discrete noise")
    _check_unit(budget, charges)
    bounds = _spent(charges, evidence.lock, budget["epsilon"], budget["delta"] - slack)
    _check_spent(bounds.pessimistic, budget["epsilon"], evidence)
    settled = sum(line["kind"] == "settle" for line in evidence.lines)
    return RunReplay(
        target=evidence.target,
        run_id=str(opened["run_id"]),
        plan_hash=str(opened["plan_hash"]),
        charges=len(charges),
        settled=settled,
        forfeited=len(charges) - settled,
        closed=evidence.closed,
        epsilon=bounds.pessimistic,
        optimistic=bounds.optimistic,
        delta=budget["delta"],
        budget=budget,
        rows=tuple(rows(charges, budget["delta"] - slack)),
        head=evidence.head,
        head_checked=evidence.head_checked,
        lock_checked=evidence.lock is not None,
        unsafe=opened["noise_source"] != "os-entropy",
        notes=evidence.notes,
    )


def _budget_of(opened: Line) -> tuple[dict[str, Any], float]:
    """Budget and delta slack of an `open` line, as numbers that can be composed at."""
    budget, slack = opened["budget"], opened["delta_slack"]
    numbers = (
        [budget.get("epsilon"), budget.get("delta"), slack] if isinstance(budget, dict) else []
    )
    good = (
        numbers
        and all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
        and 0 < budget["epsilon"] < 1e300
        and _is_unit(budget.get("unit"))
        and 0 <= slack < budget["delta"] < 1
        and budget.get("adjacency") == "add-or-remove-one"
    )
    if not good:
        raise ReplayError("the transcript opens with a budget that nothing can be checked against")
    return budget, float(slack)


def _is_unit(value: object) -> bool:
    try:
        read_unit(value)
    except ValueError:
        return False
    return True


def _check_unit(budget: dict[str, Any], charges: Sequence[Charge]) -> None:
    """Units of several images are summed by statistics whose bound holds for whole units."""
    bounds_records = [c for c in charges if isinstance(c.statistic, _OF_RECORDS)]
    if read_unit(budget["unit"]) is not None and bounds_records:
        raise ReplayError(
            f"{bounds_records[0].statistic.kind} bounds one record, and the unit has several"
        )


def _check_lock(lock: Lock, opened: Line, charges: Sequence[Line]) -> None:
    """The transcript was opened with this lock, and every charge is one of its slots."""
    if opened["lock_hash"] != lock.lock_hash:
        raise ReplayError("the lock is not the one that the transcript was opened with")
    said = {
        "plan_hash": lock.plan_hash,
        "budget": lock.budget,
        "delta_slack": lock.delta_slack,
        "versions": lock.versions,
        "noise_source": lock.noise_source,
    }
    for key, value in said.items():
        if canonical_json(opened[key]) != canonical_json(value):
            raise ReplayError(f"the transcript's {key} is not the lock's")
    if plan_hash(lock.facts) != lock.plan_hash:
        raise ReplayError("the lock's facts do not have the lock's plan hash")
    if not _follows_from_facts(lock):
        raise ReplayError(
            "the lock's slots, budget or delta_slack do not follow from the plan in it",
            hint="replay it with the dpsynth version named in the lock; otherwise it was forged",
        )
    if charges and lock.provisional:
        raise ReplayError(
            "the lock is provisional: its time buckets were never chosen, so nothing could spend"
        )
    specs = {slot.id: slot.spec() for slot in lock.slots}
    for line in charges:
        spec = specs.get(line["slot"])
        if spec is None or any(line[key] != value for key, value in spec.items()):
            raise ReplayError(
                f"line {line['line']} charges what the lock does not hold as slot {line['slot']}",
                hint="only what was verified before the data was opened may be charged",
            )


def _check_rounds(lock: Lock, lines: Sequence[Line]) -> None:
    """Each round was charged once every earlier round of its stage was settled."""
    early = out_of_order(lock, lines)
    if early is not None:
        raise ReplayError(
            f"line {early['line']} charges {early['mechanism']} before every earlier round of its "
            "stage is settled",
            hint="a round rests on what the earlier ones released: this one cannot be what it says",
        )


def _follows_from_facts(lock: Lock) -> bool:
    try:
        return follows(lock, Plan.of_facts(lock.facts))
    except (DpsynthError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return False


def _same_sources(opened: Line, charges: Sequence[Line]) -> None:
    """One noise source and one calibration for all charges of a run."""
    if len(charged_calibrations(charges)) > 1:
        raise ReplayError("the public calibration changed between charges")
    if any(line["noise_source"] != opened["noise_source"] for line in charges):
        raise ReplayError("the noise source changed between charges")


def _spent(
    charges: Sequence[Charge], lock: Lock | None, most: float, delta: float
) -> EpsilonBounds:
    """Bounds on the epsilon of the charges; of a lock that holds them all, if that is tighter.

    Grids differ, so that a few charges may seem a hair above the whole lock. They are not: a
    part of the lock's slots spends at most what all of them do.
    """
    bounds = compose(charges, delta)
    if lock is None or bounds.pessimistic <= most:
        return bounds
    whole = epsilon(gathered(slot.event() for slot in lock.slots), delta)
    return min(bounds, whole, key=lambda bound: bound.pessimistic)


def _check_spent(spent: float, budget: float, evidence: Evidence) -> None:
    if not spent <= budget:
        raise ReplayError(
            f"{evidence.target}: the charges compose to epsilon {spent:.6g}, over the budget "
            f"{budget:g}"
        )
    stated = evidence.stated_epsilon
    if stated is not None and not spent <= stated * _ROUNDING:
        raise ReplayError(
            f"{evidence.target}: the manifest states epsilon {stated:.6g}, and the charges "
            f"compose to {spent:.6g}"
        )


def _joint(found: Sequence[Evidence], delta: float) -> float:
    """Epsilon of all charges together, at the sum of the runs' deltas."""
    if delta >= 1:
        return 0.0
    charges = [charge for item in found for charge in read_charges(item.lines)]
    slack = sum(float(item.lines[0]["delta_slack"]) for item in found)
    return compose(charges, delta - slack).pessimistic


def _within(total: float, delta: float, budget: tuple[float, float | None]) -> None:
    most_epsilon, most_delta = budget
    if not total <= most_epsilon * _ROUNDING:
        raise ReplayError(f"the runs add up to epsilon {total:.6g}, over --budget {most_epsilon:g}")
    if most_delta is not None and not delta <= most_delta * _ROUNDING:
        raise ReplayError(f"the runs add up to delta {delta:.6g}, over --budget {most_delta:g}")
