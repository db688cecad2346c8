"""What a run has done, what it has spent, and what to type next: from lock and folder alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsynth.accounting.compose import epsilon
from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.lock import Lock, read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import PLAIN, read_summary
from dpsynth.artifacts.settled import MODEL, require_grown
from dpsynth.artifacts.spending import SpendState, read_state
from dpsynth.artifacts.trained import WARM
from dpsynth.artifacts.votes import population_name
from dpsynth.errors import DpsynthError, UsageError, typed
from dpsynth.planning.candidates import is_allocated
from dpsynth.planning.sources import plan_file

_RELEASES = {
    "moments": "release-moments",
    "embedding": "release-embedding",
    "votes": "evolve",
    "central": "release-central",
}
"""Stages that release something the later steps rest on, and the command of each."""
COARSE = "coarse"
"""Folder of `released/` with the samples that `complete-wavelet` has yet to complete."""


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
            closed = "the run was closed before the release"
            why = closed if self.state.closed else "a crash forfeited the release"
            return f"dpsynth plan PLAN --run {self.run.root}-2   ({why})"
        step = next((step for step in self.steps if not step.done), None)
        if step is not None and step.name == "allocate":
            return _plan_again(self.run)
        return None if step is None else typed("dpsynth", step.command, self.run.root)

    @property
    def release_lost(self) -> bool:
        """Whether some release is neither settled nor has a slot left that may be charged."""
        settled, charged, closed = self.state.settled, self.state.charged, self.state.closed
        return any(
            all((closed or slot.id in charged) and slot.id not in settled for slot in group)
            for stage in _RELEASES
            for group in self.lock.releases(stage).values()
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
        BudgetError: `released/` holds what an earlier transcript charged, and that is gone: what
            was spent is not known, and nothing may be said of it.
    """
    lock = read_lock(run.lock)
    require_grown(run)
    state = read_state(run, lock)
    return Status(run, lock, state, tuple(_steps(run, lock, state)))


def _steps(run: RunDir, lock: Lock, state: SpendState) -> Iterator[Step]:
    facts = lock.facts
    yield Step("plan", "plan", True)
    spent_any = bool(state.charged)
    yield Step("check", "check", spent_any or _passed(run.curator / "check.json"))
    yield Step("pretrain", "pretrain", run.calibration.is_file())
    if lock.allocation is not None:
        yield Step("allocate", "plan", spent_any or is_allocated(run, lock))
    yield from _releases(run, lock, state)
    if facts["stages"]["train"] is not None:
        yield Step("train", "train", state.closed or _trained(run, lock, state))
    elif spent_any and not state.closed and lock.last_stage in _RELEASES:
        yield Step("close", "close", False)  # a crash came between the release and its close
    folders = _sample_folders(run, facts)
    sampled = all(read_summary(folder) is not None for folder in folders.values())
    if _is_completed(facts):
        coarse = read_summary(run.released / COARSE)
        yield Step("sample", "sample", coarse is not None)
        completed = sampled and _is_of(run.released / "samples", coarse)
        yield Step("complete-wavelet", "complete-wavelet", completed)
    else:
        yield Step("sample", "sample", sampled)
    if lock.last_stage == "evaluation":
        over = state.closed or _over(lock, state, "evaluation")
        released = _released(lock, state, "evaluation")
        if released or not over:  # one that a crash forfeited, or a close gave up, is no step
            yield Step("release-evaluation", "release-evaluation", released)
        if over and not state.closed:
            yield Step("close", "close", False)  # a crash forfeited the release, or its close
    yield Step("evaluate", "evaluate", sampled and _evaluated(run, folders))


def _releases(run: RunDir, lock: Lock, state: SpendState) -> Iterator[Step]:
    """The releases of the plan's stages, each with what is made of it before any training."""
    facts = lock.facts
    for stage, command in _RELEASES.items():
        if facts["stages"].get(stage) is not None:
            done = _released(lock, state, stage)
            yield Step(command, command, done and (stage != "votes" or _evolved(run, lock)))
    if facts["distillation"] is not None:
        done = (run.released / "distilled.safetensors").is_file()
        yield Step("distil", "train", done)
    if facts["stages"].get("embedding") is not None:
        yield Step("fit", "train", (run.released / "generator.safetensors").is_file())
    if facts["stages"].get("central") is not None:
        yield Step("warm-up", "train", state.closed or (run.released / WARM).is_file())


def _evolved(run: RunDir, lock: Lock) -> bool:
    """Whether the last population is there: samples are of it."""
    rounds = lock.facts["stages"]["votes"]["rounds"]
    return (run.released / population_name(rounds)).is_file()


def _plan_again(run: RunDir) -> str:
    """What plans a run again, once the public calibration is there."""
    try:
        return typed("dpsynth", "plan", plan_file(run), "--run", run.root)
    except DpsynthError:
        return f"dpsynth plan PLAN --run {run.root}"


def _passed(report: Path) -> bool:
    """Whether the records were found to fit: one bit, which `check` tells anyone by its exit."""
    try:
        return read_json(report).get("ok") is True
    except DpsynthError:
        return False


def _released(lock: Lock, state: SpendState, stage: str = "moments") -> bool:
    """Whether every release of the stage is settled: each of its rounds."""
    groups = lock.releases(stage).values()
    return all(any(slot.id in state.settled for slot in group) for group in groups)


def _trained(run: RunDir, lock: Lock, state: SpendState) -> bool:
    """Whether training that does not close the transcript is over: its model is there."""
    slots = lock.stage_slots("train")
    over = all(slot.id in state.charged for slot in slots) and lock.last_stage != "train"
    return over and (run.released / MODEL).is_file()


def _over(lock: Lock, state: SpendState, stage: str) -> bool:
    """Whether nothing is left to do in a stage: each release settled, or out of slots."""
    return all(
        any(slot.id in state.settled for slot in group)
        or all(slot.id in state.charged for slot in group)
        for group in lock.releases(stage).values()
    )


def _is_completed(facts: dict[str, Any]) -> bool:
    """Whether samples are coarse at first: the plan has tokens of more than one scale."""
    return bool((facts.get("tokens") or {}).get("levels"))


def _is_of(folder: Path, coarse: dict[str, Any] | None) -> bool:
    """Whether completed samples are of these coarse ones, where both say what they are made of."""
    completed = read_summary(folder)
    if completed is None or coarse is None:
        return completed is not None
    origin, content = completed["origin"], coarse["content_sha256"]
    same = origin.get(COARSE, coarse["origin"]) == coarse["origin"]
    return bool(same and origin.get("coarse_sha256", content) == content)


def _sample_folders(run: RunDir, facts: dict[str, Any]) -> dict[str, Path]:
    """The plan's samples, by the evaluation's key for them; those without augmentation too."""
    folders = {"samples": run.released / "samples"}
    if facts["sampling"].get("augment") is not None:
        folders["samples_plain"] = run.released / f"samples-{PLAIN}"
    return folders


def _evaluated(run: RunDir, folders: dict[str, Path]) -> bool:
    """Whether the evaluation is of the samples that are there."""
    path = run.curator / "evaluation.json"
    if not path.is_file():
        return False
    try:
        report = read_json(path)
    except UsageError:  # damaged: evaluate again
        return False
    return all(
        report.get(key, {}).get("metadata_sha256") == sha256_file(folder / "metadata.csv")
        for key, folder in folders.items()
    )
