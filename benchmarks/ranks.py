"""Time DP-SGD steps by two processes against one, the same logical batch, each on one core.

    python -m benchmarks.ranks [--json] [--runs 7] [--world 2]

Seconds a step, medians over chunks. The single process is the main one of the two, by itself on
its core while the other waits; chunks of both kinds take turns, so that both meet the same
machine. Exit 1 when two processes are less than 1.7 times faster in a case.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEAST = 1.7
DIM, CLASSES, CAPACITY = 48, 10, 12_000


@dataclass(frozen=True)
class Case:
    """A velocity model and a logical batch."""

    kind: str
    width: int
    depth: int
    batch: int
    multiplicity: int
    steps: int


CASES = {
    "MLP, batch 1,200, multiplicity 4": Case("mlp", 96, 4, 1200, 4, 4),
    "transformer, batch 256, multiplicity 4": Case("transformer", 64, 3, 256, 4, 2),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.runs)
        return 0
    found = measure(options.world, options.runs)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0 if all(row["speedup"] >= LEAST for row in found["rows"].values()) else 1


def measure(world: int, runs: int) -> dict[str, Any]:
    """Start the processes as torchrun would; the main one measures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "benchmarks.ranks", "--worker", "--runs", str(runs)]
    started = []
    for rank in range(world):
        named = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = os.environ | shared | named
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process of the benchmark failed")
    found: dict[str, Any] = json.loads(texts[0])
    return found


def work(runs: int) -> None:
    """One process: take turns at chunks alone and together."""
    from dpsynth.distributed.joining import joined

    with joined() as ranks:
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[ranks.rank % len(cores)]})
        rows = {name: row(case, ranks, runs) for name, case in CASES.items()}
    if ranks.is_main:
        cores_of = "pinned" if hasattr(os, "sched_setaffinity") else "not pinned"
        print(json.dumps({"world": ranks.world, "cores": cores_of, "runs": runs, "rows": rows}))


def row(case: Case, ranks: Any, runs: int) -> dict[str, Any]:
    """Seconds a step alone and together, and what one exchange of the sums costs."""
    from dpsynth.distributed.ranks import ALONE

    alone, weights = stepper(case, ALONE)
    together, _ = stepper(case, ranks)
    times: dict[str, list[float]] = {"one": [], "several": []}
    for number in range(runs + 1):  # the first of each warms up
        single = ranks.lead(lambda: timed(alone))
        ranks.barrier()
        both = timed(together)
        if ranks.is_main and number:
            times["one"].append(single / case.steps)
            times["several"].append(both / case.steps)
    if not ranks.is_main:
        return {}
    middle = {key: statistics.median(values) for key, values in times.items()}
    return {"weights": weights, **middle, "speedup": middle["one"] / middle["several"]}


def timed(chunk: Callable[[], object]) -> float:
    start = time.perf_counter()
    chunk()
    return time.perf_counter() - start


def stepper(case: Case, ranks: Any) -> tuple[Callable[[], object], int]:
    """A chunk of real private steps over this process's shard, and the number of weights."""
    import torch

    from dpsynth.accounting.statistics import ClippedGradientSum
    from dpsynth.artifacts.lock import Slot
    from dpsynth.models.seeding import generator, seeded_initialisation
    from dpsynth.models.velocity import build_velocity
    from dpsynth.planning.training import Train
    from dpsynth.planning.velocity import Velocity
    from dpsynth.private.engine import PerExampleClipper
    from dpsynth.private.noise import NoiseSource
    from dpsynth.private.steps import PrivateCodes, Workload, flow_losses, run_chunk
    from dpsynth.private.training_state import TrainingState

    settings = Train(
        rate=case.batch / CAPACITY, steps=case.steps, multiplicity=case.multiplicity, clip=1.0
    )
    with seeded_initialisation(0):
        shape = Velocity(kind=case.kind, width=case.width, depth=case.depth)
        model = build_velocity(shape, DIM, CLASSES)
    source = generator(1)
    codes = torch.randn(CAPACITY, DIM, generator=source)[ranks.rank :: ranks.world]
    labels = torch.randint(CLASSES, (CAPACITY,), generator=source)[ranks.rank :: ranks.world]
    slot = Slot(
        1, "train", "train-0001", ClippedGradientSum(1.0), 1.0, settings.rate, settings.steps
    )
    state = TrainingState(model, settings, noise=1.0 / case.batch)
    clipper, noise = PerExampleClipper(model, flow_losses, 1.0), NoiseSource()
    data = PrivateCodes(codes.contiguous(), labels.contiguous())
    workload = Workload(settings, CAPACITY, CLASSES, 0.0)

    def chunk() -> None:
        run_chunk(slot, data, workload, state, clipper=clipper, noise=noise, ranks=ranks)

    return chunk, sum(p.numel() for p in model.parameters())


def show(found: dict[str, Any]) -> None:
    from dpsynth.console import render, table

    lines = [
        (name, row["weights"], f"{1e3 * row['one']:.1f}", f"{1e3 * row['several']:.1f}",
         f"{row['speedup']:.2f}")
        for name, row in found["rows"].items()
    ]  # fmt: skip
    world = found["world"]
    columns = ("step", "weights", "1 process, ms", f"{world} processes, ms", "times faster")
    title = f"{world} processes, each on one core ({found['cores']}), medians of {found['runs']}"
    render(table(columns, lines, title=title))
    print(f"at least {LEAST} is asked for")


if __name__ == "__main__":
    sys.exit(main())
