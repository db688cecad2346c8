"""Digits with captions: class, stroke and a marked quadrant (StraightDP, section C and Table 4).

Each image carries a dot in one of four corners and is drawn thin (eroded) or thick (dilated). The
public counterpart does the same to Fashion-MNIST, whose captions name its own articles.
"""

import fcntl
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import grey_dilation, grey_erosion

from benchmarks.straightdp.plans import CLASS_TEMPLATE, DATA, DIGITS, TEMPLATE

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

STROKES: list[str] = TEMPLATE["slots"]["stroke"]
QUADRANTS: list[str] = TEMPLATE["slots"]["quadrant"]
DOT = 4
ARTICLES = ("shirt", "trouser", "pullover", "dress", "coat", "sandal", "blouse", "sneaker", "bag",
            "boot")  # fmt: skip


def read(folder: str, side: str) -> tuple[Images, Labels]:
    """Images (n, 28, 28) and labels (n,) of an IDX pair in the shared data."""
    stem = DATA / folder / side
    images = gzip.decompress(Path(f"{stem}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress(Path(f"{stem}-labels-idx1-ubyte.gz").read_bytes())
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)
    return pixels, np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)


def compose(images: Images, seed: int) -> tuple[Images, Labels, Labels]:
    """Marked images (n, 28, 28), their strokes (n,) and quadrants (n,), drawn evenly."""
    source = np.random.default_rng(seed)
    strokes = source.integers(len(STROKES), size=len(images))
    quadrants = source.integers(len(QUADRANTS), size=len(images))
    thin = np.stack([grey_erosion(image, size=(2, 2)) for image in images])
    thick = np.stack([grey_dilation(image, size=(2, 2)) for image in images])
    made = np.where((strokes == 0)[:, None, None], thin, thick)
    for quadrant in range(len(QUADRANTS)):
        down, across = divmod(quadrant, 2)
        rows = slice(24, 28) if down else slice(0, DOT)
        columns = slice(24, 28) if across else slice(0, DOT)
        made[np.flatnonzero(quadrants == quadrant)[:, None, None], rows, columns] = 255
    return made, strokes, quadrants


def caption(name: str, stroke: int, quadrant: int) -> str:
    """The caption of one image.

    >>> caption("7", 0, 3)
    'a thin 7 with a dot lower-right'
    """
    values = {"stroke": STROKES[stroke], "class": name, "quadrant": QUADRANTS[quadrant]}
    return str(TEMPLATE["template"]).format(**values)


def prepare(work: Path) -> None:
    """Write `captioned/` and `composed/`: NPZ archives of images, labels and captions.

    An archive that is there is kept.
    """
    jobs = (("mnist", "train", DIGITS), ("mnist", "t10k", DIGITS), ("fashion", "train", ARTICLES))
    for seed, (name, side, names) in enumerate(jobs):
        path = work / "composed" / f"{name}-{side}.npz"
        if path.exists():
            continue
        images, labels = read("mnist" if name == "mnist" else "fashion-mnist", side)
        made, strokes, quadrants = compose(images, seed)
        parts = zip(labels.tolist(), strokes.tolist(), quadrants.tolist(), strict=True)
        captions = [caption(names[y], stroke, quadrant) for y, stroke, quadrant in parts]
        if name == "mnist":
            template = str(CLASS_TEMPLATE["template"])
            plain = [template.format_map({"class": names[y]}) for y in labels.tolist()]
            _save(work / "captioned" / path.name, images, labels, plain)
        _save(path, made, labels, captions)  # last: it says that all is there


def _save(path: Path, images: Images, labels: Labels, captions: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(part, images=images, labels=labels, captions=np.array(captions))
    part.rename(path)  # whole, or not there


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a file's lock: another process waits."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
