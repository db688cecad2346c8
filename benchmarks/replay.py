"""Time `dpsynth replay` on long transcripts: linear, and at most 10 s for 100,000 charges.

    python -m benchmarks.replay [--json] [--charges 100000]

Each figure is a whole process, start included. Exit 1 when the target is missed.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dpsynth.artifacts.files import canonical_json
from dpsynth.artifacts.lock import Lock, write_lock
from dpsynth.artifacts.rooms import LOCK_NAME, TRANSCRIPT_NAME
from dpsynth.artifacts.transcript import GENESIS, seal
from dpsynth.planning.workload import delta_slack, slots
from dpsynth.planning.yaml_plan import parse_plan, plan_hash

MOST_SECONDS = 10.0
# Ten times the charges may take at most this many times as long, start-up taken off.
MOST_GROWTH = 13.0
LEAST_SECONDS = 0.5  # differences below it are the machine's noise


PLAN = """\
name: benchmark
budget: {{epsilon: 5.0, delta: 1e-5}}
private:
  source: {{kind: digits}}
  capacity: 100000
  image: {{height: 8, width: 8}}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {{by: hash, fraction: 0.1}}
public: [{{kind: letters}}]
representation: {{kind: pca, code: 32}}
stages:
  moments: {{weight: 0.2}}
  train: {{weight: 0.8, rate: 0.001, steps: {steps}, chunk: 1}}
"""


# Noise that meets the budget with room to spare; calibrating it is not what is timed here.
NOISE = {"moments": 6.0, "train": 1.5}


def make_lock(charges: int) -> Lock:
    """A lock with one release and `charges` - 1 chunks of one step, as its plan makes it."""
    plan = parse_plan(PLAN.format(steps=charges - 1))
    return Lock(
        plan_hash=plan_hash(plan),
        facts=plan.facts(),
        budget=plan.budget.model_dump(),
        slots=slots(plan, NOISE),
        epsilon=5.0,
        optimistic=5.0,
        by_stage={stage: {"noise_multiplier": value} for stage, value in NOISE.items()},
        checks={},
        delta_slack=delta_slack(plan),
        versions={},
    )


def make_run(folder: Path, charges: int) -> None:
    """Lock and transcript of a closed run with `charges` charges, without the fsyncs."""
    lock, prev, number, rows = make_lock(charges), GENESIS, 0, []

    def add(kind: str, **fields: object) -> None:
        nonlocal prev, number
        number += 1
        line = seal(number, kind, dict(fields), prev)
        prev = line["hash"]
        rows.append(canonical_json(line))

    add(
        "open",
        format=1,
        run_id="0" * 32,
        plan_hash=lock.plan_hash,
        lock_hash=lock.lock_hash,
        budget=lock.budget,
        delta_slack=lock.delta_slack,
        versions=lock.versions,
        noise_source=lock.noise_source,
    )
    for slot in lock.slots:
        source = {"noise_source": lock.noise_source, "calibration_hash": "0" * 64}
        add("charge", slot=slot.id, **slot.spec(), **source)
        add("settle", slot=slot.id, sha256="0" * 64)
    add("close", charged=charges, settled=charges, forfeited=[])
    folder.mkdir()
    write_lock(folder / LOCK_NAME, lock)
    (folder / TRANSCRIPT_NAME).write_bytes(b"\n".join(rows) + b"\n")


def seconds_of(folder: Path) -> tuple[float, float]:
    """Wall-clock and processor seconds of one `dpsynth replay` process."""
    start, before = time.perf_counter(), processor_seconds()
    subprocess.run(
        [sys.executable, "-m", "dpsynth", "replay", str(folder), "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start, processor_seconds() - before


def processor_seconds() -> float:
    """Processor time of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--charges", type=int, default=100_000)
    chosen = parser.parse_args()
    sizes = [10, chosen.charges // 10, chosen.charges]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(size) for size in sizes]
        for folder, size in zip(folders, sizes, strict=True):
            make_run(folder, size)
        figures = [seconds_of(folder) for folder in folders]
    busy = [processor for _, processor in figures]
    growth = (busy[2] - busy[0]) / max(busy[1] - busy[0], LEAST_SECONDS)
    ok = figures[2][0] <= MOST_SECONDS and growth <= MOST_GROWTH
    rows = [
        {"charges": n, "seconds": round(wall, 2), "processor_seconds": round(processor, 2)}
        for n, (wall, processor) in zip(sizes, figures, strict=True)
    ]
    if chosen.json:
        print(json.dumps({"rows": rows, "growth": round(growth, 2), "ok": ok}))
    else:
        for row in rows:
            print(
                f"{row['charges']:>8,} charges  {row['seconds']:6.2f} s "
                f"(processor {row['processor_seconds']:.2f} s)"
            )
        print(f"growth for ten times the charges: {growth:.1f} (at most {MOST_GROWTH:g})")
        print("ok" if ok else f"MISSED: at most {MOST_SECONDS:g} s")
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
