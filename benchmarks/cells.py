"""The tables of moments by cells: `python -m benchmarks.cells`.

    python -m benchmarks.cells [--epsilons 0.3 1 3] [--runs 4] [--plan plans/mnist.yaml]
                               [--ablation | --fashion] [--work runs/cells] [--json]

From one plan come its runs at each epsilon, each with fresh noise and nothing else changed: as
planned, and without augmentation. Beside them: the paper's release (`mnist-paper`, the whole
epsilon in its shared covariance) as the floor; as ceilings, 10,000 real images and their
reconstructions. `--ablation` leaves out one part of the recipe at a time, at epsilon 0.3 and 1.
`--fashion` swaps the roles of MNIST and Fashion-MNIST and leaves the recipe untouched, at epsilon
1 and 10. Measures are those of `benchmarks.results`. The public stages are made once a public
domain and copied. Resumable: what is finished in the work folder is kept.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results

Values = dict[str, Any]
"""A plan as plain values."""
Row = dict[str, Any]

MEASURES = ("accuracy", "frechet", "relative FD")
PUBLISHED = {1.0: 0.817, 10.0: 0.873}  # Fashion-MNIST, best accuracies in the literature
RECONSTRUCTED = 10_000
STEPS = ("check", "pretrain", "release-moments")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epsilons", type=float, nargs="+")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--plan", type=Path, default=results.PLANS / "mnist.yaml")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--ablation", action="store_true")
    kind.add_argument("--fashion", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("runs/cells"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    usual = [1.0, 10.0] if options.fashion else [0.3, 1.0] if options.ablation else [0.3, 1.0, 3.0]
    epsilons = options.epsilons or usual
    values = loaded(options.plan)
    if options.ablation:
        found = ablation(values, epsilons, options.runs, options.work / "mnist")
    elif options.fashion:
        found = main_table(swapped(values), epsilons, options.runs, options.work / "fashion")
        found["published"] = PUBLISHED
    else:
        found = main_table(values, epsilons, options.runs, options.work / "mnist")
    print(json.dumps(found, indent=1)) if options.json else print_tables(found)


# Plans that are derived from others


def loaded(path: Path) -> Values:
    """A plan file as plain values with absolute paths."""
    from dpsynth.planning.yaml_plan import load_plan

    values: Values = load_plan(path.resolve()).model_dump(mode="json", exclude_none=True)
    return values


def paper_release(work: Path) -> Values:
    """The paper's release alone, with the whole epsilon."""
    return loaded(results.prepared_plan("mnist-paper", work))


def swapped(values: Values) -> Values:
    """The same plan with its first public IDX source as the private one, and the other way round.

    Held-out records are the test set beside the new private files.
    """
    from dpsynth.planning.source_kinds import IdxSource

    changed = deepcopy(values)
    places = [n for n, source in enumerate(changed["public"]) if source["kind"] == "idx"]
    source = changed["public"][places[0]]
    changed["public"][places[0]] = changed["private"]["source"]
    changed["private"]["source"] = source
    test = results.test_files(IdxSource.model_validate(source))
    changed["private"]["held_out"] = {"by": "source", "source": test.model_dump(mode="json")}
    changed["name"] += "-swapped"
    return changed


def _without_cells(values: Values) -> None:
    values["stages"]["moments"].pop("cells")


def _without_template(values: Values) -> None:
    values["stages"]["moments"]["cells"]["template"] = False


def _without_sharpening(values: Values) -> None:
    values["sampling"]["sharpen"] = 0.0


FULL = "recipe"
LEFT_OUT: dict[str, Callable[[Values], None]] = {
    "minus cells": _without_cells,
    "minus template": _without_template,
    "minus sharpening": _without_sharpening,
}
"""What each row of the ablation changes; augmentation has a row of its own in every run."""


# Tables


