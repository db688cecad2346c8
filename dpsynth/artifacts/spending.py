"""The only way to spend: charge a slot on disk, touch the data, settle with the artifact.

    with spending(run, lock, calibration_hash=..., noise_source=...) as spender:
        slot = spender.release_slot("moments")
        spender.charge(slot)            # on disk before the data is touched
        ...                             # the mechanism; write the artifact atomically
        spender.settle(slot, artifact)

One process at a time holds the run (a file lock, gone when its process dies). A slot that
was charged and never settled is forfeited: it counts as spent and is not run again. A round
is charged only after every earlier round of its stage settled.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.files import sha256_file, storage_error, sweep
from dpsynth.artifacts.ledger import Entry, Ledger
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import MODEL, earlier_files, file_of, made_files, require_grown
from dpsynth.artifacts.trained import finish_training
from dpsynth.artifacts.transcript import (
    FORMAT,
    GENESIS,
    Appender,
    Transcript,
    parse_transcript,
    summary,
)
from dpsynth.console import note
from dpsynth.errors import BudgetError, MissingError, typed


@dataclass(frozen=True)
class SpendState:
    """What a transcript says. `forfeited`: charged, and not settled (or not yet)."""

    settled: frozenset[int] = frozenset()
    forfeited: frozenset[int] = frozenset()
    closed: bool = False
    head: str = GENESIS
    run_id: str | None = None
    calibration_hash: str | None = None

    @property
    def charged(self) -> frozenset[int]:
        """Every slot that counts as spent."""
        return self.settled | self.forfeited


def _state_of(known: Transcript) -> SpendState:
    charges = [line for line in known.lines if line["kind"] == "charge"]
    charged = frozenset(line["slot"] for line in charges)
    settled = frozenset(line["slot"] for line in known.lines if line["kind"] == "settle")
    return SpendState(
        settled=settled,
        forfeited=charged - settled,
        closed=bool(known.lines) and known.lines[-1]["kind"] == "close",
        head=known.head,
        run_id=known.lines[0]["run_id"] if known.lines else None,
        calibration_hash=charges[0]["calibration_hash"] if charges else None,
    )


def _checked_against(lock: Lock, known: Transcript) -> Transcript:
    if known.lines and known.lines[0]["lock_hash"] != lock.lock_hash:
        raise BudgetError(
            "the run's lock is not the one that its transcript was opened with",
            hint="restore the lock, or plan into a new run folder (its spend adds up)",
        )
    return known


def read_state(run: RunDir, lock: Lock) -> SpendState:
    """What was spent so far, without taking the run's lock or writing anything.

    Raises ReplayError when the transcript was tampered with.
    """
    if not run.transcript.exists():
        return SpendState()
    return _state_of(_checked_against(lock, parse_transcript(run.transcript.read_bytes())))


def calibration_hash(run: RunDir) -> str:
    """SHA-256 of `public/calibration.json`, which every charge carries."""
    if not run.calibration.exists():
        raise MissingError(
            "the run has no public calibration", hint=typed("dpsynth", "pretrain", run.root)
        )
    return sha256_file(run.calibration)


class Spender:
    """Charges and settles slots of one run; only `spending` makes one."""

    def __init__(
        self, run: RunDir, lock: Lock, appender: Appender, *, calibration: str, noise_source: str
    ) -> None:
        self._run, self._lock, self._appender = run, lock, appender
        self._calibration, self._noise_source = calibration, noise_source
        found = _state_of(_checked_against(lock, appender.known))
        # Kept as sets, so that a session of n charges costs n and not n^2.
        self._charged, self._settled = set(found.charged), set(found.settled)
        settles = (line for line in appender.known.lines if line["kind"] == "settle")
        self._digests: dict[int, str] = {line["slot"]: line["sha256"] for line in settles}
        self._closed, self._run_id = found.closed, found.run_id
        self._first_calibration = found.calibration_hash
        self._earlier = earlier_files(lock)
        made = {slot.id: file_of(slot.stage, slot.name) for slot in lock.slots}
        self._files = made  # by slot
        self._settled_files = {made[number] for number in self._settled if number in made}
        self._mine: set[int] = set()  # charged in this session: these alone may be settled
        self._entered = False

    @property
    def state(self) -> SpendState:
        """What is spent at this moment."""
        return SpendState(
            settled=frozenset(self._settled),
            forfeited=frozenset(self._charged - self._settled),
            closed=self._closed,
            head=self._appender.head,
            run_id=self._run_id,
            calibration_hash=self._first_calibration,
        )

    def free_slots(self, stage: str) -> list[Slot]:
        """Slots of a stage that were never charged, in order, spares last."""
        slots = self._lock.stage_slots(stage)
        return [slot for slot in slots if slot.id not in self._charged]

    def release_slot(self, name: str) -> Slot:
        """The slot to charge for the one-shot release `name`, or its first free spare.

        Raises BudgetError when the release was settled, or when no slot is left.
        """
        group = self._group(name)
        if any(slot.id in self._settled for slot in group):
            raise BudgetError(
                f"{name} was released already in this run, and is released only once",
                hint="use what lies in released/; a new release needs a new plan and budget",
            )
        for slot in group:
            if slot.id not in self._charged:
                return slot
        raise BudgetError(
            f"no slot of {name} is left: a crash forfeited {len(group)} of {len(group)}",
            hint="what was charged stays spent; plan a new run (the ledger adds both budgets), "
            f"with stages.{group[0].stage}.spares: 1 if crashes are likely",
        )

    def settled_digest(self, name: str) -> str | None:
        """SHA-256 that the settled slot of release `name` names; None while none is settled.

        A later round reads what an earlier one released only if the file has this hash.
        """
        digests = (self._digests.get(slot.id) for slot in self._group(name))
        return next((digest for digest in digests if digest is not None), None)

    def _group(self, name: str) -> list[Slot]:
        group = [slot for slot in self._lock.slots if slot.release == name]
        if not group:
            raise BudgetError(f"the lock has no slot named {name}", hint="dpsynth plan PLAN.yaml")
        return sorted(group, key=lambda slot: slot.spare)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do: each release settled or out of slots."""
        names = {slot.release for slot in self._lock.slots}
        groups: dict[str, list[int]] = {name: [] for name in names}
        for slot in self._lock.slots:
            groups[slot.release].append(slot.id)
        return all(
            not self._settled.isdisjoint(ids) or self._charged.issuperset(ids)
            for ids in groups.values()
        )

    def charge(self, slot: Slot) -> None:
        """Put the charge on disk. Call it before the slot's mechanism sees any data.

        Raises:
            BudgetError: the slot is not the lock's or already charged, an earlier round of its
                stage is not settled, the run is closed, the calibration changed since the first
                charge, or the dataset's cap is met.
            UsageError: the disk refused; nothing was charged, and nothing may be touched.
        """
        self._check_charge(slot)
        self._open()
        self._enter("open")
        reach("charge:before")
        self._appender.append(
            "charge",
            {
                "slot": slot.id,
                **slot.spec(),
                "noise_source": self._noise_source,
                "calibration_hash": self._calibration,
            },
        )
        self._mine.add(slot.id)
        self._charged.add(slot.id)
        self._first_calibration = self._calibration
        reach("charge:written")

    def _check_charge(self, slot: Slot) -> None:
        if slot not in self._lock.slots[slot.id - 1 : slot.id]:
            raise BudgetError(f"slot {slot.id} is not a slot of the lock")
        if self._lock.provisional:
            raise BudgetError(
                "the lock is provisional: its time buckets have no clips of their own yet",
                hint="plan again after pretrain: dpsynth plan PLAN --run RUN",
            )
        if self._closed:
            raise BudgetError(
                "the run is closed: nothing more can be charged",
                hint="plan a new run; the ledger adds both budgets",
            )
        if slot.id in self._charged:
            raise BudgetError(f"slot {slot.id} ({slot.name}) is already charged")
        missing = sorted(self._earlier[self._files[slot.id]] - self._settled_files)
        if missing:
            raise BudgetError(
                f"{slot.name} comes after {', '.join(missing)}, which is not settled",
                hint="a round rests on what every earlier one released",
            )
        if self._first_calibration not in (None, self._calibration):
            raise BudgetError(
                "public/calibration.json changed since the run's first charge",
                hint="restore the calibration that the first charge names",
            )

    def settle(self, slot: Slot, artifact: Path) -> None:
        """Record the SHA-256 of what the slot's mechanism released, in place by now.

        Raises BudgetError unless this very session charged the slot and never settled it.
        """
        if slot.id not in self._mine or slot.id in self._settled:
            raise BudgetError(
                f"slot {slot.id} ({slot.name}) was not charged by this command, or is settled"
            )
        digest = sha256_file(artifact)
        reach("settle:before")
        self._appender.append("settle", {"slot": slot.id, "sha256": digest})
        self._settled.add(slot.id)
        self._settled_files.add(self._files[slot.id])
        self._digests[slot.id] = digest
        reach("settle:written")

    def close(self) -> None:
        """End the transcript: what is unsettled is forfeited for good. Twice is once.

        A file that an unsettled charge left in `released/` is removed then: it may never be used.
        """
        if not self._closed:
            self._end()
        for path in made_files(self._run.released):
            if path.name != MODEL and path.name not in self._settled_files:
                path.unlink(missing_ok=True)
                note(f"removed released/{path.name}: it was charged and never settled")

    def _end(self) -> None:
        self._open()
        reach("close:before")
        self._appender.append("close", summary(self._charged, self._settled))
        self._closed = True
        reach("close:written")
        if self._charged:
            self._enter("closed")

    def _open(self) -> None:
        if self._run_id is not None:
            return
        line = self._appender.append(
            "open",
            {
                "format": FORMAT,
                "run_id": secrets.token_hex(16),
                "plan_hash": self._lock.plan_hash,
                "lock_hash": self._lock.lock_hash,
                "budget": self._lock.budget,
                "delta_slack": self._lock.delta_slack,
                "versions": self._lock.versions,
                "noise_source": self._noise_source,
            },
        )
        self._run_id = line["run_id"]

    def _enter(self, state: str) -> None:
        """List the run in the dataset's ledger, before its first charge of this session."""
        if self._entered and state == "open":
            return
        budget = self._lock.budget
        entry = Entry(
            run_id=str(self._run_id),
            run=self._run.name,
            plan_hash=self._lock.plan_hash,
            epsilon=budget["epsilon"],
            delta=budget["delta"],
            state=state,
        )
        cap = self._lock.facts.get("private", {}).get("cap") if state == "open" else None
        Ledger.of(self._run).enter(entry, cap)
        self._entered = True


