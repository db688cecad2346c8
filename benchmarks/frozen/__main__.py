"""The numbers of frozen text-to-image priors: `python -m benchmarks.frozen`.

    python -m benchmarks.frozen [--guidance] [--step] [--memory] [--accounting] [--tiny]
                                [--work DIR] [--json]

A small prior in the form of Stable Diffusion 3 is trained on public clothes in all colours (about
ten minutes of one core). Guidance at epsilon 2 steers it to a private set of one palette: which
share of the gap between both means do its samples close, by the released mean and by each control,
and from which noise level (`gap`)? The step of DP-LoRA over a plain one, the peak memory of guiding
250 and 1,000 images, and the budgets of the paper's Table 3. All parts where none is named.
Resumable: what is finished in the work folder is kept.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frozen import accounting, memory, pictures, report, steps
from benchmarks.frozen.plans import LEVELS, SIGMA
from benchmarks.frozen.runs import PRIVATE, STAND_IN, Runs

PARTS = ("guidance", "step", "memory", "accounting")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what was asked for, print it, and keep it as JSON in the work folder."""
    options = parsed(arguments)
    runs = Runs(options.work.resolve(), options.size)
    runs.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for part in options.parts:
        found[part] = made(part, runs, quiet=options.json)
    path = runs.work / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | found, indent=1))
    if options.json:
        print(path.read_text())


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for part in PARTS:
        parser.add_argument(f"--{part}", action="append_const", dest="parts", const=part)
    parser.add_argument("--work", type=Path, help="default: runs/frozen[-tiny]")
    parser.add_argument("--tiny", action="store_true", help="a look at whether all of it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(PARTS)
    options.size = "tiny" if options.tiny else "compact"
    options.work = options.work or Path("runs/frozen-tiny" if options.tiny else "runs/frozen")
    return options


def made(part: str, runs: Runs, *, quiet: bool) -> Any:
    """One part's numbers, which are printed too unless JSON was asked for."""
    if part == "guidance":
        return guidance(runs, quiet=quiet)
    if part == "accounting":
        rows = accounting.rows()
        if not quiet:
            accounting.show(rows)
        return rows
    found: Any = steps.measured(runs.size) if part == "step" else memory.peaks(runs)
    if not quiet:
        print(json.dumps(found, indent=1))
    return found


def guidance(runs: Runs, *, quiet: bool) -> dict[str, Any]:
    """The level chosen by the stand-in, the means at it and at the paper's, levels, and a picture.

    All of the stand-in's numbers come first: nothing of the private set chooses anything.
    """
    public = report.sweep(runs, STAND_IN, LEVELS)
    sigma = report.chosen(public)
    tables = [report.means_table(runs, level) for level in dict.fromkeys((SIGMA, sigma))]
    private = report.sweep(runs, PRIVATE, LEVELS)
    if not quiet:
        for table in tables:
            report.show_means(table)
        report.show_sweep(STAND_IN, public)
        report.show_sweep(PRIVATE, private)
    picture = pictures.draw(runs, sigma, runs.work / "frozen-guidance.png")
    return {
        "chosen": sigma,
        "tables": tables,
        "sweeps": {STAND_IN: public, PRIVATE: private},
        "picture": str(picture),
    }


if __name__ == "__main__":
    main()
