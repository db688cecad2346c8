"""What a run has done, what it has spent, and what to type next: from lock and folder alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsynth.accounting.compose import epsilon
from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.lock import Lock, Slot, read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import read_summary
from dpsynth.artifacts.spending import SpendState, read_state
from dpsynth.errors import UsageError, typed


@dataclass(frozen=True)
class Step:
    """One step of a run; `command` is the subcommand that does it."""

    name: str
    command: str
    done: bool


@dataclass(frozen=True)
class Status:
    """A run as it stands."""

    run: RunDir
    lock: Lock
    state: SpendState
    steps: tuple[Step, ...]

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of every charge so far, forfeited ones too, composed (takes a second)."""
        charged = [slot for slot in self.lock.slots if slot.id in self.state.charged]
        delta = self.lock.budget["delta"] - self.lock.delta_slack
        return epsilon([slot.event() for slot in charged], delta).pessimistic if charged else 0.0

    @property
    def next_command(self) -> str | None:
        """What to type next; None when all is done."""
        if self.release_lost:
            return f"dpsynth plan PLAN --run {self.run.root}-2   (a crash forfeited the release)"
        step = next((step for step in self.steps if not step.done), None)
        return None if step is None else typed("dpsynth", step.command, self.run.root)

    @property
    def release_lost(self) -> bool:
        """Whether some release is neither settled nor has a slot left."""
        settled, charged = self.state.settled, self.state.charged
        return any(
            all(slot.id in charged and slot.id not in settled for slot in group)
            for group in _releases(self.lock)
        )

    def step(self, name: str) -> Step | None:
        """The step of that name, if the plan has it."""
        return next((step for step in self.steps if step.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """The status as plain JSON values: planned and spent, nothing measured."""
        return {
            "run": str(self.run.root),
            "plan": self.lock.facts["name"],
            "steps": {step.name: step.done for step in self.steps},
            "slots": len(self.lock.slots),
            "charged": len(self.state.charged),
            "forfeited": len(self.state.forfeited),
            "closed": self.state.closed,
            "epsilon_spent": self.epsilon_spent,
            "epsilon_planned": self.lock.epsilon,
            "budget": self.lock.budget,
            "noise_source": self.lock.noise_source,
            "next": self.next_command,
        }


def status(run: RunDir) -> Status:
    """Read where a run stands. Opens neither the plan file nor any data.

    Raises:
        MissingError: no lock.
        ReplayError: the lock or the transcript was edited.
    """
    lock = read_lock(run.lock)
    state = read_state(run, lock)
    return Status(run, lock, state, tuple(_steps(run, lock, state)))


def _steps(run: RunDir, lock: Lock, state: SpendState) -> Iterator[Step]:
    facts = lock.facts
    yield Step("plan", "plan", True)
    spent_any = bool(state.charged)
    yield Step("check", "check", spent_any or (run.curator / "check.json").is_file())
    yield Step("pretrain", "pretrain", run.calibration.is_file())
    if facts["stages"]["moments"] is not None:
        yield Step("release-moments", "release-moments", _released(lock, state))
    if facts["distillation"] is not None:
        done = (run.released / "distilled.safetensors").is_file()
        yield Step("distil", "train", done)
    if facts["stages"]["train"] is not None:
        yield Step("train", "train", state.closed)  # training ends by closing the transcript
    elif spent_any and not state.closed:
        yield Step("close", "close", False)  # a crash came between the release and its close
    samples = run.released / "samples"
    yield Step("sample", "sample", read_summary(samples) is not None)
    yield Step("evaluate", "evaluate", _evaluated(run, samples))


def _released(lock: Lock, state: SpendState) -> bool:
    return all(any(slot.id in state.settled for slot in group) for group in _releases(lock))


def _releases(lock: Lock) -> list[list[Slot]]:
    """The moments stage's slots, those of one release together."""
    groups: dict[str, list[Slot]] = {}
    for slot in lock.stage_slots("moments"):
        groups.setdefault(slot.release, []).append(slot)
    return list(groups.values())


def _evaluated(run: RunDir, samples: Path) -> bool:
    """Whether the evaluation is of the samples that are there."""
    path = run.curator / "evaluation.json"
    if not path.is_file() or read_summary(samples) is None:
        return False
    try:
        measured = read_json(path).get("samples", {})
    except UsageError:  # damaged: evaluate again
        return False
    return bool(measured.get("metadata_sha256") == sha256_file(samples / "metadata.csv"))
