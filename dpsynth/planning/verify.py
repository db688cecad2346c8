"""From a plan to a verified plan: noise calibrated, everything composed, the lock written.

Rounding is towards privacy: multipliers are rounded up, epsilons are the pessimistic ones.
"""

from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from dpsynth import __version__
from dpsynth.accounting.compose import cross_check, epsilon
from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.ledger import Entry, Ledger, dataset_text
from dpsynth.artifacts.lock import Lock, read_lock, write_lock
from dpsynth.artifacts.rooms import RunDir, require_whole
from dpsynth.artifacts.settled import require_grown
from dpsynth.artifacts.spending import SpendState, calibration_hash, read_state
from dpsynth.errors import BudgetError, MissingError, PlanError, UsageError, typed
from dpsynth.planning import sources
from dpsynth.planning.allocation import Profile, profile_in
from dpsynth.planning.calibrated import Calibrated, calibrate, composition_delta
from dpsynth.planning.candidates import Choice, choose, is_allocated, waiting
from dpsynth.planning.schema import Plan
from dpsynth.planning.workload import active_weights, follows, slots
from dpsynth.planning.yaml_plan import load_plan, plan_hash

_KEY = object()
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


def verify(plan: Plan, *, unsafe_seed: int | None = None, profile: Profile | None = None) -> Lock:
    """Calibrate each stage's noise to the plan's budget, compose, check, and freeze.

    `profile`: what public data say of the time buckets, for plans with an allocation. Without it
    such a plan's lock is uniform and provisional: nothing may spend under it.

    Raises:
        PlanError: the budget cannot be met by any noise, or the plan asks for too many slots.
        BudgetError: the composed epsilon is over the budget (no calibrated plan is).
    """
    delta, slack = composition_delta(plan)
    settings = plan.stages.train
    allocated = settings is not None and settings.allocation is not None
    choice = choose(plan, profile, delta) if allocated and profile is not None else None
    made = calibrate(plan, delta) if choice is None else _calibrated(choice)
    bounds = made.bounds
    planned = slots(plan, made.multipliers, made.clips)
    checks = cross_check([slot.event() for slot in planned], delta, bounds)
    allocation = choice.to_json() if choice else None
    if settings is not None and allocated and choice is None:
        allocation = waiting(settings)
    return Lock(
        plan_hash=plan_hash(plan),
        facts=plan.facts(),
        budget=plan.budget.model_dump(),
        slots=planned,
        epsilon=bounds.pessimistic,
        optimistic=bounds.optimistic,
        by_stage=_by_stage(plan, made, delta),
        checks=checks,
        delta_slack=slack,
        versions=_versions(),
        unsafe_seed=unsafe_seed,
        allocation=allocation,
    )


def _calibrated(choice: Choice) -> Calibrated:
    """The noise of the candidate that won. It was verified by itself, as every other was."""
    made = choice.chosen.calibrated
    if made is None:
        raise BudgetError("the chosen candidate was never verified")
    return made


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
    require_whole(folder.root)
    require_grown(folder)
    if _is_started(folder, plan, unsafe_seed):
        folder.make_rooms()
        sources.move_plan(folder, plan_file, plan, private)
        return load_verified(folder.root, private)
    _check_apart(plan)
    _check_cap(folder, plan)
    lock = verify(plan, unsafe_seed=unsafe_seed, profile=_profile(folder, plan))
    folder.make_rooms()
    write_lock(folder.lock, lock)
    sources.write(folder, plan_file, plan, private)
    return VerifiedPlan(plan, lock, folder, _KEY)


def allocate(verified: VerifiedPlan) -> VerifiedPlan:
    """Plan again after `pretrain`: choose clip and noise by time bucket, and write the lock.

    Once anything is charged the lock stays as it is.

    Raises:
        MissingError: the run has no public calibration.
        PlanError: it has no profile of the plan's time buckets.
    """
    run, lock = verified.run, verified.lock
    if _started(run, lock):
        return verified
    profile = _profile(run, verified.plan)
    if profile is None:
        raise PlanError(
            "public/calibration.json has no profile of this plan's time buckets",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    made = verify(verified.plan, unsafe_seed=lock.unsafe_seed, profile=profile)
    write_lock(run.lock, made)
    return VerifiedPlan(verified.plan, made, run, _KEY)


def require_allocated(verified: VerifiedPlan) -> None:
    """Refuse to spend under a lock whose time buckets are not those of the public calibration.

    Call before the first charge of a stage. Plans without an allocation pass.

    Raises:
        PlanError: the plan was not planned again after `pretrain`, or is of another calibration.
        MissingError: the run has no public calibration.
    """
    lock, run = verified.lock, verified.run
    if lock.allocation is None:
        return
    calibration_hash(run)
    hint = typed("dpsynth", "plan", sources.plan_file(run), "--run", run.root)
    if lock.provisional:
        raise PlanError(
            "the plan's time buckets have no clips and noise of their own yet: plan again after "
            "pretrain",
            hint=hint,
        )
    if not is_allocated(run, lock):
        if _started(run, lock):
            hint = "restore public/calibration.json: what was planned and spent rests on it"
        raise PlanError(
            "the lock's time buckets are not those of public/calibration.json", hint=hint
        )


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


def _by_stage(plan: Plan, made: Calibrated, delta: float) -> dict[str, Any]:
    weights = active_weights(plan)
    rows: dict[str, Any] = {}
    for stage, multiplier in made.multipliers.items():
        own = slots(plan, {stage: multiplier}, made.clips)
        single = len(made.multipliers) == 1
        bounds = made.bounds if single else epsilon([slot.event() for slot in own], delta)
        rows[stage] = {
            "executions": sum(slot.steps or 1 for slot in own),
            "noise_multiplier": multiplier,
            "rate": own[0].rate,
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


def _profile(run: RunDir, plan: Plan) -> Profile | None:
    """The run's public profile of the plan's time buckets; None while there is none that fits."""
    settings = plan.stages.train
    if settings is None or settings.allocation is None or not run.calibration.is_file():
        return None
    try:
        profile = profile_in(read_json(run.calibration))
    except UsageError:  # damaged: pretrain makes it anew
        return None
    fits = profile is not None and profile.fits(settings.buckets, plan.distillation)
    return profile if fits else None


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
