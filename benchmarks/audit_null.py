"""How often the one-run bound of an audit claims too much: null scores and known mechanisms.

    python -m benchmarks.audit_null [--json] [--runs 10000] [--canaries 50 200 1000 10000]

Each run draws coins and scores and asks for the bound with the number of guesses fixed beforehand,
and for the best of several under a union bound. Null scores: the truth is epsilon 0. Randomised
response and the Gaussian mechanism: the truth is known in closed form. "Unpaid" takes the best of
several at the confidence of one, which is wrong, and shows that the measurement would see a fault.

Exit 1 when a share lies above the error that its confidence allows by more than chance (one in a
thousand) explains. About a minute on one core.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from dpsynth.accounting import gaussian
from dpsynth.accounting.one_run import correct_guesses, default_guesses, epsilon_lower_bound

DELTA = 1e-5
CONFIDENCES = (0.95, 0.99)
LUCK = 1e-3
BLOCK = 4_000_000
MECHANISM_CANARIES = 200

Rng = np.random.Generator
Coins = NDArray[np.bool_]
Scores = NDArray[np.float64]
bound = cache(epsilon_lower_bound)


def right_guesses(
    draw: Callable[[Rng, Coins], Scores], runs: int, canaries: int, tried: tuple[int, ...]
) -> NDArray[np.int64]:
    """Right guesses (runs, K) of fresh coins and scores, a block of runs at a time."""
    rng, found = np.random.default_rng(), []
    for start in range(0, runs, max(1, BLOCK // canaries)):
        count = min(runs - start, max(1, BLOCK // canaries))
        coins = rng.random((count, canaries)) < 0.5
        found.append(correct_guesses(draw(rng, coins), coins, tried))
    return np.concatenate(found)


def bounds(right: NDArray[np.int64], tried: tuple[int, ...], m: int, confidence: float) -> Scores:
    """The bound (runs, K) of each run and number of guesses."""
    columns = [
        [bound(v, r, m, DELTA, confidence) for v in right[:, place].tolist()]
        for place, r in enumerate(tried)
    ]
    return np.array(columns).T


def rows(
    name: str, truth: float, right: NDArray[np.int64], tried: tuple[int, ...], m: int
) -> list[dict[str, Any]]:
    """Share of runs whose bound lies above the `truth`, for each way to choose the guesses."""
    made = []
    for confidence in CONFIDENCES:
        fixed = bounds(right, tried, m, confidence)
        shared = bounds(right, tried, m, 1 - (1 - confidence) / len(tried)).max(axis=1)
        ways = {f"fixed, {r:,}": fixed[:, place] for place, r in enumerate(tried)}
        ways |= {"best, union bound": shared, "best, unpaid (wrong)": fixed.max(axis=1)}
        for way, found in ways.items():
            over = int((found > truth).sum())
            error = 1 - confidence
            luck = float(special.bdtrc(over - 1, len(found), error)) if over else 1.0
            made.append({
                "scores": name, "truth": truth, "canaries": m, "guesses": way,
                "confidence": confidence, "runs": len(found), "over": over,
                "share": over / len(found), "allowed": error, "chance": luck,
                "median": float(np.median(found)),
            })  # fmt: skip
    return made


def null(rng: Rng, coins: Coins) -> Scores:
    """Scores that have nothing to do with the coins."""
    return rng.random(coins.shape)


def response(epsilon: float) -> Callable[[Rng, Coins], Scores]:
    """Each coin told right with the odds e^epsilon; what is left is noise."""

    def draw(rng: Rng, coins: Coins) -> Scores:
        kept = rng.random(coins.shape) < 1 / (1 + math.exp(-epsilon))
        return np.where(kept, coins, ~coins) + 0.5 * rng.random(coins.shape)

    return draw


def noisy(sigma: float) -> Callable[[Rng, Coins], Scores]:
    """Each coin with Gaussian noise."""
    return lambda rng, coins: coins + sigma * rng.normal(size=coins.shape)


def measure(runs: int, canaries: list[int]) -> list[dict[str, Any]]:
    """Every row of both tables."""
    made = []
    for m in canaries:
        tried = default_guesses(m)
        made += rows("null", 0.0, right_guesses(null, runs, m, tried), tried, m)
    m = MECHANISM_CANARIES
    tried = default_guesses(m)
    known = {f"randomised response {e:g}": (e, response(e)) for e in (1.0, 3.0)}
    for sigma in (1.0, 3.0):
        known[f"Gaussian, sigma {sigma:g}"] = (gaussian.epsilon(DELTA, sigma), noisy(sigma))
    for name, (truth, draw) in known.items():
        made += rows(name, truth, right_guesses(draw, runs, m, tried), tried, m)
    return made


def main() -> int:
    """Print the shares; 1 when one is above what its confidence allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--canaries", type=int, nargs="+", default=[50, 200, 1000, 10_000])
    options = parser.parse_args()
    start = time.perf_counter()
    found = measure(options.runs, options.canaries)
    if options.json:
        print(json.dumps({"rows": found, "seconds": time.perf_counter() - start}))
    else:
        head = ("scores", "canaries", "guesses", "conf.", "over truth", "allowed", "median")
        print("{:24}{:>9} {:22}{:>6}{:>12}{:>9}{:>8}".format(*head))
        for row in found:
            print(
                f"{row['scores']:24}{row['canaries']:9,} {row['guesses']:22}"
                f"{row['confidence']:6.0%}{row['share']:12.2%}{row['allowed']:9.2%}"
                f"{row['median']:8.2f}"
            )
        print(f"{options.runs:,} runs a row, {time.perf_counter() - start:.0f} s")
    wrong = [r for r in found if r["chance"] < LUCK and "unpaid" not in r["guesses"]]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
