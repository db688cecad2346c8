"""Time `dpsynth --help` against a bare typer app with as many commands.

    python -m benchmarks.startup [--json] [--runs 15]

Each figure is the median wall time of a whole process; the two take turns, so that a busy
machine slows both. Exit 1 when the ratio is above 1.5.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOST_RATIO = 1.5

_BARE = '''
import typer

app = typer.Typer(help="A bare app.", add_completion=False, pretty_exceptions_enable=False)


def make(number):
    def command(name: str = typer.Argument("x"), json: bool = typer.Option(False, help="JSON.")):
        """Do one thing well, and say in one line of help what it is."""

    app.command(f"command-{number}")(command)


for number in range(COUNT):
    make(number)
app()
'''


def command_count() -> int:
    """How many subcommands dpsynth has."""
    from dpsynth.commands._app import app

    return len(app.registered_commands)


def wall_time(command: list[str]) -> float:
    """Seconds of one process, output thrown away."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(runs: int) -> dict[str, float | int]:
    """Median seconds of both, and their ratio."""
    count = command_count()
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(_BARE.replace("COUNT", str(count)))
        commands = {
            "bare": [sys.executable, str(bare), "--help"],
            "dpsynth": [sys.executable, "-m", "dpsynth", "--help"],
        }
        for command in commands.values():  # byte code and disk caches first
            wall_time(command)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                times[name].append(wall_time(command))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {"commands": count, **medians, "ratio": medians["dpsynth"] / medians["bare"]}


def main() -> int:
    """Print the figures; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    found = measure(options.runs)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"bare typer app, {found['commands']} commands: {found['bare']:.3f} s")
        print(f"dpsynth --help:               {found['dpsynth']:.3f} s")
        print(f"ratio {found['ratio']:.2f} (at most {MOST_RATIO})")
    return 0 if found["ratio"] <= MOST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
