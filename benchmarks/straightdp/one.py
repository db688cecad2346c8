"""One run of the tables, in a process of its own: `python -m benchmarks.straightdp.one JOB.json`.

All commands of the plan by their library functions, so that torch is loaded once; then the score.
A job that is finished is not done again, one that was interrupted goes on.
"""

import csv
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.straightdp import rooms
from benchmarks.straightdp.composed import alone

Times = dict[str, float]
"""Processor seconds by step: beside other work on the machine, wall seconds say little."""


def main() -> None:
    """Carry out the job that the first argument names: rooms to make, or a run to score.

    A run's `score.json` says what it took and what it scored.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["what"] == "rooms":
        rooms.make(job["entries"])
        return
    run, plan, times = Path(job["run"]), Path(job["plan"]), Times()
    start = time.perf_counter()
    verified = prepared(plan, run, Path(job["room"]), Path(job["lock"]), times)
    with rooms.kept_codes(Path(job["work"]) / "codes"):
        carry_out(verified, times)
    found = {"scores": scores(verified, job, times)}
    facts = {"seconds": time.perf_counter() - start, "times": times, **found}
    partial = run / "score.part"
    partial.write_text(json.dumps(facts, indent=1))
    partial.rename(run / "score.json")


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    """Add the processor time of what is inside to `times[name]`."""
    start = time.process_time()
    yield
    times[name] = times.get(name, 0.0) + time.process_time() - start


def prepared(plan: Path, run: Path, room: Path, lock: Path, times: Times) -> Any:
    """The run planned, the public room that it shares taken over, and its clips chosen by that.

    `lock`: where runs of one plan share what the second planning gave; choosing clips verifies
    every candidate, which takes longer than anything else of a small plan.
    """
    from dpsynth.artifacts.lock import read_lock
    from dpsynth.planning.verify import allocate, load_verified, make_run

    with timed(times, "plan"):
        verified = make_run(plan, run)
        if not (run / "public/calibration.json").exists():
            rooms.take(room, run)
        train = verified.plan.stages.train
        if train is None or train.allocation is None or (run / "transcript.jsonl").exists():
            return verified
        with alone(lock.with_suffix(".busy")):
            if lock.exists() and read_lock(lock).plan_hash == verified.lock.plan_hash:
                # A lock that does not fit the room would be refused at the first charge.
                shutil.copy(lock, verified.run.lock)
            else:
                allocate(verified)
                shutil.copy(verified.run.lock, lock)
        return load_verified(run)


def carry_out(verified: Any, times: Times) -> None:
    """Everything that spends, and what is made of it."""
    from dpsynth.artifacts.spending import close_run, read_state
    from dpsynth.assess.check import ensure_checked
    from dpsynth.private.dpsgd import train
    from dpsynth.private.moments import release_moments
    from dpsynth.released.distill import distill

    plan, run = verified.plan, verified.run
    state = read_state(run, verified.lock)
    if not state.closed:
        with timed(times, "check"):
            ensure_checked(verified)
    if plan.stages.moments is not None and not (state.settled or state.closed):
        with timed(times, "release"):
            release_moments(verified)
    if plan.distillation is not None:
        with timed(times, "distil"):
            distill(verified)
    if not read_state(run, verified.lock).closed:
        with timed(times, "train"):
            if plan.stages.train is not None:
                train(verified)
            else:
                close_run(run, verified.lock)


def scores(verified: Any, job: dict[str, Any], times: Times) -> dict[str, Any]:
    """The score of the plan's own samples (under ""), or of each of the job's starts."""
    from benchmarks.straightdp.score import Judge, attributes
    from dpsynth.artifacts.samples import read_samples

    plan, work = verified.plan, Path(job["work"])
    with timed(times, "judge"):
        judge = Judge.kept(work, job.get("private", "mnist"))
    with timed(times, "sample"):
        folders = draw(verified, job)
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        images, labels = read_samples(folder, plan.private.classes)
        with timed(times, "score"):
            found[name] = judge.score(images, labels, seed=job["seed"], whole=job["whole"])
            if job.get("private") == "composed":
                found[name] |= attributes(images, asked_for(verified, folder), work)
    return found


def draw(verified: Any, job: dict[str, Any]) -> dict[str, Path]:
    """Folders of samples by what they are called in the table."""
    from dpsynth.released.guidance import Guide
    from dpsynth.released.guide import guide
    from dpsynth.released.sampling import sample

    if not job.get("starts"):
        return {"": Path(sample(verified)["samples"])}
    kept = {}
    for t0 in job["starts"]:  # the folder of guided samples is one: each start replaces the last
        kept[f"{t0:g}"] = folder = verified.run.curator / f"start-{t0:g}"
        if not folder.exists():
            facts = guide(verified, chosen=Guide(start=t0), model=job.get("model"))
            shutil.copytree(facts["samples"], folder)
    return kept


def asked_for(verified: Any, folder: Path) -> dict[str, Any]:
    """Slot -> place (n,) of the value that each sample's caption asked for."""
    form, classes = verified.plan.private.captions, verified.plan.private.classes
    with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    fillings = dict(zip(form.captions(classes), form.fillings(classes), strict=True))
    asked = np.array([fillings[text] for text in texts])
    return {name: asked[:, place] for place, name in enumerate(form.names)}


if __name__ == "__main__":
    main()
