"""Time the moment release from disk against bare BLAS, and against bare Pillow decoding.

    python -m benchmarks.streaming [--rows 1000000] [--pictures 10000] [--runs 3] [--json]

`release-moments` of ROWS x 784 records in an IDX pair (`kind: pixels`, ten classes, random labels)
beside `z.T @ z` of the same pixels as float64, read from the same file by blocks. Each figure is
that of a fresh process, from the charge to the settled file; starting Python, importing torch and
`dpsynth check` are outside. The release has one covariance for all classes. With one a class the
pass over the records is timed alone, and the noise beside: there are 3.1 million numbers to draw
it for, however few the records are.

Then PNG files through the reader, encoder and exact sums of the mechanism, in one process, beside
`np.asarray(Image.open(path))` on as many threads: 28 x 28 grey (`pixels`), and 128 x 128 colour by
16 directions (each is 98,304 operations a picture: with many, encoding costs more than decoding).
Wall-clock seconds, medians; both take turns. Threads are those of OMP_NUM_THREADS, else all cores.
Exit 1 when a ratio is missed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

MOST_RATIO, MOST_BYTES, LEAST_SHARE = 1.3, 1.5e9, 0.8
SIDE, CLASSES, BLOCK = 28, 10, 8192
KINDS = ("bare", "release", "class-pass")
# Large pictures are fewer: they take as long.
LARGE, FEWER, DIRECTIONS = 128, 5, 16
PLAN = """\
version: 1
name: streaming
budget: {{epsilon: 3.0, delta: 1e-8}}
private:
  source: {{kind: idx, images: {folder}/images, labels: {folder}/labels}}
  capacity: {rows}
  image: {{height: 28, width: 28}}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out:
    by: source
    source: {{kind: idx, images: {folder}/few-images, labels: {folder}/few-labels}}
public: [{{kind: letters, count: 2000}}]
representation: {{kind: pixels}}
stages: {{moments: {{covariance: {covariance}}}}}
sampling: {{method: release, count: 10}}
"""


def main() -> int:
    """Print the figures; 1 when a ratio is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for the files (a temporary one)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.worker[0], Path(options.worker[1]))))
        return 0
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "runs": options.runs}
        if options.rows:
            found["moments"] = moments(Path(folder), options.rows, options.runs)
        if options.pictures:
            found["pictures"] = pictures(Path(folder), options.pictures, options.runs)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0 if reached(found) else 1


def reached(found: dict[str, Any]) -> bool:
    """Whether every ratio, share and size is as asked for."""
    rows = found.get("moments", {})
    parts = [
        *(rows[kind]["ratio"] <= MOST_RATIO for kind in KINDS[1:] if rows),
        *(rows[kind]["bytes"] <= MOST_BYTES for kind in KINDS[1:] if rows),
        *(row["share"] >= LEAST_SHARE for row in found.get("pictures", {}).values()),
    ]
    return all(parts)


def moments(folder: Path, rows: int, runs: int) -> dict[str, Any]:
    """Seconds and bytes of each kind of process, over `runs` of each; ratios to the bare one."""
    write_records(folder, rows)
    plans = {}
    for covariance in ("shared", "class"):
        plans[covariance] = folder / f"{covariance}.yaml"
        text = PLAN.format(folder=folder, rows=rows, covariance=covariance)
        plans[covariance].write_text(text)
    prepare(plans["class"], folder / "class-pass")
    prepare(plans["shared"], folder / "shared")
    measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(runs):
        for kind in KINDS:
            place = {"bare": folder, "class-pass": folder / "class-pass"}.get(kind)
            if place is None:  # a run spends once: each has a run folder of its own
                place = folder / f"release-{number}"
                share_public(plans["shared"], folder / "shared", place)
            measured[kind].append(in_process(kind, place))
    found: dict[str, Any] = {"rows": rows}
    for kind, many in measured.items():
        found[kind] = {key: statistics.median(one[key] for one in many) for key in many[0]}
        found[kind]["ratio"] = statistics.median(
            one["seconds"] / bare["seconds"]
            for one, bare in zip(many, measured["bare"], strict=True)
        )
    return found


def write_records(folder: Path, rows: int) -> None:
    """An IDX pair of letters with random labels, and a small one that is held out."""
    from dpsynth.planning.schema import ImageShape
    from dpsynth.readers.letters import render

    shape = ImageShape(height=SIDE, width=SIDE)
    letters = np.stack([image for image, _ in render(2000, 1, shape)])[..., 0]
    draw = np.random.default_rng(0)
    for name, count in (("", rows), ("few-", 10)):
        with (folder / f"{name}images").open("wb") as images:
            images.write(head(count, SIDE, SIDE))
            for start in range(0, count, BLOCK):
                images.write(letters[draw.integers(0, len(letters), min(BLOCK, count - start))])
        with (folder / f"{name}labels").open("wb") as labels:
            labels.write(head(count) + draw.integers(0, CLASSES, count, dtype=np.uint8).tobytes())


