"""Score a shipped plan over several runs with fresh noise: `python -m benchmarks.results NAME`.

NAME is that of a file of `plans/`, such as `digits` or `mnist-class`, or the path of a plan;
`mnist-paper` is its release alone, with the whole epsilon. Every run spends its own budget with
fresh noise; the public stages are made once and copied, since they are not what varies. Each row
is a mean and a standard deviation over runs of figures that `dpsynth evaluate` measures
(docs/evaluation.md), beside the ceiling and the floor of the same protocol. Prints a table, or
JSON with `--json`.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsynth.planning.source_kinds import IdxSource

PLANS = Path(__file__).resolve().parent.parent / "plans"
MEASURES = ("accuracy", "frechet", "precision", "recall")
# What a plan's samples stand beside: rows of the same run, by `sample --model`.
OTHERS = {
    "release": "release sampled directly",
    "distilled": "without DP-SGD (distilled)",
    "plain": "without augmentation",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", help="name of a file of plans/, or a path")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    print_report(measure(options.plan, options.runs, options.work), options.json)


def measure(name: str, runs: int, work: Path) -> dict[str, Any]:
    """All runs of one plan: a row for each way of sampling, and the wall times of the chain."""
    plan_file = prepared_plan(name, work)
    folder = work / plan_file.stem
    rows: dict[str, list[dict[str, Any]]] = {}
    seconds: list[float | None] = []
    for number in range(1, runs + 1):
        run = folder / f"run-{number}"
        if number > 1:
            share_public(plan_file, folder / "run-1", run)
        seconds.append(chain(plan_file, run))
        reports = {"": read(run, "")} | other_reports(plan_file, run)
        distance = fashion_distance(run)
        for model, report in reports.items():
            rows.setdefault(row_name(plan_file, model), []).append(figures(report, distance))
    return {
        "plan": plan_file.stem,
        "runs": runs,
        "rows": {row: summarised(values) for row, values in rows.items()},
        # The first run alone makes the public stages, so it alone times the whole chain.
        "chain_seconds": seconds[0],
        "later_run_seconds": [value for value in seconds[1:] if value is not None],
    }


def prepared_plan(name: str, work: Path) -> Path:
    """The plan file to run. `mnist-paper` becomes its release alone, at the whole epsilon."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PLANS / f"{name}.yaml"
    if path.stem != "mnist-paper":
        return path
    from dpsynth.planning.yaml_plan import load_plan

    plan = load_plan(path).model_dump(mode="json", exclude_none=True)
    plan["name"] = "mnist-paper-release"
    plan["stages"].pop("train")
    plan.pop("distillation")
    plan["sampling"]["method"] = "release"
    derived = work / "mnist-paper-release.yaml"
    derived.parent.mkdir(parents=True, exist_ok=True)
    derived.write_text(json.dumps(plan, indent=1))  # JSON is YAML
    return derived


def dpsynth(*arguments: str | Path) -> None:
    """One command of the tool; its talk goes to this terminal, its result is not needed."""
    command = [sys.executable, "-m", "dpsynth", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def share_public(plan_file: Path, first: Path | None, run: Path) -> None:
    """Plan a run that has spent nothing yet; it takes over what the `first` run has in common.

    That is the public room and the evaluation's references. A run that has spent goes on only by
    the plan that it was made by.
    """
    if (run / "transcript.jsonl").exists():
        if not made_by(plan_file, run):
            raise SystemExit(f"{run} was made by another plan or rule: take another --work")
        return
    dpsynth("plan", plan_file, "--run", run)
    for room in ("public", "curator/cache"):
        if first is not None and first != run and (first / room).exists():
            shutil.copytree(first / room, run / room, dirs_exist_ok=True)


def made_by(plan_file: Path, run: Path) -> bool:
    """Whether the run's lock is what this plan gives today."""
    from dpsynth.artifacts.lock import read_lock
    from dpsynth.planning.workload import follows
    from dpsynth.planning.yaml_plan import load_plan

    return follows(read_lock(run / "plan.lock.json"), load_plan(plan_file))


def chain(plan_file: Path, run: Path) -> float | None:
    """`dpsynth run`; returns wall seconds, None when the run had been started before."""
    timing = run.with_suffix(".seconds")
    fresh = not (run / "transcript.jsonl").exists()
    start = time.perf_counter()
    dpsynth("run", plan_file, "--run", run)
    if fresh:
        timing.write_text(f"{time.perf_counter() - start:.1f}\n")
    return float(timing.read_text()) if timing.exists() else None


def other_reports(plan_file: Path, run: Path) -> dict[str, dict[str, Any]]:
    """Evaluations of the same release by the other ways of sampling.

    A flow plan's release and distilled model are drawn here; the samples without augmentation of
    an augmenting plan are drawn and measured by the chain itself.
    """
    from dpsynth.planning.yaml_plan import load_plan

    plan, models = load_plan(plan_file), list[str]()
    if plan.sampling.method == "flow" and plan.stages.moments is not None:
        models.append("release")
        if plan.distillation is not None and plan.stages.train is not None:
            models.append("distilled")
    for model in models:
        dpsynth("sample", run, "--model", model)
        dpsynth("evaluate", run, "--model", model)
    if plan.sampling.augment is not None:
        models.append("plain")
    return {model: read(run, f"-{model}") for model in models}


def read(run: Path, suffix: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run / f"curator/evaluation{suffix}.json").read_text())
    return report


