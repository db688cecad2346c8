"""The images of the table: private and public ones of a run's plan, and samples of a folder.

The benchmark looks at private emoji as `dpsynth evaluate` does; they are public, as the plans say.
"""

import csv
from pathlib import Path

import numpy as np

from benchmarks.wavelet.judge import Captioned, Judge


def judge_of(run: Path, work: Path) -> tuple[Judge, list[str]]:
    """The judge of a run's private held-in images, and the names of its classes."""
    from dpsynth.assess.attributes import captioned_records
    from dpsynth.planning.verify import load_verified
    from dpsynth.vault import open_private

    verified = load_verified(run)
    held_in = open_private(verified).train
    images, labels = held_in.arrays()
    captions = captioned_records(held_in).captions
    private = Captioned(images, tuple(captions), labels.astype(np.int64))
    classes = list(verified.plan.private.classes)
    path = work / "judges" / "public-groups.safetensors"
    return Judge.kept(path, public_of(run), private, len(classes)), classes


def public_of(run: Path) -> Captioned:
    """The public images of a run's plan, with their own captions and labels."""
    from dpsynth.planning.verify import load_verified
    from dpsynth.public.sources import read_public

    public = read_public(load_verified(run).plan)
    if public.captions is None:
        raise SystemExit("the table needs public images with captions")
    return Captioned(public.images, tuple(public.captions), public.labels.astype(np.int64))


def samples_in(folder: Path, classes: list[str]) -> Captioned:
    """A folder of samples; a reference's stamp beside them says what it is, and stays there."""
    from PIL import Image

    with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    images = np.stack([np.asarray(Image.open(folder / row["file_name"])) for row in rows])
    labels = np.array([classes.index(row["label"]) for row in rows])
    return Captioned(images, tuple(row["text"] for row in rows), labels)
