"""`dpsynth audit`: train worlds with canaries under the plan, attack them, and judge."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpsynth import __version__
from dpsynth.artifacts.files import (
    canonical_json,
    read_json,
    sha256_bytes,
    sha256_file,
    write_json,
)
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import read_samples, read_summary
from dpsynth.artifacts.settled import MODEL
from dpsynth.assess.audit.attacks import membership
from dpsynth.assess.audit.building import Builder, Spec, specs, world_of
from dpsynth.assess.audit.canaries import CANARIES, LEAST, MOST, CanaryKind, draw_canaries
from dpsynth.assess.audit.chain import prior_of
from dpsynth.assess.audit.journal import Journal, audit_folder, journal
from dpsynth.assess.audit.measuring import (
    Attacked,
    attack_world,
    exposures,
    membership_row,
    promised,
)
from dpsynth.assess.audit.picture import draw
from dpsynth.assess.audit.records import Records, coded, private_records, public_records
from dpsynth.assess.audit.store import as_reference, load_world, save_world
from dpsynth.assess.audit.verdict import NAMES, Allowed, judge
from dpsynth.assess.audit.worlds import CONTROLS, OwnRun, Pair, Reference, World
from dpsynth.assess.check import ensure_checked
from dpsynth.console import mute, note, progress
from dpsynth.errors import PlanError, UsageError
from dpsynth.models.velocity import load_for
from dpsynth.planning.allocation import profile_in
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.rounds import LAST
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan, require_allocated
from dpsynth.planning.workload import coordinates, moment_statistics
from dpsynth.public.projection import load_release_space
from dpsynth.public.representation import Representation
from dpsynth.vault.checked import fingerprint

FORMAT = "dpsynth-audit-1"
REPORT, PICTURE = "audit.json", "audit.png"
REFERENCES, MOST_REFERENCES = 8, 256
SAMPLES, QUICK_SAMPLES = 2_000, 500
MOST_SAMPLES = 10_000


@dataclass(frozen=True)
class Asked:
    """What an audit is asked to do.

    quick: no reference models, fewer samples. canaries: m of each world; None takes 200, or fewer
    where the plan releases too few numbers to tell them apart. canary_images: what they show.
    references: models for likelihood ratios; None takes the default. public_data: public images
    stand in for the private records.
    """

    quick: bool = False
    canaries: int | None = None
    canary_images: CanaryKind = "patterns"
    references: int | None = None
    public_data: bool = False


def audit(verified: VerifiedPlan, asked: Asked = Asked()) -> dict[str, Any]:
    """Audit a run's plan; write `curator/audit/audit.json` and `audit.png`; return the report.

    It trains models of its own, releases nothing and spends nothing. Cut off, it goes on with the
    first world that was not finished. With `public_data` the folder is `curator/audit-public-data`.

    Raises:
        PlanError: the plan trains spectral tokens, its captions are free, or it releases votes,
            central images or a mean embedding: no attack or no canary is there for these yet.
        UsageError: numbers out of range.
        MissingError: `dpsynth pretrain` has not run.
        DataError: the private records do not fit the plan.
        BudgetError: another process audits this run.
    """
    plan, run = verified.plan, verified.run
    require_known(plan)
    _check_numbers(asked)
    count = canaries_of(plan, asked)
    asked = replace(asked, canaries=count, references=_references(plan, asked))
    require_allocated(verified)
    space = load_release_space(run, plan).representation
    if not asked.public_data:
        ensure_checked(verified)
    records = public_records(plan, run) if asked.public_data else private_records(verified)
    canaries = draw_canaries(plan, space, count, asked.canary_images, records.marks, run=run)
    profile = profile_in(read_json(run.calibration)) if verified.lock.allocation else None
    planned = specs(plan, verified.lock, profile, asked.references or 0)
    builder = Builder(run, records, canaries, QUICK_SAMPLES if asked.quick else SAMPLES)
    folder = audit_folder(run, public_data=asked.public_data)
    with journal(folder, _facts(verified, asked, planned, canaries)) as held:
        _build(held, builder, planned)
        report = _judged(held, planned, space.radius, asked)
        own = [] if asked.public_data else own_run(run, records, builder.representation)
        report |= {"own_run": own}
        write_json(folder / REPORT, report, mode=0o600)
        held.close(folder / REPORT)
    return {**report, "where": str(folder / REPORT), "picture": str(folder / PICTURE)}


def require_known(plan: Plan) -> None:
    """Raise PlanError for a plan that has no audit yet: it would pass without being attacked."""
    if plan.representation.kind == "tokens":
        raise PlanError(
            "an audit has no attack on private training of spectral tokens yet: its gradients, its "
            "model and its samples are not audited",
            hint="audit a plan of a flow with the same stages.train, which the same engine clips, "
            "noises and charges",
        )
    for stage in ("embedding", "votes", "central"):
        if getattr(plan.stages, stage) is not None:
            raise PlanError(
                f"an audit has no attack on stages.{stage} yet",
                hint="its sensitivity is derived in docs/maths and tested against searched "
                "neighbours; audit a plan with stages.moments or stages.train",
            )
    if isinstance(plan.private.captions, FreeCaptions):
        raise PlanError(
            "an audit has no canaries with free captions yet",
            hint="audit a plan of the same mechanisms with classes or a template of captions",
        )


def _check_numbers(asked: Asked) -> None:
    if asked.canaries is not None and not LEAST <= asked.canaries <= MOST:
        raise UsageError(
            f"{asked.canaries} canaries were asked for, expected {LEAST} to {MOST}",
            hint=f"--canaries {CANARIES}",
        )
    if asked.references is not None and not 0 <= asked.references <= MOST_REFERENCES:
        raise UsageError(
            f"{asked.references} reference models were asked for, expected 0 to {MOST_REFERENCES}",
            hint=f"--references {REFERENCES}",
        )


def canaries_of(plan: Plan, asked: Asked) -> int:
    """How many canaries: by default not more than a third of the numbers of the first release.

    Beyond, their bits cannot be told apart even without noise, and controls would be missed.
    """
    if asked.canaries is not None or plan.stages.moments is None:
        return CANARIES if asked.canaries is None else asked.canaries
    first = moment_statistics(plan, plan.stages.moments)
    numbers = sum(coordinates(s) for name, s, _ in first if not name.startswith(LAST))
    return max(LEAST, min(CANARIES, numbers // 3))


def _references(plan: Plan, asked: Asked) -> int:
    """Reference models to train: none, and a word on it, where no model is to be compared."""
    if plan.stages.train is None and plan.distillation is None:
        if asked.references:
            note(
                f"--references {asked.references} is ignored: the plan trains no model, "
                "so that no likelihood ratio can be taken"
            )
        return 0
    if asked.references is not None:
        return asked.references
    return 0 if asked.quick else REFERENCES


def _facts(
    verified: VerifiedPlan, asked: Asked, planned: tuple[Spec, ...], canaries: Pair
) -> dict[str, Any]:
    """All that decides an audit: another value starts it anew."""
    return {
        "dpsynth": __version__,
        "plan_hash": verified.lock.plan_hash,
        "run_lock_hash": verified.lock.lock_hash,
        "calibration_hash": sha256_file(verified.run.calibration),
        "records": "public" if asked.public_data else fingerprint(verified),
        "asked": asdict(asked),
        "canaries_sha256": sha256_bytes(canaries[0].tobytes() + canaries[1].tobytes()),
        "worlds": [
            {
                "name": spec.name,
                "control": spec.control,
                "kind": spec.kind,
                "epsilon": spec.lock.epsilon,
                "delta": spec.lock.budget["delta"],
                "slots_sha256": sha256_bytes(
                    canonical_json({"slots": [slot.to_json() for slot in spec.lock.slots]})
                ),
            }
            for spec in planned
        ],
    }


def _build(held: Journal, builder: Builder, planned: tuple[Spec, ...]) -> None:
    """Every world that is not finished yet, each under a bar of its own."""
    for number, spec in enumerate(planned, start=1):
        if held.finished(spec.name):
            continue
        attempt = held.attempt(spec.name)

        def charge(slot: Slot, spec: Spec = spec, attempt: int = attempt) -> None:
            held.charge(spec.name, attempt, slot, spec.lock.noise_source)

        said = f"training {number} of {len(planned)}: {_said(spec)}"
        with progress(said, max(1, spec.steps)) as bar, mute():
            canaries, observed = builder.build(spec, charge, bar.advance)
        save_world(held.path(spec.name), canaries, observed)
        held.settle(spec.name, attempt)


def _said(spec: Spec) -> str:
    if spec.control is not None:
        return f"planted fault, {NAMES[spec.control]}"
    if spec.reference:
        return "a reference model"
    seen = "gradients seen" if spec.kind == "gradients" else "canaries as records"
    return f"the plan as it is, {seen}"


def _judged(
    held: Journal, planned: tuple[Spec, ...], radius: float, asked: Asked
) -> dict[str, Any]:
    """Attack every world, judge, draw; the report."""
    attacked, exposed = list[Attacked](), list[dict[str, Any]]()
    shown = [spec for spec in planned if not spec.reference]
    with progress("attacking", len(shown)) as bar:
        for world in _worlds(held, planned, radius):
            found = attack_world(world)
            attacked += found
            if world.control is None:
                exposed += exposures(world, found)
            bar.advance()
    seen = [one.seen for one in attacked]
    figures, curve = promised(planned[0].lock)
    verdict = judge(
        seen,
        public=asked.public_data,
        canaries=asked.canaries,
        allowed=Allowed.under(*curve),
    )
    own = [one.curve for one in attacked if one.seen.control is None]
    draw(held.folder / PICTURE, own, curve, seen, public=asked.public_data)
    plan = planned[0].plan
    return {
        "format": FORMAT,
        "room": "public" if asked.public_data else "curator",
        "plan": plan.name,
        "plan_hash": held.facts["plan_hash"],
        "audit_lock_hash": held.lock_hash,
        "records": "public" if asked.public_data else "private",
        "asked": asdict(asked),
        "promised": {
            "epsilon": planned[0].lock.epsilon,
            "delta": plan.budget.delta,
            **figures,
        },
        "not_attacked": _not_attacked(plan),
        "attacks": [one.row for one in attacked],
        "exposure": exposed,
        "controls": list(CONTROLS),
        "verdict": verdict.to_json(),
        "passed": verdict.passed,
        "findings": len(attacked),
    }


def _worlds(held: Journal, planned: tuple[Spec, ...], radius: float) -> Iterator[World]:
    """Finished worlds one by one; the plan's own has the references beside it."""
    references = tuple(_reference(held, spec, radius) for spec in planned if spec.reference)
    for spec in planned:
        if spec.reference:
            continue
        world = world_of(spec, *load_world(held.path(spec.name), spec.plan), radius)
        if spec.control is None and spec.kind == "records":
            world = replace(world, references=references)
        yield world