def main_table(values: Values, epsilons: Sequence[float], runs: int, work: Path) -> Values:
    """The recipe at each epsilon, the floor, the ceilings, and the seconds of every step."""
    from dpsynth.planning.schema import Plan

    rows, seconds = recipe_rows(FULL, values, epsilons, runs, work)
    paper = paper_release(work)
    if Plan.model_validate(values).private.source != Plan.model_validate(paper).private.source:
        paper = swapped(paper)
    floor, _ = recipe_rows("paper", paper, epsilons, runs, work / "paper")
    run = work / f"{FULL}-eps-{epsilons[0]:g}" / "run-1"
    return {
        "rows": [*rows, *(row | {"samples": "floor: the paper's release"} for row in floor)],
        "ceilings": [real_ceiling(rows[0]), *reconstruction_ceilings(run, work)],
        "seconds": seconds,
    }


def ablation(values: Values, epsilons: Sequence[float], runs: int, work: Path) -> Values:
    """The recipe and every one that lacks a part of it."""
    rows, _ = recipe_rows(FULL, values, epsilons, runs, work)
    for name, leave_out in LEFT_OUT.items():
        changed = deepcopy(values)
        leave_out(changed)
        rows += recipe_rows(name, changed, epsilons, runs, work)[0]
    return {"rows": rows}


def recipe_rows(
    name: str, values: Values, epsilons: Sequence[float], runs: int, work: Path
) -> tuple[list[Row], Values]:
    """Rows of one recipe at each epsilon, by ways of sampling; and what its steps took."""
    rows: list[Row] = []
    seconds: list[dict[str, float]] = []
    for epsilon in epsilons:
        folder = work / f"{name.replace(' ', '-')}-eps-{epsilon:g}"
        plan_file = written(values, epsilon, folder)
        found: dict[str, list[Values]] = {}
        for number in range(1, runs + 1):
            run = folder / f"run-{number}"
            seconds.append(timed_chain(plan_file, run, work))
            for model, figures in measured(plan_file, run, work).items():
                found.setdefault(model, []).append(figures)
        for model, each in found.items():
            shown = f"{name}, {results.OTHERS[model]}" if model else name
            rows.append({"samples": shown, "epsilon": epsilon, "runs": runs, "measures":
                         results.summarised(each)})  # fmt: skip
    return rows, summed(seconds)


