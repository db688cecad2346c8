"""Time the noise of a DP-SGD step against the plain step, at a million weights, on one thread.

    python -m benchmarks.noise [--json] [--runs 9]

Milliseconds of CPU time, medians. "Plain" is forward, backward and Adam on the same batch, no
privacy. Exit 1 when the noise takes more than a tenth of a plain step that has multiplicity 4.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import ClippedSum
from dpsynth.private.keystream import Keys
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import flow_losses, noisy_mean

MOST_SHARE = 0.1
DIM, CLASSES, BATCH = 48, 10, 256
COUNT = 1_000_000
MODELS = {
    "mlp": Velocity(kind="mlp", width=270, depth=3),
    "transformer": Velocity(kind="transformer", width=160, depth=3),
}


def median_ms(work: Callable[[], object], runs: int) -> float:
    """Median CPU milliseconds of `work`, after one call to warm up."""
    work()
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def generators(runs: int) -> dict[str, float]:
    """A million float64 normal numbers by each generator; the first row is their bits alone."""
    words, source = np.empty(COUNT, dtype="<u8"), NoiseSource()
    plain, target = np.random.default_rng(), torch.empty(COUNT, dtype=torch.float64)
    return {
        "ChaCha20 keystream": median_ms(lambda: Keys().stream().fill(words), runs),
        "NoiseSource": median_ms(lambda: source.gaussian_like({"a": (COUNT,)}, 2.0), runs),
        "NumPy PCG64 (not cryptographic)": median_ms(lambda: plain.standard_normal(COUNT), runs),
        "torch normal_ (not cryptographic)": median_ms(target.normal_, runs),
    }


def plain_step(model: nn.Module, multiplicity: int) -> Callable[[], None]:
    """Forward, backward and Adam on one random batch."""
    z, y = torch.randn(BATCH, DIM), torch.randint(CLASSES, (BATCH,))
    t, xi = torch.rand(BATCH, multiplicity), torch.randn(BATCH, multiplicity, DIM)
    adam = torch.optim.Adam(model.parameters())

    def step() -> None:
        adam.zero_grad()
        flow_losses(model, z, y, t, xi).sum().backward()
        adam.step()

    return step


def steps(runs: int) -> list[dict[str, Any]]:
    """The whole noisy mean of each model's gradient beside its plain step."""
    rows, source = [], NoiseSource()
    for name, settings in MODELS.items():
        model = build_velocity(settings, DIM, CLASSES)
        zeros = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.named_parameters()}
        found = ClippedSum(zeros, torch.zeros(0), torch.zeros(0))
        noise = median_ms(lambda found=found: noisy_mean(found, 2.0, 600.0, source), runs)
        for multiplicity in (1, 4):
            plain = median_ms(plain_step(model, multiplicity), runs)
            weights = sum(x.numel() for x in zeros.values())
            row = {"model": name, "weights": weights, "multiplicity": multiplicity}
            rows.append(row | {"plain_ms": plain, "noise_ms": noise, "share": noise / plain})
    return rows


def main() -> int:
    """Print the figures; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    with one_thread():
        drawn, rows = generators(options.runs), steps(options.runs)
    if options.json:
        print(json.dumps({"generators": drawn, "steps": rows}))
    else:
        for name, ms in drawn.items():
            print(f"{name:36}{ms:7.2f} ms a million")
        for row in rows:
            print(
                f"{row['model']:12} {row['weights']:,} weights, batch {BATCH}, "
                f"K {row['multiplicity']}: plain {row['plain_ms']:.1f} ms, "
                f"noise {row['noise_ms']:.2f} ms ({row['share']:.1%})"
            )
    worst = max(row["share"] for row in rows if row["multiplicity"] == 4)
    return 0 if worst <= MOST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
