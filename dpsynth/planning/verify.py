"""From a plan to a verified plan: noise calibrated, everything composed, the lock written.

Rounding is towards privacy: multipliers are rounded up, epsilons are the pessimistic ones.
"""

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from dpsynth import __version__
from dpsynth.accounting.calibrate import round_up, smallest_scale
from dpsynth.accounting.compose import EpsilonBounds, cross_check, epsilon
from dpsynth.accounting.events import Event
from dpsynth.artifacts.ledger import Entry, Ledger, dataset_text
from dpsynth.artifacts.lock import Lock, read_lock, write_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import require_grown
from dpsynth.artifacts.spending import SpendState, read_state
from dpsynth.errors import BudgetError, MissingError, PlanError, typed
from dpsynth.planning import sources
from dpsynth.planning.schema import Plan
from dpsynth.planning.workload import active_weights, delta_slack, follows, slots
from dpsynth.planning.yaml_plan import load_plan, plan_hash

_KEY = object()
_NUDGES = 50
_CHANGED = "plan into a new run folder: dpsynth plan PLAN --run runs/NAME-2"


@dataclass(frozen=True)
class VerifiedPlan:
    """The only key that the vault takes; only `load_verified` makes one.

    `plan` holds absolute source paths; `lock` what was verified; `run` the run folder.
    """

    plan: Plan
    lock: Lock
    run: RunDir
    key: InitVar[object]

    def __post_init__(self, key: object) -> None:
        if key is not _KEY:
            raise BudgetError(
                "a VerifiedPlan is made by planning.verify.load_verified alone",
                hint="dpsynth plan PLAN, then load_verified(RUN)",
            )

    @property
    def noise_source(self) -> str:
        """What charges say of their randomness: "os-entropy" or "UNSAFE-seed"."""
        return self.lock.noise_source


def verify(plan: Plan, *, unsafe_seed: int | None = None) -> Lock:
    """Calibrate each stage's noise to the plan's budget, compose, check, and freeze.

    Raises:
        PlanError: the budget cannot be met by any noise, or the plan asks for too many slots.
        BudgetError: the composed epsilon is over the budget (no calibrated plan is).
    """
    delta, slack = _composition_delta(plan)
    multipliers, bounds = _calibrate(plan, delta)
    planned = slots(plan, multipliers)
    checks = cross_check([slot.event() for slot in planned], delta, bounds)
    return Lock(
        plan_hash=plan_hash(plan),
        facts=plan.facts(),
        budget=plan.budget.model_dump(),
        slots=planned,
        epsilon=bounds.pessimistic,
        optimistic=bounds.optimistic,
        by_stage=_by_stage(plan, multipliers, delta, bounds),
        checks=checks,
        delta_slack=slack,
        versions=_versions(),
        unsafe_seed=unsafe_seed,
    )


def warnings(plan: Plan) -> list[str]:
    """What the plan allows but should not leave unsaid."""
    found = []
    limit = 1 / (10 * plan.private.capacity)
    if plan.budget.delta > limit:
        unit = "record" if plan.budget.column is None else "unit"
        found.append(
            f"warning: delta {plan.budget.delta:g} is above 1/(10 N) = {limit:.2g} for the "
            f"declared capacity {plan.private.capacity}: a {unit} may be released in full with "
            "probability delta"
        )
    if plan.stages.train is not None and plan.sampling.method == "release":
        found.append(
            "warning: stages.train is paid for, and sampling.method: release draws no image from "
            "its model; for images from the model write sampling: {method: flow}"
        )
    return found


def make_run(
    plan_file: Path,
    run: Path | None = None,
    *,
    private: Path | None = None,
    unsafe_seed: int | None = None,
) -> VerifiedPlan:
    """`dpsynth plan`: verify the plan file and write its lock into the run folder.

    A run that has charges keeps its lock: the same plan is fine, another one is refused.
    """
    plan = sources.with_private(load_plan(plan_file), private)
    folder = RunDir(run or Path("runs") / plan.name)
    require_grown(folder)
    if _is_started(folder, plan, unsafe_seed):
        folder.make_rooms()
        sources.move_plan(folder, plan_file, plan, private)
        return load_verified(folder.root, private)
    _check_apart(plan)
    _check_cap(folder, plan)
    lock = verify(plan, unsafe_seed=unsafe_seed)
    folder.make_rooms()
    write_lock(folder.lock, lock)
    sources.write(folder, plan_file, plan, private)
    return VerifiedPlan(plan, lock, folder, _KEY)