def written(values: Values, epsilon: float, folder: Path) -> Path:
    """The plan at this epsilon, as a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.yaml"
    path.write_text(json.dumps(values | {"budget": values["budget"] | {"epsilon": epsilon}}))
    return path  # JSON is YAML


def measured(plan_file: Path, run: Path, work: Path) -> dict[str, Values]:
    """Figures of one finished run, by way of sampling: as planned (""), without augmentation."""
    from dpsynth.assess.features import remembered

    unit = remembered(work / "fashion.json", lambda: {"fd": results.fashion_distance(run)})["fd"]
    reports = {"": results.read(run, "")} | results.other_reports(plan_file, run)
    return {model: results.figures(report, unit) for model, report in reports.items()}


def timed_chain(plan_file: Path, run: Path, work: Path) -> dict[str, float]:
    """Make what of a run is not there yet; wall seconds of its steps, process starts included.

    The first run of a work folder makes the public stages, later ones take them over.
    """
    from dpsynth.artifacts.files import read_json, write_json
    from dpsynth.artifacts.rooms import RunDir
    from dpsynth.planning.steps import status

    timing = run.with_name(f"{run.name}-seconds.json")
    seconds: dict[str, float] = read_json(timing) if timing.exists() else {}
    made = sorted(path.parent.parent for path in work.glob("*/*/public/calibration.json"))
    results.share_public(plan_file, next(iter(made), None), run)

    def timed(step: str, *command: str | Path) -> None:
        start = time.perf_counter()
        results.dpsynth(*command)
        seconds[step] = round(time.perf_counter() - start, 1)
        write_json(timing, seconds)

    fresh = not (run / "transcript.jsonl").exists()  # what was copied is looked at again
    for name in STEPS:
        step = status(RunDir(run)).step(name)
        if fresh or step is None or not step.done:
            timed("public" if name == "pretrain" and not made else name, name, run)
    if not (run / "curator/evaluation.json").exists():
        timed("sample, evaluate, replay", "run", plan_file, "--run", run)
    return seconds


def summed(seconds: list[dict[str, float]]) -> Values:
    """Public stages, the private part and all that follows, in seconds; means over runs."""
    public = [each["public"] for each in seconds if "public" in each]
    steps = {
        step: statistics.fmean(times)
        for step in ("check", "release-moments", "sample, evaluate, replay")
        if (times := [each[step] for each in seconds if step in each])
    }
    whole = public[0] + sum(steps.values()) if public else None
    return {"public stages": public[0] if public else None, **steps, "whole chain": whole}


# Ceilings


def real_ceiling(row: Row) -> Row:
    """As many real training records in the samples' place, from the runs' own reports."""
    measures = {
        key: {"mean": found["ceiling"], "std": None} for key, found in row["measures"].items()
    }
    return {"samples": "ceiling: real images", "measures": measures}


def reconstruction_ceilings(run: Path, work: Path) -> list[Row]:
    """Real training records encoded and decoded, as they come out and finished as samples are."""
    from dpsynth.assess.features import remembered

    found = remembered(work / "reconstructions.json", lambda: _reconstructions(run, work))
    return [
        {"samples": f"ceiling: {name}", "measures": measures} for name, measures in found.items()
    ]


def _reconstructions(run: Path, work: Path) -> dict[str, Values]:
    from dpsynth.artifacts.files import read_json
    from dpsynth.assess.evaluate import distance_to_held_out
    from dpsynth.planning.verify import load_verified
    from dpsynth.released.finishing import Finish, finish_of
    from dpsynth.vault import open_private

    verified = load_verified(run)
    unit = read_json(work / "fashion.json")["fd"]
    private = open_private(verified)
    images, labels = private.train.arrays()
    chosen = np.random.default_rng(0).permutation(len(images))[:RECONSTRUCTED]
    finishes = {"reconstructions": Finish(0.0, None)}
    if (finish := finish_of(verified.run, verified.plan, augmented=False)).gain:
        finishes["reconstructions, sharpened"] = finish
    found = {}
    for name, finish in finishes.items():
        rebuilt = _rebuilt(verified, images[chosen], finish)
        distance = distance_to_held_out(verified, rebuilt)
        score = _probed(verified, (rebuilt, labels[chosen]), private.held_out.arrays())
        values = {"accuracy": score, "frechet": distance}
        values |= {"relative FD": distance / unit} if unit else {}
        found[name] = {key: {"mean": value, "std": None} for key, value in values.items()}
    return found


def _rebuilt(verified: Any, images: Any, finish: Any) -> Any:
    """Images (n, H, W, C) encoded, decoded and finished."""
    from dpsynth.models.autoencoder import as_bytes
    from dpsynth.public.representation import load_representation
    from dpsynth.released.sampling import fresh_generator

    representation = load_representation(verified.run, verified.plan)
    decoded = representation.decode_pixels(representation.encode(images))
    return as_bytes(finish(decoded, fresh_generator()))


def _probed(verified: Any, train: Any, held_out: Any) -> float:
    from dpsynth.assess.compare import probe_steps
    from dpsynth.assess.probes import probe_score

    classes = len(verified.plan.private.classes)
    return probe_score(train, held_out, classes, probe_steps(verified, len(train[0]))).mean


# Printing


def print_tables(found: Values) -> None:
    from dpsynth.console import render, table

    rows = [*found["rows"], *found.get("ceilings", [])]
    lines = [_line(row) for row in rows]
    lines += [
        ("published", f"{epsilon:g}", f"{value:g}", "", "")
        for epsilon, value in found.get("published", {}).items()
    ]
    title = f"mean and standard deviation over {found['rows'][0]['runs']} runs"
    render(table(("samples", "epsilon", "accuracy", "FD", "relative FD"), lines, title=title))
    for name, value in found.get("seconds", {}).items():
        if value is not None:
            print(f"{name}: {value:.0f} s")


def _line(row: Row) -> tuple[str, ...]:
    epsilon = f"{row['epsilon']:g}" if "epsilon" in row else ""
    cells = (row["measures"].get(key) for key in MEASURES)
    return (row["samples"], epsilon, *(results.spread(cell) if cell else "" for cell in cells))


if __name__ == "__main__":
    main()
