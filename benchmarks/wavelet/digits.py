"""MNIST at epsilon 1: the plan of tokens and that of LL0 moments, each run whole and measured."""

import json
from pathlib import Path
from typing import Any

from benchmarks.results import PLANS, dpsynth, prepared_plan

NAMES = ("mnist-wavelet", "mnist-ll0", "mnist-ll0-completed")
MEASURES = ("accuracy", "frechet")


def measured(work: Path, names: tuple[str, ...] = NAMES) -> dict[str, dict[str, Any]]:
    """`dpsynth run` of each plan that is shipped, and what `evaluate` found: value, ceiling, floor.

    A run in the work folder goes on, and is measured again only where it was not finished.
    """
    found = {}
    for name in names:
        if not (PLANS / f"{name}.yaml").exists():
            continue
        run = work / "runs" / name
        report = run / "curator" / "evaluation.json"
        if not report.exists():
            dpsynth("run", prepared_plan(name, work), "--run", run)
        facts = json.loads(report.read_text())
        found[name] = {
            measure: {part: facts[measure][part] for part in ("synthetic", "ceiling", "floor")}
            for measure in MEASURES
        }
    return found
