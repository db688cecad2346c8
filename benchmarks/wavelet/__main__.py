"""The numbers of DP-Wavelet: `python -m benchmarks.wavelet`.

    python -m benchmarks.wavelet [--work DIR] [--full] [--json] [--processes 1]
                                 [--part emoji --part limits --part scales --part steps
                                  --part complete --part digits --part picture]
    python -m benchmarks.wavelet --row wavelet-10-0 [--row raster-10-0 ...]

Emoji: Twemoji is public, Noto private. Three methods (`plans/emoji-*.yaml`), each as its public
model, at epsilon 1 and 10, and without clip and noise: FD and an LPIPS-style distance by caption to
held-in Noto images, in features of a classifier of Twemoji (`judge`). Images are drawn for 1,000
captions, the same for all; `--full` takes every caption, and three runs at epsilon 1 as well.
Resumable: what is finished in the work folder is kept.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.wavelet import digits, pictures, report, scales, steps
from benchmarks.wavelet.plans import Cell, cells
from benchmarks.wavelet.runs import Runs

PARTS = ("emoji", "limits", "scales", "steps", "complete", "digits", "picture")
ENOUGH = 1_000
"""Images that `complete-wavelet` is timed on."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what was asked for, print it, and keep it as JSON in the work folder."""
    options = parsed(arguments)
    runs = Runs(options.work.resolve(), options.size, options.processes)
    if options.row:
        known = {cell.name: cell for cell in cells(full=True)}
        wanted = [known[name] for name in options.row]
        print(json.dumps(runs.made(wanted), indent=1))
        return
    found: dict[str, Any] = {}
    for part in options.part or PARTS:
        found[part] = made(part, runs, options)
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
    parser.add_argument("--work", type=Path, help="default: runs/wavelet[-SIZE]")
    parser.add_argument("--full", action="store_true", help="every caption; three runs at 1 too")
    parser.add_argument("--tiny", action="store_true", help="a look at whether all of it runs")
    parser.add_argument("--part", action="append", choices=PARTS, default=[])
    parser.add_argument("--row", action="append", default=[], help="cells, such as wavelet-10-0")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, a thread each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    options.size = "full" if options.full else "tiny" if options.tiny else "compact"
    suffix = "" if options.size == "compact" else f"-{options.size}"
    options.work = options.work or Path(f"runs/wavelet{suffix}")
    return options


def made(part: str, runs: Runs, options: argparse.Namespace) -> Any:
    """One part's numbers, which are printed too unless JSON was asked for."""
    if part == "emoji":
        scores = runs.made(cells(full=options.full))
        bounds = runs.bounds("wavelet")
        if not options.json:
            report.show(scores, bounds)
        return {"scores": scores, "bounds": bounds}
    if part == "digits":
        return said(digits.measured(runs.work), options)
    if part == "limits":
        return said(held_back(runs), options)
    if part == "steps":
        return said(steps.ratio(), options)
    if part == "complete":
        return said(completion(runs), options)
    if part == "picture":
        return str(pictures.draw(runs, runs.work / "emoji.png"))
    return by_scale(runs, options)


def held_back(runs: Runs) -> dict[str, dict[str, dict[str, float]]]:
    """What the tokens of both methods lose by themselves, see `limits`."""
    from benchmarks.wavelet.limits import limits
    from benchmarks.wavelet.records import judge_of

    found = {}
    for method in ("wavelet", "raster"):
        room = runs.room(method)
        judge, _ = judge_of(room, runs.work)
        found[method] = limits(room, judge, runs.count)
    return found


def by_scale(runs: Runs, options: argparse.Namespace) -> dict[str, Any]:
    """Energy and errors by scale of the emoji plans and of the digits, where these have run."""
    rooms = {"emoji-wavelet": runs.room("wavelet"), "emoji-raster": runs.room("raster")}
    rooms |= {name: runs.work / "runs" / name for name in digits.NAMES}
    found = {}
    for name, run in rooms.items():
        path = run / "public" / "calibration.json"
        if path.exists() and "tokens" in json.loads(path.read_text()):
            found[name] = scales.facts_of(run)
            if not options.json:
                scales.show(name, run)
    return found


def completion(runs: Runs) -> dict[str, float]:
    """Seconds of `complete-wavelet` on coarse samples of epsilon 10, and for 1,000 images."""
    cell = Cell("wavelet", "10")
    runs.made([cell])
    run, start = runs.work / "runs" / cell.name, time.perf_counter()
    out = run / "released" / "samples-timed"
    runs.dpsynth("complete", "complete-wavelet", run, "--out", "samples-timed")
    seconds = time.perf_counter() - start
    count = len((out / "metadata.csv").read_text(encoding="utf-8").splitlines()) - 1
    return {"images": count, "seconds": seconds, f"of {ENOUGH}": seconds * ENOUGH / count}


def said(found: Any, options: argparse.Namespace) -> Any:
    """Print plain values, and give them back."""
    if not options.json:
        print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