def load_verified(run: Path, private: Path | None = None) -> VerifiedPlan:
    """Read a run's plan and lock again and verify anew, before any private file is opened.

    `private` is where the private records lie now, in place of the plan's path.

    Raises:
        MissingError: no lock, or the plan file is gone.
        PlanError: the plan file changed since `dpsynth plan`, nothing is charged yet.
        BudgetError: it changed after the first charge, or the lock is over the budget.
    """
    folder = RunDir.open(run)
    lock = read_lock(folder.lock)
    file = sources.plan_file(folder)
    plan = load_plan(file)
    state = read_state(folder, lock)
    started = state.run_id is not None
    if plan_hash(plan) != lock.plan_hash:
        if started:
            raise BudgetError("the plan changed after its first charge", hint=_CHANGED)
        raise PlanError(
            "the plan changed since it was verified",
            hint=typed("dpsynth", "plan", file, "--run", run),
        )
    _check_lock(lock, plan)
    override = private or sources.override(folder)
    plan = sources.with_private(plan, override)
    _check_apart(plan)
    if started:  # from the first charge on, the run's own dataset is the one charged then
        _list_moved(folder, lock, state, plan)
    else:
        sources.refresh(folder, file, plan, override)
    return VerifiedPlan(plan, lock, folder, _KEY)


def _composition_delta(plan: Plan) -> tuple[float, float]:
    slack = delta_slack(plan)
    delta = plan.budget.delta - slack
    if delta <= 0:
        raise PlanError(
            f"budget.delta {plan.budget.delta:g} is used up by the discrete noise's own share "
            f"({slack:.2g})",
            hint="declare a larger delta, such as `delta: 1e-5`",
        )
    return delta, slack


def _calibrate(plan: Plan, delta: float) -> tuple[dict[str, float], EpsilonBounds]:
    """Noise multiplier of each active stage, and the composed epsilon of everything."""
    weights, budget = active_weights(plan), plan.budget.epsilon
    if plan.split == "epsilon":
        found = {s: _alone(plan, s, w * budget, delta) for s, w in weights.items()}
        multipliers = {s: round_up(m) for s, m in found.items()}
        return _within(plan, multipliers, delta)
    alone = {stage: _alone(plan, stage, budget, delta) for stage in weights}
    base = {stage: alone[stage] / math.sqrt(weights[stage]) for stage in weights}
    scale = 1.0
    if len(weights) > 1:
        scale = smallest_scale(lambda s: _all_events(plan, base, s), budget, delta)
    return _within(plan, {stage: round_up(scale * m) for stage, m in base.items()}, delta)


def _all_events(plan: Plan, base: Mapping[str, float], scale: float = 1.0) -> list[Event]:
    multipliers = {stage: scale * m for stage, m in base.items()}
    return [slot.event() for slot in slots(plan, multipliers)]


def _alone(plan: Plan, stage: str, budget: float, delta: float) -> float:
    return smallest_scale(lambda m: _all_events(plan, {stage: m}), budget, delta)


def _within(
    plan: Plan, multipliers: dict[str, float], delta: float
) -> tuple[dict[str, float], EpsilonBounds]:
    """Nudge rounded multipliers up until the composed epsilon is within the budget."""
    for _ in range(_NUDGES):
        bounds = epsilon(_all_events(plan, multipliers), delta)
        if bounds.pessimistic <= plan.budget.epsilon:
            return multipliers, bounds
        multipliers = {s: round_up(math.nextafter(m, math.inf)) for s, m in multipliers.items()}
    raise BudgetError(
        f"the composed epsilon {bounds.pessimistic:.6g} is over the budget {plan.budget.epsilon:g}",
        hint="declare a larger epsilon, fewer steps or a lower rate",
    )


