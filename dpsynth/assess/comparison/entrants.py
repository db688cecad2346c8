"""What is compared: runs that are there, and runs that plans ask for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dpsynth.artifacts.files import canonical_json, read_json, sha256_bytes
from dpsynth.artifacts.ledger import dataset_text
from dpsynth.artifacts.lock import plan_hash as hash_of
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.assess.comparison.derived import Derived, stem_of, with_epsilon
from dpsynth.errors import BudgetError, MissingError, UsageError, typed
from dpsynth.planning import sources
from dpsynth.planning.schema import HeldOut, Plan, SourceHeldOut
from dpsynth.planning.source_kinds import Source
from dpsynth.planning.steps import status
from dpsynth.planning.yaml_plan import load_plan

_SOURCE: TypeAdapter[Source] = TypeAdapter(Source)
_HELD_OUT: TypeAdapter[HeldOut] = TypeAdapter(HeldOut)
RUNS = Path("runs")
"""Where `dpsynth run` puts a plan's run, and so the ledger that its budget adds up in."""


@dataclass(frozen=True)
class Entrant:
    """One run of the comparison.

    Attributes:
        run: its folder, there or not.
        facts: of its plan (`Plan.facts`).
        places: where its private and its held-out records lie, as `dataset_text` tells them apart.
        given: what was typed for it, which several entrants may come of.
        plan_file: what it is planned from; None for a run folder, which knows its own.
        derived: the plan file, where it is one that the comparison makes.
    """

    run: RunDir
    facts: dict[str, Any]
    places: tuple[str, str]
    given: Path
    plan_file: Path | None = None
    derived: Derived | None = None

    @property
    def name(self) -> str:
        """The run folder's name, by which errors and tables call it."""
        return self.run.name

    @property
    def plan(self) -> str:
        """The plan's name."""
        return str(self.facts["name"])

    @property
    def budget(self) -> dict[str, Any]:
        """The plan's whole budget."""
        budget: dict[str, Any] = self.facts["budget"]
        return budget

    @property
    def epsilon(self) -> float:
        """The budget's epsilon."""
        return float(self.budget["epsilon"])

    @property
    def public(self) -> bool:
        """Whether the plan declares its private source public."""
        return bool(self.facts["private"]["public"])

    @property
    def cap(self) -> dict[str, float] | None:
        """The plan's limit on all runs of its dataset."""
        cap: dict[str, float] | None = self.facts["private"].get("cap")
        return cap

    @property
    def started(self) -> bool:
        """Whether something was charged: then the ledger lists it, and its budget is spent."""
        return self.run.transcript.is_file()

    @property
    def finished(self) -> bool:
        """Whether every step of the plan is done."""
        return self.run.lock.is_file() and status(self.run).next_command is None

    @property
    def settings(self) -> str:
        """Hash of all that makes the method: plans that differ in budget alone share it."""
        kept = {key: value for key, value in self.facts.items() if key != "name"}
        budget = {key: value for key, value in self.budget.items() if key != "epsilon"}
        private = {key: value for key, value in self.facts["private"].items() if key != "cap"}
        return sha256_bytes(canonical_json(kept | {"budget": budget, "private": private}))

    def require_same_plan(self) -> None:
        """Refuse a finished run whose plan file says something else by now (BudgetError)."""
        lock = read_lock(self.run.lock)
        if self.plan_file is not None and lock.plan_hash != hash_of(self.facts):
            raise BudgetError(
                f"{self.name} was spent under another plan than {self.plan_file.name} says now",
                hint="give the plan another name, or compare the run: "
                + typed("dpsynth", "compare", self.run.root),
            )