def fashion_distance(run: Path) -> float | None:
    """Frechet distance of Fashion-MNIST's test images to the held-out ones, in the run's features.

    None where the plan has no Fashion-MNIST beside it.
    """
    from dpsynth.planning.source_kinds import IdxSource
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run)
    sources = [source for source in verified.plan.public if isinstance(source, IdxSource)]
    fashion = [source for source in sources if "fashion" in source.images.parent.name]
    if not fashion:
        return None
    from dpsynth.assess.evaluate import distance_to_held_out
    from dpsynth.public.sources import read_public

    test = test_files(fashion[0])
    public = read_public(verified.plan.model_copy(update={"public": [test]}))
    return distance_to_held_out(verified, public.images)


def test_files(source: "IdxSource") -> "IdxSource":
    """The test set that lies beside an IDX training set, under the names that MNIST's have."""
    return source.model_copy(
        update={
            "images": source.images.with_name("t10k-images-idx3-ubyte.gz"),
            "labels": source.labels.with_name("t10k-labels-idx1-ubyte.gz"),
        }
    )


def row_name(plan_file: Path, model: str) -> str:
    if model:
        return OTHERS[model]
    return "release alone" if "release" in plan_file.stem else f"{plan_file.stem} as planned"


def figures(report: dict[str, Any], fashion: float | None) -> dict[str, Any]:
    """The figures of one run's report, flat: measure -> value, ceiling, floor."""
    flat = {
        key: {part: report[key][part] for part in ("synthetic", "ceiling", "floor")}
        for key in MEASURES
    }
    if fashion:
        distance = report["frechet"]
        flat["relative FD"] = {
            "synthetic": distance["synthetic"] / fashion,
            "ceiling": distance["ceiling"] / fashion,
            "floor": 1.0,
        }
    return flat


def summarised(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over runs; ceiling and floor by their means."""
    result = {}
    for key in runs[0]:
        values = [run[key]["synthetic"] for run in runs]
        result[key] = {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "values": values,
            "ceiling": statistics.fmean(run[key]["ceiling"] for run in runs),
            "floor": statistics.fmean(run[key]["floor"] for run in runs),
        }
    return result


def print_report(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1))
        return
    from dpsynth.console import render, table

    lines = [
        (row, key, spread(found), f"{found['ceiling']:.4g}", f"{found['floor']:.4g}")
        for row, measures in report["rows"].items()
        for key, found in measures.items()
    ]
    title = f"{report['plan']}: mean and standard deviation over {report['runs']} runs"
    render(table(("samples", "measure", "value", "ceiling", "floor"), lines, title=title))
    if report["chain_seconds"] is not None:
        print(f"whole chain, public stages included: {report['chain_seconds']:.0f} s")


def spread(found: dict[str, Any]) -> str:
    deviation = found["std"]
    return f"{found['mean']:.4g}" + (f" ± {deviation:.2g}" if deviation is not None else "")


if __name__ == "__main__":
    main()
