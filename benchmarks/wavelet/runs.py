"""Runs of the emoji table in a work folder, made where they are missing, by the tool's commands.

A method's public room is made once, in `rooms/METHOD`, and copied into its runs. A cell that has
its score is kept; one that was interrupted goes on, as the commands themselves do.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results import made_by
from benchmarks.straightdp.rooms import take
from benchmarks.wavelet.plans import COUNTS, Cell, captions_file, plan_of, planned

Times = dict[str, float]
"""Processor seconds of a step's commands: beside other work, wall seconds say little."""


class Runs:
    """The runs of one size in a work folder."""

    def __init__(self, work: Path, size: str = "compact", processes: int = 1) -> None:
        self.work, self.size, self.processes = work, size, processes
        self.count = COUNTS[size]
        self.captions = captions_file(work / "captions.csv", self.count)

    def made(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Every cell's score, in order: method, budget, number, times, scores."""
        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(self.room, dict.fromkeys(cell.method for cell in cells)))
            return list(pool.map(self.score, cells))

    def room(self, method: str) -> Path:
        """A planned run with the method's public room, which nothing private ever enters."""
        room = self.work / "rooms" / method
        file = planned(self.work / "jobs" / f"{method}.yaml", self._plan(method, "10"))
        require_same(file, room)
        if not (room / "done").exists():
            times = Times()
            with timed(times, "pretrain"):
                self.dpsynth(f"room-{method}", "plan", file, "--run", room)
                self.dpsynth(f"room-{method}", "pretrain", room)
            (room / "done").write_text(json.dumps(times))
        return room

    def score(self, cell: Cell) -> dict[str, Any]:
        """One cell's score, made if it is missing."""
        path = self.work / "scores" / f"{cell.name}.json"
        if not path.exists():
            times = Times()
            samples = self.private(cell, times) if cell.private else self.reference(cell, times)
            facts = {"scores": self.judged(cell, samples), "times": times, "samples": str(samples)}
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(facts, indent=1))
            part.rename(path)
            print(f"{cell.name}: {facts['scores']}", file=sys.stderr, flush=True)
        found: dict[str, Any] = json.loads(path.read_text())
        return {"method": cell.method, "budget": cell.budget, "number": cell.number, **found}

    def private(self, cell: Cell, times: Times) -> Path:
        """The samples of a run that spends."""
        from dpsynth.planning.yaml_plan import load_plan

        run, name = self.work / "runs" / cell.name, cell.name
        plan = self._plan(cell.method, cell.budget)
        file = planned(self.work / "jobs" / f"{name}.yaml", plan)
        require_same(file, run)
        if not (run / "transcript.jsonl").exists():
            self.dpsynth(name, "plan", file, "--run", run)
            take(self.room(cell.method), run)
        for command in ("check", "train", "sample"):
            with timed(times, command):
                self.dpsynth(name, command, run)
        if load_plan(file).is_completed:
            with timed(times, "complete"):
                self.dpsynth(name, "complete-wavelet", run)
        return run / "released" / "samples"

    def reference(self, cell: Cell, times: Times) -> Path:
        """The samples of the public model, or of the plan without clip and noise."""
        room = self.room(cell.method)
        kind = "pretrained" if cell.budget == "pretrained" else "nonprivate"
        with timed(times, kind):
            self.dpsynth(cell.name, "reference", room, "--kind", kind, "-n", str(self.count))
        return room / "curator" / f"reference-{kind}"

    def judged(self, cell: Cell, samples: Path) -> dict[str, float]:
        """The judge's scores of a folder of samples, the pairing drawn by the cell's number."""
        from benchmarks.wavelet.records import judge_of, samples_in

        judge, classes = judge_of(self.room(cell.method), self.work)
        return judge.score(samples_in(samples, classes), cell.number)

    def bounds(self, method: str) -> dict[str, dict[str, float]]:
        """Ceiling and floor of the table."""
        from benchmarks.wavelet.records import judge_of, public_of

        path = self.work / "bounds.json"
        if not path.exists():
            judge, _ = judge_of(self.room(method), self.work)
            count = min(self.count, len(judge.known) // 2)
            found = judge.bounds(public_of(self.room(method)), count)
            path.write_text(json.dumps(found, indent=1))
        kept: dict[str, dict[str, float]] = json.loads(path.read_text())
        return kept

    def dpsynth(self, log: str, *arguments: str | Path) -> None:
        """One command of the tool, on one thread; it talks to the log of that name."""
        path = self.work / "jobs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "dpsynth", *map(str, arguments)]
        with path.open("a") as talk:
            ended = subprocess.run(command, env=environment, stdout=talk, stderr=talk, check=False)
        if ended.returncode:
            raise SystemExit(f"dpsynth {' '.join(map(str, arguments))} failed: see {path}")

    def _plan(self, method: str, budget: str) -> dict[str, Any]:
        tiny = self.size == "tiny"
        return plan_of(method, budget, self.captions, self.count, tiny=tiny)


def require_same(plan: Path, run: Path) -> None:
    """Refuse a run of another plan: what it has made or spent is not of this table."""
    if (run / "plan.lock.json").exists() and not made_by(plan, run):
        raise SystemExit(f"{run} was made by another plan: take another --work")


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    """Add the processor time of child processes that end inside, and the wall time."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    times[name] = times.get(name, 0.0) + spent
    times[f"{name}, wall"] = times.get(f"{name}, wall", 0.0) + time.perf_counter() - start


def forget(runs: Runs, cell: Cell) -> None:
    """Remove a cell's run and score, to make it anew: with fresh noise, and so with new budget."""
    shutil.rmtree(runs.work / "runs" / cell.name, ignore_errors=True)
    (runs.work / "scores" / f"{cell.name}.json").unlink(missing_ok=True)