@contextmanager
def spending(
    run: RunDir, lock: Lock, *, calibration_hash: str, noise_source: str
) -> Iterator[Spender]:
    """Hold the run's file lock and its transcript while spending.

    Args:
        run: the run folder.
        lock: its lock, verified.
        calibration_hash: see `calibration_hash(run)`.
        noise_source: "os-entropy" or "UNSAFE-seed", as the lock says.

    Raises:
        BudgetError: another process is spending, the lock does not fit the transcript, or that
            was cut or replaced.
        ReplayError: the transcript was tampered with.
    """
    if noise_source != lock.noise_source:
        raise BudgetError(
            f"noise source {noise_source!r} is not the lock's {lock.noise_source!r}",
            hint="plan a new run: the noise source is fixed by the lock",
        )
    with _exclusive(run):
        sweep(run.root)
        require_grown(run)
        appender = Appender(run.transcript)
        try:
            yield Spender(
                run, lock, appender, calibration=calibration_hash, noise_source=noise_source
            )
        finally:
            appender.close()


def close_run(run: RunDir, lock: Lock, *, without_model: bool = False) -> SpendState:
    """Close a run whose spending stopped early; a closed one stays as it is.

    Training that was cut off ends here as it would have ended: its model is made of the last
    settled steps, unless `without_model`. Removes what was made and never settled from
    `released/`, once the transcript is closed.

    Raises:
        MissingError: nothing was ever charged, or the last settled checkpoint is gone.
        ReplayError: that checkpoint is not what settled.
    """
    if not read_state(run, lock).charged:
        raise MissingError(
            "nothing was spent in this run: there is nothing to close",
            hint=f"dpsynth run, or remove {run.root}",
        )
    source = lock.noise_source
    with spending(run, lock, calibration_hash="", noise_source=source) as spender:
        if spender.state.closed:
            note("the run was closed before: no line is added to its transcript")
        if not without_model:
            finish_training(run, lock, spender.settled_digest, closed=spender.state.closed)
        spender.close()
        return spender.state


@contextmanager
def _exclusive(run: RunDir) -> Iterator[None]:
    path = run.root / ".spending.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        _take(descriptor)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BudgetError(
            "another process is spending in this run",
            hint="wait until it ends (dpsynth status RUN)",
        ) from None