def _reference(held: Journal, spec: Spec, radius: float) -> Reference:
    return as_reference(world_of(spec, *load_world(held.path(spec.name), spec.plan), radius))


def _not_attacked(plan: Plan) -> list[str]:
    """Stages that spend budget and that no attack looks at."""
    return [] if plan.stages.evaluation is None else ["evaluation"]


def own_run(run: RunDir, records: Records, space: Representation) -> list[dict[str, Any]]:
    """Membership inference on the run's own model and samples: rows; none where it has neither.

    Real training records against held-out ones; curator-only.
    """
    plan, path = records.plan, run.released / MODEL
    if not path.is_file():
        path = run.released / "distilled.safetensors"
    model, facts = load_for(path, plan) if path.is_file() else (None, dict[str, str]())
    folder, samples = run.released / "samples", None
    if read_summary(folder) is not None:
        images, labels = read_samples(folder, plan.private.classes)
        samples = images[:MOST_SAMPLES], labels[:MOST_SAMPLES]
    if model is None and samples is None:
        return []
    own = OwnRun(
        coded(space, records.some()),
        coded(space, records.held_out),
        model,
        float(facts.get("low", 0.0)),
        samples,
    )
    if min(len(own.members.labels), len(own.others.labels)) < 2:
        return []
    prior = prior_of(run, plan) if model is not None else None
    return [membership_row(found) for found in membership(own, prior)]
