"""Runs in a work folder, made where they are missing: two processes at a time, a thread each."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.straightdp import composed, letters
from benchmarks.straightdp.plans import Row, plan_of, run_name
from benchmarks.straightdp.rooms import key_of
from benchmarks.straightdp.rows import Cell
from benchmarks.straightdp.sizes import SIZES

Score = dict[str, Any]
"""What one run says: row, epsilon, number, seconds, processor seconds by step, scores by name."""


class Runs:
    """The runs of one size in a work folder.

    A public room is made once and copied into all runs whose plans agree on it. A run that has its
    score is kept, one that was interrupted goes on.
    """

    def __init__(self, work: Path, size: str = "compact", processes: int = 2) -> None:
        self.work, self.size, self.processes = work, size, processes
        self._enough = threading.Event()
        work.mkdir(parents=True, exist_ok=True)

    def made(self, cells: Sequence[Cell], *, whole: bool = True, **job: Any) -> list[Score]:
        """Every cell's score, in order; what several cells share is made once.

        `whole`: every measure, not accuracy and Frechet distance alone. `job`: see `one`.
        """
        self._rooms([cell.row for cell in cells])
        job |= {"whole": whole}
        distinct = {self._folder(cell): cell for cell in cells}
        # First runs first: their rows' later ones then find the clips chosen.
        ordered = sorted(distinct.values(), key=lambda cell: cell.number)
        self._each(lambda cell: self._run(cell, job), ordered)
        return [self._score(cell) for cell in cells]

    def room(self, row: Row) -> Path:
        """The folder with a row's public room, which is made where it is missing."""
        self._rooms([row])
        return self._room(row)

    def bounds(self, private: str = "mnist") -> dict[str, dict[str, float]]:
        """Ceiling and floor of every measure."""
        path = self.work / f"bounds-{private}.json"
        if not path.exists():
            from benchmarks.straightdp.score import Judge, bounds

            images = SIZES[self.size]["latent"].images  # as many as the rows have
            found = bounds(Judge.kept(self.work, private), private, self.work, images)
            path.write_text(json.dumps(found, indent=1))
        kept: dict[str, dict[str, float]] = json.loads(path.read_text())
        return kept

    def _prepare(self, rows: Iterable[Row]) -> None:
        kinds = {row.data for row in rows}
        if kinds & {"captioned", "composed"}:
            composed.prepare(self.work)
        if "letters" in kinds:
            letters.prepare(self.work)

    def _each(self, act: Callable[[Any], None], parts: Sequence[Any]) -> None:
        """Act on every part, some at a time; after a failure nothing new is begun."""

        def guarded(part: Any) -> None:
            if not self._enough.is_set():
                try:
                    act(part)
                except BaseException:
                    self._enough.set()
                    raise

        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(guarded, parts))

    def _room(self, row: Row) -> Path:
        key = key_of(plan_of(row, 1.0, self.work, size=self.size))
        return self.work / "rooms" / f"{row.base}-{key[:12]}"

    def _rooms(self, rows: Sequence[Row]) -> None:
        """Make the rooms that are missing: one process for each kind of public images and codes."""
        self._prepare(rows)
        wanted = {self._room(row): row for row in reversed(rows)}
        bases: dict[str, list[tuple[Path, Row]]] = {}
        for room, row in reversed(wanted.items()):
            bases.setdefault(row.base, []).append((room, row))
        jobs = [
            (base, [(room, row) for room, row in parts])
            for base, parts in bases.items()
            if not all((room / "done").exists() for room, _ in parts)
        ]
        self._each(lambda job: self._make_rooms(*job), jobs)

    def _make_rooms(self, base: str, parts: Sequence[tuple[Path, Row]]) -> None:
        """Rooms of one base; those that are there already are looked at again, and found whole."""
        known = sorted((self.work / "rooms").glob(f"{base}-*/done"))
        entries = [
            {"run": str(done.parent), "plan": str(self._plan_file(f"room-{done.parent.name}"))}
            for done in known
        ]
        for room, row in parts:
            if not (room / "done").exists():
                file = self._planned(f"room-{room.name}", row, 1.0)
                entries.append({"run": str(room), "plan": str(file)})
        self._carry_out(f"rooms-{base}", {"what": "rooms", "entries": entries})

    def _folder(self, cell: Cell) -> Path:
        return self.work / f"{run_name(cell.row, cell.epsilon)}-{cell.number}"

    def _run(self, cell: Cell, extra: dict[str, Any]) -> None:
        run = self._folder(cell)
        if (run / "score.json").exists():
            return
        job = {
            "what": "run",
            "run": str(run),
            "plan": str(self._planned(run.name, cell.row, cell.epsilon)),
            "room": str(self._room(cell.row)),
            "lock": str(self.work / "jobs" / f"{run_name(cell.row, cell.epsilon)}.lock"),
            "seed": cell.number,
            "private": cell.row.data or "mnist",
            **extra,
        }
        self._carry_out(run.name, job)

    def _score(self, cell: Cell) -> Score:
        score: Score = json.loads((self._folder(cell) / "score.json").read_text())
        return {"row": cell.name, "epsilon": cell.epsilon, "number": cell.number, **score}

    def _plan_file(self, name: str) -> Path:
        return self.work / "jobs" / f"{name}.yaml"

    def _planned(self, name: str, row: Row, epsilon: float) -> Path:
        """The file of a row's plan, written."""
        file, plan = self._plan_file(name), plan_of(row, epsilon, self.work, size=self.size)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(plan, indent=1))  # JSON is YAML
        return file

    def _carry_out(self, name: str, job: dict[str, Any]) -> None:
        """One job in a process of its own; it talks to a log."""
        start, file = time.perf_counter(), self.work / "jobs" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"work": str(self.work), **job}))
        # One thread of its own: more of them wait for each other where anything else runs beside.
        threads = str((os.cpu_count() or 1) // self.processes or 1) if self.size == "full" else "1"
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        command = [sys.executable, "-m", "benchmarks.straightdp.one", str(file)]
        log = file.with_suffix(".log")
        with log.open("w") as talk:
            ended = subprocess.run(command, env=environment, stdout=talk, stderr=talk, check=False)
        if ended.returncode:
            raise SystemExit(f"{name} failed: see {log}")
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
