"""Peak memory of guiding many images, each number of them in a process of its own."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.engine import resident
from benchmarks.frozen.runs import PRIVATE, Runs
from benchmarks.frozen.transformer import few_tokens

COUNTS = (250, 1_000)
MOST = 1.05
"""Asked of the ratio: flat. A shard of images, 500 of so small ones, is held whole."""


def peaks(runs: Runs, counts: tuple[int, ...] = COUNTS) -> dict[str, float]:
    """MiB by number of images, and the highest over the lowest.

    With few Euler steps and own samples: neither holds more or less at a time.
    """
    size = replace(runs.size, euler=2, own=min(64, runs.size.own))
    run = runs.spent("memory", PRIVATE, runs.pretrained("memory-room", size), size)
    found = {str(count): peak(run, count) for count in counts}
    return found | {"ratio": max(found.values()) / min(found.values()), "asked": MOST}


def peak(run: Path, count: int) -> float:
    """MiB that a fresh process holds at most while it guides `count` images."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.frozen.memory"]
    done = subprocess.run(
        [*command, str(run), str(count)], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout.split()[-1])


def main(run: Path, count: int) -> None:
    """What `peak` runs: prints the MiB."""
    import torch

    from dpsynth.planning.verify import load_verified
    from dpsynth.released.guide import guide

    torch.set_num_threads(1)
    with few_tokens():
        guide(load_verified(run), count)
    print(resident("VmHWM") / 2**20)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