def gathered(
    given: Sequence[Path],
    *,
    epsilons: Sequence[float],
    repeat: int,
    folder: Path,
    private: Path | None,
) -> list[Entrant]:
    """The entrants of plan files and run folders, in the order typed; nothing is written.

    Args:
        given: plan files and run folders.
        epsilons: at which each plan file is taken; none: at its own.
        repeat: runs of each plan and epsilon.
        folder: where derived plan files will lie.
        private: see `--private`.

    Raises:
        UsageError: one run twice, or nothing.
        PlanError, MissingError: a plan or a run that cannot be read.
    """
    found: list[Entrant] = []
    for path in given:
        if path.is_dir():
            found.append(of_run(path, private))
            continue
        for derived in _at(path, epsilons, folder):
            found += _of_plan(path, derived, repeat, private)
    _require_distinct(found)
    return found


def of_run(path: Path, private: Path | None = None) -> Entrant:
    """A run that is there. Opens neither its plan file nor any record."""
    run = RunDir.open(path)
    lock = read_lock(run.lock)
    try:
        known = read_json(run.curator / sources.NAME)
    except MissingError:
        raise MissingError(
            f"{run.name} does not know where its private records lie (curator/{sources.NAME} is "
            "missing), so that nobody can tell whether they are the others'",
            hint="dpsynth plan PLAN --run " + str(path),
        ) from None
    plan = Plan.of_facts(lock.facts)
    held = plan.private.model_copy(
        update={
            "source": _SOURCE.validate_python(known["private"]),
            "held_out": _HELD_OUT.validate_python(known["held_out"]),
        }
    )
    kept = known.get("override")
    moved = private if private is not None or kept is None else Path(str(kept))
    plan = sources.with_private(plan.model_copy(update={"private": held}), moved)
    return Entrant(run, lock.facts, _places(plan), path)


def _at(path: Path, epsilons: Sequence[float], folder: Path) -> list[Derived | None]:
    """A plan at each epsilon; None stands for the plan as it is."""
    return [with_epsilon(path, value, folder) for value in epsilons] or [None]


def _of_plan(
    path: Path, derived: Derived | None, repeat: int, private: Path | None
) -> list[Entrant]:
    plan = load_plan(path) if derived is None else derived.plan
    plan = sources.with_private(plan, private)
    file = path if derived is None else derived.path
    names = [plan.name] if repeat == 1 else [f"{plan.name}-{n}" for n in range(1, repeat + 1)]
    return [
        Entrant(RunDir(RUNS / name), plan.facts(), _places(plan), path, file, derived)
        for name in names
    ]


def _places(plan: Plan) -> tuple[str, str]:
    held_out = plan.private.held_out
    other = held_out.source if isinstance(held_out, SourceHeldOut) else None
    return (
        dataset_text(plan.private.source.model_dump(mode="json")),
        "" if other is None else dataset_text(other.model_dump(mode="json")),
    )


def _require_distinct(found: Sequence[Entrant]) -> None:
    known: dict[Path, Entrant] = {}
    for one in found:
        root = one.run.root.resolve()
        other = known.setdefault(root, one)
        if other is not one:
            raise UsageError(
                f"{other.given} and {one.given} are one run: {one.run.root}",
                hint="name each once, and give every plan a `name:` of its own",
            )
    if not found:
        raise UsageError("nothing to compare", hint="dpsynth compare PLAN...")


def labels(entrants: Sequence[Entrant]) -> dict[Path, str]:
    """The method of each run, by its folder: one path of the figure, over epsilon.

    Plans are one method where they differ in name, epsilon and cap alone, or where their names
    differ in a last `-eps-E` alone. A method is called by its plan's name without that.
    """
    methods: list[tuple[str, str, str]] = []  # settings, stem, label
    made: dict[Path, str] = {}
    for one in entrants:
        settings, stem = one.settings, stem_of(one.plan)
        label = next((m[2] for m in methods if m[0] == settings), None)
        if label is None and stem != one.plan:
            label = next((m[2] for m in methods if m[1] == stem), None)
        if label is None:
            taken = {m[2] for m in methods}
            label = stem if stem not in taken else f"{stem} ({one.name})"
        methods.append((settings, stem, label))
        made[one.run.root] = label
    return made
