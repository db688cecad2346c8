"""Clothes in colours: Fashion-MNIST, dyed and put on a coloured ground, 32x32.

The prior's images have any dye on any ground; a style takes both from a small box of RGB. The
private style is warm on dark. The other one is public: a stand-in that settings are chosen by.
"""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "fashion-mnist"
CLASSES = (
    "tee",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
"""Fashion-MNIST's, each in one word."""
SIDE = 32
RECORDS = 2_040
"""Of a private set: as many as the paper's, 204 of each class."""


@dataclass(frozen=True)
class Style:
    """Boxes of RGB in [0, 1]: `ground` and `dye` are centres, `spread` is half a side."""

    ground: tuple[float, float, float] = (0.5, 0.5, 0.5)
    dye: tuple[float, float, float] = (0.5, 0.5, 0.5)
    spread: float = 0.5


STYLES = {
    "any": Style(),
    "warm": Style((0.25, 0.08, 0.06), (0.90, 0.60, 0.20), 0.06),
    "cool": Style((0.75, 0.90, 0.94), (0.15, 0.25, 0.60), 0.06),
}


def clothes(split: str, rows: slice) -> tuple[Images, Labels]:
    """Grey images (n, 28, 28) and labels (n,) of a split of Fashion-MNIST, `train` or `t10k`."""
    with gzip.open(DATA / f"{split}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    with gzip.open(DATA / f"{split}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
    return images[rows], labels[rows]


def dyed(grey: Images, style: Style, seed: int, side: int = SIDE) -> Images:
    """Grey images (n, 28, 28) in a style, uint8 (n, side, side, 3): dye and ground by chance.

    The piece of clothing is an eighth of the side away from the edges; its shade is its grey.
    """
    from PIL import Image

    source, pad = np.random.default_rng(seed), side // 16
    inner = side - 2 * pad
    shape = (len(grey), 1, 1, 3)
    ground, dye = (
        np.asarray(centre) + style.spread * source.uniform(-1, 1, shape)
        for centre in (style.ground, style.dye)
    )
    large = np.zeros((len(grey), side, side, 1))
    for row, one in enumerate(grey):
        drawn = Image.fromarray(one).resize((inner, inner), Image.Resampling.BILINEAR)
        large[row, pad:-pad, pad:-pad, 0] = np.asarray(drawn) / 255
    cover = np.clip(4 * large, 0, 1)
    pictures = (1 - cover) * ground + cover * dye * (0.25 + 0.75 * large)
    return np.rint(255 * pictures.clip(0, 1)).astype(np.uint8)


def private_set(
    style: str, count: int = RECORDS, side: int = SIDE, *, after: int = 0
) -> tuple[Images, Labels]:
    """`count` images of a style, as many of each class, of clothes that the prior never saw.

    Styles take different clothes: the stand-in has none in common with the private set. `after`:
    the images that come after so many, which are held out.
    """
    half = slice(0, 5_000) if style == "warm" else slice(5_000, 10_000)
    grey, labels = clothes("t10k", half)
    first, each = after // len(CLASSES), count // len(CLASSES)
    rows = np.concatenate(
        [np.flatnonzero(labels == label)[first : first + each] for label in range(len(CLASSES))]
    )
    return dyed(grey[rows], STYLES[style], seed=1 + after, side=side), labels[rows]


def write_folder(folder: Path, images: Images, labels: Labels) -> Path:
    """An image folder with `metadata.csv`, written once; returns it."""
    from PIL import Image

    if (folder / "metadata.csv").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for row, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{row:05d}.png")
    part = folder / "metadata.part"
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("file_name", "label"))
        writer.writerows((f"{row:05d}.png", CLASSES[label]) for row, label in enumerate(labels))
    part.rename(folder / "metadata.csv")
    return folder
