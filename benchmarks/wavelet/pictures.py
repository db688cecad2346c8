"""Coarse, completed and real side by side: the picture for the documentation."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.wavelet.judge import Captioned
from benchmarks.wavelet.plans import Cell
from benchmarks.wavelet.records import judge_of, public_of, samples_in
from benchmarks.wavelet.runs import Runs

SHOWN = 10


def draw(runs: Runs, path: Path, budget: str = "10") -> Path:
    """Samples of each method for some captions, beside public and private images of the same."""
    from dpsynth.artifacts.sheet import contact_sheet

    room = runs.room("wavelet")
    judge, classes = judge_of(room, runs.work)
    rows = [("Twemoji (public)", public_of(room))]
    for method, name in (("wavelet", "DP-Wavelet"), ("raster", "raster"), ("ldm", "LDM")):
        cell = Cell(method, budget)
        released = runs.work / "runs" / cell.name / "released"
        if method == "wavelet" and (released / "coarse").exists():
            rows.append(("coarse", samples_in(released / "coarse", classes)))
        if (released / "samples" / "metadata.csv").exists():
            rows.append((name, samples_in(released / "samples", classes)))
    rows.append(("Noto (private)", judge.private))
    texts = _shared([own for _, own in rows])
    shown = [(name, _of(own, texts)) for name, own in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    return contact_sheet(shown, path, title=f"Emoji at epsilon {budget}, one caption a column")


def _shared(sets: list[Captioned]) -> list[str]:
    """Captions that every set has, spread over the groups."""
    common = set.intersection(*(set(own.texts) for own in sets))
    labels = dict(zip(sets[0].texts, sets[0].labels.tolist(), strict=True))
    order = sorted(common, key=lambda text: (labels[text], text))
    chosen = np.linspace(0, len(order) - 1, min(SHOWN, len(order))).astype(int)
    return [order[place] for place in chosen]


def _of(own: Captioned, texts: list[str]) -> NDArray[np.uint8]:
    return np.stack([own.images[own.texts.index(text)] for text in texts])
