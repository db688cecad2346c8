"""The tables and figures of StraightDP, the paper's values beside ours.

    python -m benchmarks.straightdp --table 1 [--table 2 ...] [--figure 2 ...] [--full]
                                    [--work DIR] [--processes 2] [--encoder DIR|minilm] [--json]
    python -m benchmarks.straightdp --row "pixel: planned + moments" [--epsilon 1] [--full]
    python -m benchmarks.straightdp --tune | --signal | --clamp

Compact sizes on two cores: a small backbone, few steps, three runs at epsilon 1 and one elsewhere;
`--full` takes the paper's sizes and three runs everywhere. Rows share public stages and runs.
Resumable: what is finished in the work folder is kept. FID is blank without Inception weights; FD
is the Frechet distance in features of a LeNet trained on real digits. `--tune` chooses learning
rates on public data alone; `--signal` shows what holds a gradient stage back, `--clamp` what the
clamp B0 does to the public loss and to gradients.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.straightdp import figures, report, rows
from benchmarks.straightdp.runs import Runs

TABLES = ("1", "2", "4", "5", "7", "gradient")
FIGURES = ("2", "3", "4", "6")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what was asked for, print it, and keep it as JSON in the work folder."""
    options = parsed(arguments)
    runs = Runs(options.work.resolve(), options.size, options.processes)
    if options.tune:
        from benchmarks.straightdp import tune

        tune.main(runs, spaces=options.space)
    if options.signal:
        from benchmarks.straightdp import signal

        signal.main(runs)
    if options.clamp:
        from benchmarks.straightdp import clamp

        clamp.main(runs)
    if options.row:
        one_row(runs, options.row, options.epsilon, full=options.full)
    looks = options.tune or options.signal or options.clamp
    asked = looks or options.row or options.figure
    tables(runs, options.table or ([] if asked else TABLES), options)
    for name in options.figure:
        print(figures.draw(name, runs))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="append", choices=TABLES, default=[])
    parser.add_argument("--figure", action="append", choices=FIGURES, default=[])
    parser.add_argument("--row", help="one row of the tables, by its name")
    parser.add_argument("--epsilon", type=float, default=1.0, help="of --row")
    parser.add_argument("--full", action="store_true", help="the paper's sizes; three runs each")
    parser.add_argument("--tiny", action="store_true", help="a look at whether all of it runs")
    parser.add_argument("--work", type=Path, help="default: runs/straightdp[-SIZE]")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--encoder", help="of Table 4's pooled text encoder: a folder, or minilm")
    parser.add_argument("--tune", action="store_true", help="learning rates, on public data alone")
    parser.add_argument("--space", action="append", help="of --tune; default: latent and pixel")
    parser.add_argument("--signal", action="store_true", help="what a gradient stage can gain")
    parser.add_argument("--clamp", action="store_true", help="the clamp's price and effect")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    options.size = "full" if options.full else "tiny" if options.tiny else "compact"
    suffix = "" if options.size == "compact" else f"-{options.size}"
    options.work = options.work or Path(f"runs/straightdp{suffix}")
    return options


def tables(runs: Runs, names: Sequence[str], options: argparse.Namespace) -> None:
    """Make, print and keep tables."""
    if not names:
        return
    found = {
        name: runs.made(rows.table(name, full=options.full, encoder=options.encoder))
        for name in names
    }
    bounds = runs.bounds()
    path = runs.work / "tables.json"
    report.keep(found, bounds, path)
    if options.json:
        print(path.read_text())
        return
    for name, scores in found.items():
        report.show(name, scores, bounds)
    print("\n".join(report.notes(found, runs.size)))


def one_row(runs: Runs, name: str, epsilon: float, *, full: bool) -> None:
    """Make one row at one epsilon, and print what was measured and how long each step took."""
    known = rows.every_row()
    if name not in known:
        raise SystemExit(f"there is no row {name!r}; rows: {', '.join(known)}")
    cells = rows.cells({name: known[name]}, (epsilon,), full=full)
    print(json.dumps(runs.made(cells), indent=1))


if __name__ == "__main__":
    main()
