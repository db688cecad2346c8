"""The budgets of StraightDP's Table 3 (N = 2,040, delta = 1/(2N)), by the shipped plans.

The paper adds up the epsilons of a row's stages; composed exactly, two of them come to less. Every
row's transcript is written as its run would write it, of nothing, and replayed.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.wavelet.plans import PLANS

if TYPE_CHECKING:
    from dpsynth.artifacts.lock import Lock

RECORDS = 2_040
ROWS: dict[str, tuple[str, dict[str, float]]] = {
    "uniform DP-SGD": ("sd3-lora", {"train": 10.0}),
    "uniform DP-SGD, less": ("sd3-lora", {"train": 2.0}),
    "Private Evolution": ("sd3-evolution", {"votes": 10.0}),
    "distillation + DP-SGD": ("sd3-distilled", {"moments": 2.0, "train": 8.0}),
    "moment guidance": ("sd3-guide", {"moments": 2.0}),
    "DP-SGD + guidance": ("sd3-lora", {"train": 10.0, "moments": 0.4}),
}
"""Row, the plan behind it, and the epsilon of each stage by itself."""


def rows() -> list[dict[str, Any]]:
    """Every row: the paper's sum, the composed epsilon, and what `replay` finds."""
    from dpsynth.planning.schema import Plan
    from dpsynth.planning.verify import verify

    found = []
    for name, (plan, parts) in ROWS.items():
        lock = verify(Plan.model_validate(values(plan, parts)))
        found.append(
            {
                "row": name,
                "plan": plan,
                "label": "+".join(f"{part:g}" for part in parts.values()),
                "sum": sum(parts.values()),
                "composed": lock.epsilon,
                "alone": {part: facts["epsilon_alone"] for part, facts in lock.by_stage.items()},
                "noise": {part: facts["noise_multiplier"] for part, facts in lock.by_stage.items()},
                "replayed": replayed(lock),
            }
        )
    return found


def values(name: str, parts: dict[str, float]) -> dict[str, Any]:
    """A shipped plan at this budget, and at delta 1/(2N); with guidance where a row adds it."""
    from dpsynth.planning.yaml_plan import plan_values

    plan: dict[str, Any] = plan_values(PLANS / f"{name}.yaml")
    plan["budget"] = {"epsilon": sum(parts.values()), "delta": 1 / (2 * RECORDS)}
    if set(parts) - set(plan["stages"]):
        guided = plan_values(PLANS / "sd3-guide.yaml")
        plan["stages"] = {"moments": guided["stages"]["moments"], **plan["stages"]}
        plan["stages"] = {
            stage: {**settings, "weight": parts[stage]}
            for stage, settings in plan["stages"].items()
        }
        plan |= {"split": "epsilon", "sampling": guided["sampling"]}
    return plan


def replayed(lock: "Lock") -> float:
    """Epsilon that `replay` finds in the transcript of a run that spent all but its spares."""
    from dpsynth.artifacts.files import write_json
    from dpsynth.artifacts.lock import write_lock
    from dpsynth.artifacts.rooms import RunDir
    from dpsynth.artifacts.spending import spending
    from dpsynth.planning.replay import replay

    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run")
        write_lock(run.lock, lock)
        source = {"private": {"kind": "folder", "path": "none"}, "override": None}
        write_json(run.curator / "source.json", source, mode=0o600)
        with spending(
            run, lock, calibration_hash="0" * 64, noise_source=lock.noise_source
        ) as spender:
            for slot in lock.slots:
                if not slot.spare:
                    spender.charge(slot)
                    artifact = run.curator / f"{slot.name}.bin"
                    artifact.write_bytes(b"")
                    spender.settle(slot, artifact)
            spender.close()
        return float(replay(run.root).epsilon)


def show(found: list[dict[str, Any]]) -> None:
    """Print the table."""
    from dpsynth.console import render, table

    lines = [
        (
            row["row"],
            row["label"],
            f"{row['composed']:.3f}",
            f"{row['replayed']:.3f}",
            ", ".join(f"{stage} {noise:.3g}" for stage, noise in row["noise"].items()),
        )
        for row in found
    ]
    columns = ("row", "the paper's sum", "composed", "replayed", "noise multipliers")
    render(table(columns, lines, title="Table 3: N = 2,040, delta = 1/(2N)"))
