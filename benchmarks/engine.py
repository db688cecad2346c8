"""Time a private step (clip, sum, noise) against the plain one, and show other engines beside it.

    python -m benchmarks.engine [--json] [--quick] [--runs 7] [--threads 2] [--no-others]

"Plain" is the same folded forward and backward, optimiser and physical batch without privacy.
Plain and private steps take turns, and turns change which of them goes first, so that a busy
machine or a warm cache favours neither. Ratios are medians over turns, of wall and of CPU time;
the control is one plain step over another in the same turns, 1 but for noise. The first steps,
with the engine's rehearsals, are not counted. Other engines run afterwards, in processes of
their own, as they may need more memory than there is: their ratios are indicative. Memory is what
a process grows by over two steps, each kind in a process of its own.
Exit 1 when a target is missed.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import dual_stream, other_engines
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import EngineSettings, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import flow_losses, noisy_mean

TARGETS = {"median": 1.3, "worst": 1.5, "mlp": 1.3, "memory": 1.6}
CLIP, STD = 1.0, 1.0
WARM = 8
"""Steps before the clock: the engine rehearses at steps 1, 2, 4 and 8, then at 16 and 32 alone."""
MLP = Velocity(kind="mlp", width=92, depth=4)
MLP_DIM, MLP_CLASSES = 48, 10


@dataclass(frozen=True)
class Case:
    """One row: a dual-stream transformer, or the MLP velocity model where `tokens` is 0."""

    width: int
    depth: int
    tokens: int
    draws: int
    batch: int = 256

    @property
    def name(self) -> str:
        """For tables."""
        if not self.tokens:
            return f"MLP velocity, batch {self.batch}, K {self.draws}"
        return f"width {self.width}, depth {self.depth}, {self.tokens} tokens, K {self.draws}"

    def model(self, kind: type[nn.Module] | None = None) -> nn.Module:
        """The model, with `kind` in place of bare parameters."""
        torch.manual_seed(0)
        if not self.tokens:
            made = build_velocity(MLP, MLP_DIM, MLP_CLASSES)
            for parameter in made.parameters():  # the output layer starts at zero
                nn.init.normal_(parameter, std=0.1)
            return made
        return dual_stream.DualStream(self.width, self.depth, self.tokens, kind)

    def data(self) -> tuple[Tensor, ...]:
        """One batch."""
        if self.tokens:
            return dual_stream.draw(self.batch, self.draws, self.tokens)
        source, shape = torch.Generator().manual_seed(0), (self.batch, self.draws)
        return (
            torch.randn(self.batch, MLP_DIM, generator=source),
            torch.randint(MLP_CLASSES + 1, (self.batch,), generator=source),
            torch.rand(shape, generator=source),
            torch.randn((*shape, MLP_DIM), generator=source),
        )

    @property
    def losses(self) -> Callable[..., Tensor]:
        """One loss an example."""
        return dual_stream.losses if self.tokens else flow_losses


MLP_CASE = Case(MLP.width, MLP.depth, 0, 4, 1200)
CASES = [
    Case(width, depth, tokens, draws)
    for width in (64, 192)
    for depth in (3, 6)
    for tokens in (8, 49)
    for draws in (1, 4)
]


def plain_step(case: Case) -> Callable[[], None]:
    """Forward, backward and AdamW."""
    model, data = case.model(), case.data()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        case.losses(model, *data).mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def private_step(case: Case) -> Callable[[], None]:
    """Clipped sum, noise on the sum, and AdamW; the same physical batch as the plain step."""
    model, data, noise = case.model(), case.data(), NoiseSource()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clipper = PerExampleClipper(
        model, case.losses, CLIP, settings=EngineSettings(physical=case.batch)
    )

    def step() -> None:
        noisy = noisy_mean(clipper.clipped_sum(*data), STD, case.batch, noise)
        for name, parameter in model.named_parameters():
            parameter.grad = noisy[name].to(parameter.dtype)
        optimiser.step()
        optimiser.zero_grad()

    return step


STEPS = {"plain": plain_step, "private": private_step}


def seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU time (of all threads) of one step."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def measured(case: Case, runs: int) -> dict[str, Any]:
    """Median seconds of both, the median ratio over turns, and how far ratios spread."""
    steps = {"plain": plain_step(case), "private": private_step(case), "control": plain_step(case)}
    for _ in range(WARM):
        for step in steps.values():
            step()
    turns = []
    for turn in range(runs):
        order = list(steps) if turn % 2 == 0 else list(reversed(steps))
        turns.append({name: seconds(steps[name]) for name in order})
    ratios = sorted(one["private"][0] / one["plain"][0] for one in turns)

    def over_plain(name: str, clock: int) -> float:
        return statistics.median(one[name][clock] / one["plain"][clock] for one in turns)

    return {
        "plain": statistics.median(one["plain"][0] for one in turns),
        "private": statistics.median(one["private"][0] for one in turns),
        "ratio": over_plain("private", 0),
        "cpu_ratio": over_plain("private", 1),
        "control": over_plain("control", 0),
        "cpu_control": over_plain("control", 1),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def others(case: Case, options: argparse.Namespace, plain: float) -> dict[str, float | str]:
    """Ratios of the other engines to the plain step, or why there is none: each in its process."""
    found: dict[str, float | str] = {}
    for name in other_engines.ENGINES:
        done = child(case, options.threads, "--other", name, runs=options.other_runs)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            found[name] = said[-1][:100] if said else f"ended with {done.returncode}"
        else:
            found[name] = float(done.stdout) / plain
    return found


def time_other(name: str, case: Case, runs: int) -> None:
    """What `others` runs in a process of its own: median seconds."""
    model = case.model(other_engines.Constant)
    step = other_engines.ENGINES[name](model, case.losses, case.data(), CLIP)
    step()
    print(statistics.median(seconds(step)[0] for _ in range(runs)))


def grown(case: Case, kind: str, threads: int) -> int:
    """Bytes that a fresh process grows by over two steps of this kind."""
    done = child(case, threads, "--grown", kind)
    done.check_returncode()
    return int(done.stdout)


def child(
    case: Case, threads: int, what: str, name: str, *, runs: int = 1
) -> subprocess.CompletedProcess[str]:
    """This module in a process of its own: what is too large for memory ends that alone."""
    call = [sys.executable, "-W", "ignore", "-m", "benchmarks.engine"]
    sizes = ["--threads", str(threads), "--other-runs", str(runs)]
    asked = [what, name, json.dumps(asdict(case))]
    return subprocess.run([*call, *sizes, *asked], check=False, capture_output=True, text=True)


def print_growth(kind: str, case: Case) -> None:
    """What `grown` runs in a process of its own."""
    step = STEPS[kind](case)
    before = resident("VmRSS")
    for _ in range(2):
        step()
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Bytes of this process in memory, now or at most (Linux).

    Not `ru_maxrss`, in which a process starts with what its parent had.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def report(options: argparse.Namespace) -> dict[str, Any]:
    """All rows, and the targets with what was found."""
    cases = [c for c in CASES if c.width == 64 and c.depth == 3] if options.quick else CASES
    rows = []
    for case in [*cases, MLP_CASE]:
        row = {"case": case.name, **measured(case, options.runs)}
        gc.collect()
        row["memory"] = grown(case, "private", options.threads) / grown(
            case, "plain", options.threads
        )
        if not options.no_others:
            row["others"] = others(case, options, row["plain"])
        rows.append(row)
        print(f"{case.name}: {row['ratio']:.2f}", file=sys.stderr)
    ratios = [row["ratio"] for row in rows[:-1]]
    found = {
        "median": statistics.median(ratios),
        "worst": max(ratios),
        "mlp": rows[-1]["ratio"],
        "memory": max(row["memory"] for row in rows),
    }
    return {
        "threads": options.threads,
        "runs": options.runs,
        "rows": rows,
        "found": found,
        "targets": TARGETS,
    }


def print_report(found: dict[str, Any]) -> None:
    """The table, then targets."""
    from dpsynth.console import render, table

    engines = list(other_engines.ENGINES)
    lines = [
        (
            row["case"],
            f"{1e3 * row['plain']:.0f} ms",
            f"{row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})",
            f"{row['cpu_ratio']:.2f}",
            f"{row['control']:.2f}, {row['cpu_control']:.2f}",
            f"{row['memory']:.2f}",
            *(_cell(row.get("others", {}).get(name)) for name in engines),
        )
        for row in found["rows"]
    ]
    shown = [f"{name} (indicative)" for name in engines]
    title = f"private step / plain step, {found['threads']} threads, medians of {found['runs']}"
    render(
        table(
            ("case", "plain", "private", "CPU", "control, CPU", "memory", *shown),
            lines,
            title=title,
        )
    )
    for name, most in found["targets"].items():
        print(f"{name}: {found['found'][name]:.2f}, at most {most}")
    for row in found["rows"]:
        for name, value in row.get("others", {}).items():
            if isinstance(value, str):
                print(f"{row['case']}, {name}: {value}")


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return "does not run" if isinstance(value, str) else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="width 64, depth 3 and the MLP alone")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--other-runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-others", action="store_true")
    parser.add_argument("--other", nargs=2, metavar=("NAME", "CASE"), help=argparse.SUPPRESS)
    parser.add_argument("--grown", nargs=2, metavar=("KIND", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.other:
        name, case = options.other
        time_other(name, Case(**json.loads(case)), options.other_runs)
        return 0
    if options.grown:
        kind, case = options.grown
        print_growth(kind, Case(**json.loads(case)))
        return 0
    found = report(options)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_report(found)
    return int(any(found["found"][name] > most for name, most in TARGETS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