def _by_stage(
    plan: Plan, multipliers: Mapping[str, float], delta: float, total: EpsilonBounds
) -> dict[str, Any]:
    weights = active_weights(plan)
    rows: dict[str, Any] = {}
    for stage, multiplier in multipliers.items():
        events = _all_events(plan, {stage: multiplier})
        bounds = total if len(multipliers) == 1 else epsilon(events, delta)
        train = plan.stages.train if stage == "train" else None
        rows[stage] = {
            "executions": train.steps if train else len(events),
            "noise_multiplier": multiplier,
            "rate": train.rate if train else None,
            "epsilon_alone": bounds.pessimistic,
            "share": weights[stage],
        }
    return rows


def _check_lock(lock: Lock, plan: Plan) -> None:
    """Trust nothing in the lock but its noise: slots and budget follow from the plan."""
    if not follows(lock, plan):
        raise BudgetError("the lock does not follow from the plan", hint=_CHANGED)
    bounds = epsilon([slot.event() for slot in lock.slots], plan.budget.delta - lock.delta_slack)
    if not bounds.pessimistic <= plan.budget.epsilon:
        raise BudgetError(
            f"the lock composes to epsilon {bounds.pessimistic:.6g}, over the budget "
            f"{plan.budget.epsilon:g}; no private file was opened",
            hint=_CHANGED,
        )


def _started(run: RunDir, lock: Lock) -> bool:
    """Whether the transcript is open: from then on the lock stays as it is."""
    return read_state(run, lock).run_id is not None


def _is_started(run: RunDir, plan: Plan, unsafe_seed: int | None) -> bool:
    """Whether the run keeps its lock. Raises BudgetError where the plan is another one by now."""
    if not run.transcript.is_file():
        return False
    try:
        lock = read_lock(run.lock)
    except MissingError:
        raise BudgetError(
            "the run has a transcript but no lock: it was spent under a lock that is gone",
            hint="restore plan.lock.json, or " + _CHANGED,
        ) from None
    if not _started(run, lock):
        return False
    if lock.plan_hash != plan_hash(plan) or lock.unsafe_seed != unsafe_seed:
        raise BudgetError("the plan changed after its first charge", hint=_CHANGED)
    return True


def _check_apart(plan: Plan) -> None:
    """Refuse a plan whose public images are the private ones: those are not protected at all."""
    private = plan.private.source.model_dump(mode="json")
    public = [source.model_dump(mode="json") for source in plan.public]
    has_path = private.keys() & {"path", "images"}
    if has_path and dataset_text(private) in map(dataset_text, public) and not plan.private.public:
        raise PlanError(
            "a public source is the private one: what comes from public data is not protected",
            hint="name other images under `public:`",
        )


def _check_cap(run: RunDir, plan: Plan) -> None:
    """Refuse early what the private dataset's ledger would refuse at the first charge."""
    cap = plan.private.cap
    if cap is None:
        return
    dataset = dataset_text(plan.private.source.model_dump(mode="json"))
    ledger = Ledger.beside(run.root, dataset)
    ledger.check(plan.budget.epsilon, plan.budget.delta, cap.model_dump())


def _list_moved(run: RunDir, lock: Lock, state: SpendState, plan: Plan) -> None:
    """List a started run for the dataset that `--private` names now, too: it may be another one."""
    dataset = dataset_text(plan.private.source.model_dump(mode="json"))
    if dataset == Ledger.of(run).dataset:
        return
    budget, cap = lock.budget, plan.private.cap
    entry = Entry(
        run_id=str(state.run_id),
        run=run.name,
        plan_hash=lock.plan_hash,
        epsilon=budget["epsilon"],
        delta=budget["delta"],
        state="closed" if state.closed else "open",
    )
    held = None if cap is None or state.closed else cap.model_dump()
    Ledger.beside(run.root, dataset).enter(entry, held)


def _versions() -> dict[str, str]:
    import platform

    import numpy
    import pydantic

    return {
        "dpsynth": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "pydantic": pydantic.VERSION,
    }
