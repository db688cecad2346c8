"""A small planned run without a plan file, for tests of spending and replay."""

from pathlib import Path

from dpsynth.accounting.statistics import ClassMoments, ClippedGradientSum
from dpsynth.artifacts.files import canonical_json, write_json
from dpsynth.artifacts.lock import Lock, Slot, plan_hash, write_lock
from dpsynth.artifacts.manifest import write_manifest
from dpsynth.artifacts.rooms import LOCK_NAME, TRANSCRIPT_NAME, RunDir
from dpsynth.artifacts.spending import Spender, spending
from dpsynth.artifacts.transcript import GENESIS, seal
from dpsynth.planning.schema import Plan

BUDGET = {"epsilon": 1.2, "delta": 1e-5, "adjacency": "add-or-remove-one", "unit": "record"}
MOMENTS = ClassMoments(0.6, 0.64, 0.48, "class", classes=10, dim=8)


def make_slots(chunks=2, spares=1, steps=10):
    made = [("moments", "moments", MOMENTS, 5.0, None, None, False)]
    made += [
        ("moments", f"moments-spare-{n + 1}", MOMENTS, 5.0, None, None, True) for n in range(spares)
    ]
    made += [
        ("train", f"train-{n + 1:04d}", ClippedGradientSum(1.0), 2.0, 0.02, steps, False)
        for n in range(chunks)
    ]
    return tuple(Slot(i, *row) for i, row in enumerate(made, start=1))


def make_plan(slots, budget, *, cap=None, name="tiny"):
    """The plan whose slots these are."""
    spares = sum(slot.spare for slot in slots)
    steps = [slot.steps for slot in slots if slot.stage == "train"]
    shares = {"count": 0.36, "sum": 0.4096, "second": 0.2304}
    return Plan.model_validate(
        {
            "name": name,
            "budget": budget,
            "private": {
                "source": {"kind": "folder", "path": "/data/secret"},
                "capacity": 1000,
                "image": {"height": 8, "width": 8},
                "classes": list("0123456789"),
                "held_out": {"by": "hash", "fraction": 0.2},
                "public": True,
                "cap": cap,
            },
            "public": [{"kind": "letters"}],
            "representation": {"kind": "pca", "code": 8},
            "stages": {
                "moments": {"blocks": shares, "spares": spares},
                "train": {"rate": 0.02, "steps": sum(steps), "chunk": steps[0]},
            },
        }
    )


def make_lock(slots=None, *, budget=None, cap=None, seed=None, name="tiny"):
    slots = make_slots() if slots is None else slots
    plan = make_plan(slots, {**BUDGET, **(budget or {})}, cap=cap, name=name)
    facts = plan.facts()
    return Lock(
        plan_hash=plan_hash(facts),
        facts=facts,
        budget=plan.budget.model_dump(),
        slots=slots,
        epsilon=0.99,
        optimistic=0.98,
        by_stage={slot.stage: {"noise_multiplier": slot.noise_std} for slot in slots},
        checks={},
        delta_slack=1e-12,
        versions={"dpsynth": "0"},
        unsafe_seed=seed,
    )


def make_run(path: Path, lock: Lock, *, dataset="/data/secret") -> RunDir:
    run = RunDir.create(path)
    write_lock(run.lock, lock)
    source = {"private": {"kind": "folder", "path": dataset}, "override": None}
    write_json(run.curator / "source.json", source, mode=0o600)
    return run


def open_spending(run: RunDir, lock: Lock, calibration="c" * 64):
    return spending(run, lock, calibration_hash=calibration, noise_source=lock.noise_source)


def spend(spender: Spender, run: RunDir, slot: Slot) -> None:
    spender.charge(slot)
    artifact = run.curator / f"{slot.name}.bin"
    artifact.write_bytes(slot.name.encode())
    spender.settle(slot, artifact)


def spend_all(run: RunDir, lock: Lock, *, close=True) -> RunDir:
    with open_spending(run, lock) as spender:
        for slot in lock.slots:
            if not slot.spare:
                spend(spender, run, slot)
        if close:
            spender.close()
    return run


def hand_out(run: RunDir, epsilon=None) -> Path:
    for name in (LOCK_NAME, TRANSCRIPT_NAME):
        (run.released / name).write_bytes((run.root / name).read_bytes())
    (run.released / "card.md").write_text("# card\n")
    write_manifest(run.released, epsilon=epsilon)
    return run.released


def reseal(lines) -> bytes:
    """Lines as a forger would write them: every hash made right again."""
    data, prev = b"", GENESIS
    for number, line in enumerate(lines, start=1):
        fields = {k: v for k, v in line.items() if k not in ("line", "kind", "prev", "hash")}
        sealed = seal(number, line["kind"], fields, prev)
        data, prev = data + canonical_json(sealed) + b"\n", sealed["hash"]
    return data
