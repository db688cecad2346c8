"""Ten letters in the place of the private records: what `--tune` chooses learning rates on.

Public data alone: drawn by the glyphs source. A class is one letter, capital and small.
"""

import string
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.straightdp.composed import Images, Labels
from dpsynth.planning.schema import ImageShape
from dpsynth.readers.letters import glyphs, render

LETTERS = "acefhkmprt"  # neither case of them looks like a digit
COUNTS = {"train": 60_000, "held-out": 10_000}


def prepare(work: Path) -> None:
    """Write `letters/train.npz` and `letters/held-out.npz`, where they are missing."""
    for seed, (side, count) in enumerate(COUNTS.items(), start=11):
        path = work / "letters" / f"{side}.npz"
        if path.exists():
            continue
        images, labels = drawn(count, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(part, images=images, labels=labels)
        part.rename(path)  # whole, or not there


def drawn(count: int, seed: int) -> tuple[Images, Labels]:
    """Images uint8 (n, 28, 28) and labels (n,) in [0, 10)."""
    style = replace(glyphs(digit_like=False), letters=LETTERS + LETTERS.upper())
    pairs = list(render(count, seed, ImageShape(height=28, width=28), style))
    places = [LETTERS.index(string.ascii_lowercase[label]) for _, label in pairs]
    return np.stack([image[..., 0] for image, _ in pairs]), np.array(places)