def head(*shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + np.array(shape, ">u4").tobytes()


def prepare(plan: Path, run: Path) -> None:
    """Plan, public room and check, outside what is timed.

    The calibration holds what a release reads; `pretrain` would also fit what comes after it.
    """
    from dpsynth.artifacts.files import sha256_file, write_json
    from dpsynth.planning.verify import load_verified
    from dpsynth.public.calibrate import clip_radius
    from dpsynth.public.geometry import PixelCodec
    from dpsynth.public.representation import GEOMETRY, save_geometry, standardised
    from dpsynth.public.sources import read_public

    dpsynth("plan", plan, "--run", run)
    verified = load_verified(run)
    images = read_public(verified.plan).images
    space = standardised(PixelCodec((SIDE, SIDE, 1)), images)
    path = verified.run.public / GEOMETRY
    save_geometry(path, space, {"recipe": "benchmark", "kind": "pixels"})
    radius = clip_radius(space.encode(images), verified.plan.representation.clip_quantile)
    write_json(verified.run.calibration, {"radius": radius, "geometry_sha256": sha256_file(path)})
    dpsynth("check", run)


def dpsynth(*arguments: Any) -> None:
    command = [sys.executable, "-m", "dpsynth", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


def share_public(plan: Path, made: Path, run: Path) -> None:
    """A run of its own on the public room and the check of another."""
    import shutil

    dpsynth("plan", plan, "--run", run)
    shutil.copytree(made / "public", run / "public", dirs_exist_ok=True)
    shutil.copy(made / "curator" / "check.json", run / "curator" / "check.json")


def in_process(kind: str, place: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.streaming", "--worker", kind, str(place)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(kind: str, place: Path) -> dict[str, float]:
    """What one process measures: seconds of the work, of its noise, and the most memory it had."""
    found = {"bare": bare_product, "release": release, "class-pass": class_pass}[kind](place)
    return {**found, "bytes": most_memory()}


def most_memory() -> int:
    """Peak resident bytes of this process; Linux's ru_maxrss may be that of the parent."""
    status = Path("/proc/self/status")
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(peak.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bare_product(folder: Path) -> dict[str, float]:
    """`z.T @ z` of the images file by blocks, as float64."""

    def product() -> None:
        total = np.zeros((SIDE * SIDE, SIDE * SIDE))
        with (folder / "images").open("rb") as file:
            file.read(16)
            while block := file.read(BLOCK * SIDE * SIDE):
                z = np.frombuffer(block, np.uint8).reshape(-1, SIDE * SIDE).astype(np.float64)
                total += z.T @ z

    return {"seconds": timed(product)}


def release(run: Path) -> dict[str, float]:
    """The whole release, and how much of it is the drawing of noise."""
    from dpsynth.planning.verify import load_verified
    from dpsynth.private import moments as library
    from dpsynth.private.lattice import Block

    verified, drawing, plain = load_verified(run), [0.0], Block.release

    def watched(self: Block, *given: Any) -> Any:
        out = []
        drawing[0] += timed(lambda: out.append(plain(self, *given)))
        return out[0]

    Block.release = watched  # type: ignore[method-assign]
    seconds = timed(lambda: library.release_moments(verified))
    return {"seconds": seconds, "noise": drawing[0]}


def class_pass(run: Path) -> dict[str, float]:
    """One pass over the records for sums by class, and the noise for one class of the ten."""
    from dpsynth.planning.verify import load_verified
    from dpsynth.private.blocks import blocks_of
    from dpsynth.private.encoding import private_stream
    from dpsynth.private.moments import class_sums
    from dpsynth.private.noise import NoiseSource
    from dpsynth.public.representation import load_representation

    verified = load_verified(run)
    slots = verified.lock.stage_slots("moments")
    representation = load_representation(verified.run, verified.plan)
    out: list[Any] = []
    stream = private_stream(verified, representation)
    seconds = timed(lambda: out.append(class_sums(stream, slots, CLASSES)))
    second = (blocks_of(slots, representation.radius).second or ())[-1]
    noise = NoiseSource()
    one = out[0].seconds[0][np.triu_indices(SIDE * SIDE, k=1)]
    return {"seconds": seconds, "noise": CLASSES * timed(lambda: second.release(one, noise))}


def pictures(folder: Path, count: int, runs: int) -> dict[str, Any]:
    """Records a second of small grey and larger colour pictures, beside bare decoding."""
    found = {}
    for side, channels, number in ((SIDE, 1, count), (LARGE, 3, count // FEWER)):
        place = folder / f"pictures-{side}"
        paths = write_pictures(place, side, channels, number)
        threads = workers()
        alone, ours = [], []
        read = reading(place, side, channels)
        for _ in range(runs + 1):  # the first of each warms up
            alone.append(number / timed(lambda: bare_decoding(paths, threads)))  # noqa: B023
            ours.append(number / timed(read))
        shares = [x / y for x, y in zip(ours[1:], alone[1:], strict=True)]
        found[f"{side} x {side} x {channels}"] = {
            "pictures": number,
            "workers": threads,
            "bare": statistics.median(alone[1:]),
            "release": statistics.median(ours[1:]),
            "share": statistics.median(shares),
        }
    return found


def workers() -> int:
    from dpsynth.readers.parallel import workers as found

    return found()


def write_pictures(folder: Path, side: int, channels: int, count: int) -> list[str]:
    """PNG files of letters on a slightly noisy ground, one folder a class."""
    from PIL import Image

    from dpsynth.planning.schema import ImageShape
    from dpsynth.readers.letters import render

    draw, paths = np.random.default_rng(2), []
    letters = [image for image, _ in render(200, 1, ImageShape(height=side, width=side))]
    for number in range(count):
        noisy = letters[number % len(letters)].astype(np.int64) + draw.integers(
            0, 8, (side, side, channels)
        )
        pixels = noisy.clip(0, 255).astype(np.uint8)
        path = folder / str(number % CLASSES) / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(path)
        paths.append(str(path))
    return paths


def bare_decoding(paths: list[str], threads: int) -> None:
    """Open and decode every picture by Pillow on so many threads, 64 at a time."""
    from PIL import Image

    def many(part: list[str]) -> None:
        for path in part:
            with Image.open(path) as picture:
                np.asarray(picture)

    parts = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(many, parts):
            pass


def reading(folder: Path, side: int, channels: int) -> Callable[[], object]:
    """The mechanism's pass over a folder: list, read, decode, encode, quantise, sum exactly."""
    from dpsynth.accounting.statistics import ClassMoments
    from dpsynth.artifacts.lock import Slot
    from dpsynth.planning.schema import ImageShape
    from dpsynth.planning.source_kinds import FolderSource
    from dpsynth.private.encoding import CodeStream
    from dpsynth.private.moments import class_sums
    from dpsynth.readers import open_source
    from dpsynth.vault import Units

    image = ImageShape(height=side, width=side, channels=1 if channels == 1 else 3)
    names = [str(number) for number in range(CLASSES)]
    space = representation(side, channels)
    statistic = ClassMoments(0.2, 0.7, 0.6, "shared", CLASSES, space.dim)
    slots = (Slot(1, "moments", "moments", statistic, 1.0),)

    def read() -> None:
        source = open_source(FolderSource(kind="folder", path=folder), names, image)
        units = Units(source, image, rows=lambda block: np.ones(len(block), np.bool_))
        sums = class_sums(CodeStream(units, space, CLASSES), slots, CLASSES)
        if not sums.counts.sum():
            raise SystemExit("no picture was read")

    return read


def representation(side: int, channels: int) -> Any:
    """Pixels of small pictures; of larger ones 16 numbers, by directions drawn at random."""
    from dpsynth.public.geometry import PcaCodec, PixelCodec
    from dpsynth.public.representation import Representation

    shape, size = (side, side, channels), side * side * channels
    if side == SIDE:
        return Representation(PixelCodec(shape), shape, np.full(size, 50.0), 80.0, 30.0)
    draw = np.random.default_rng(3)
    basis = np.linalg.qr(draw.standard_normal((size, DIRECTIONS)))[0].T
    codec = PcaCodec(np.ascontiguousarray(basis), np.full(size, 0.2), shape)
    return Representation(codec, shape, np.zeros(DIRECTIONS), 1.0, 60.0)


def lines(found: dict[str, Any]) -> Iterator[str]:
    rows = found.get("moments")
    if rows:
        names = {
            "bare": "bare z.T @ z",
            "release": "release-moments, shared covariance",
            "class-pass": "pass for class covariances",
        }
        for kind, name in names.items():
            row = rows[kind]
            noise = f", noise {row['noise']:.1f} s" if "noise" in row else ""
            where = " of it" if kind == "release" else " apart" if noise else ""
            yield (
                f"{name:36}{row['seconds']:8.1f} s  {row['ratio']:5.2f}  "
                f"{row['bytes'] / 1e9:5.2f} GB{noise}{where}"
            )
        yield f"{rows['rows']:,} x 784; asked for: {MOST_RATIO} times, {MOST_BYTES / 1e9} GB"
    for name, row in found.get("pictures", {}).items():
        yield (
            f"{row['pictures']:,} PNG files {name}, {row['workers']} threads: bare "
            f"{row['bare']:,.0f} a second, release {row['release']:,.0f} ({row['share']:.0%})"
        )


def show(found: dict[str, Any]) -> None:
    print(f"{found['cores']} cores, medians of {found['runs']}")
    for line in lines(found):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
