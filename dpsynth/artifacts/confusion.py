"""`released/confusion.safetensors`: the noisy confusion matrix of the held-out records."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.tensors import load_release, save_tensors
from dpsynth.errors import UsageError

FORMAT = "dpsynth-confusion-1"
NAME = "confusion.safetensors"
_STDS = ("cell_std", "total_std")
_WHOLE = ("samples", "steps", "seed")
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class ReleasedConfusion:
    """Noisy counts of what a classifier that saw synthetic samples alone said of held-out records.

    cells (Y, Y): records of true class y that it took for c, at [y, c]; total: all of them. Nothing
    is divided by a count, and noise may make any of them negative. Every cell carries Gaussian
    noise of std `cell_std`, the total of `total_std`, all independent.

    `samples_sha256`: `artifacts.samples.content_digest` of the folder that it was trained on;
    `samples`, `steps`, `seed`: images, optimiser steps and seed of that training. All public.
    """

    cells: NDArray[np.float64]
    total: float
    cell_std: float
    total_std: float
    samples_sha256: str
    samples: int
    steps: int
    seed: int

    @property
    def classes(self) -> int:
        """Number of declared classes Y."""
        return len(self.cells)

    def check(self) -> None:
        """Raise UsageError when shapes or numbers make no sense."""
        classes = len(self.cells) if self.cells.ndim == 2 else 0
        if classes < 1 or self.cells.shape != (classes, classes):
            raise UsageError(f"{NAME} holds a matrix of shape {self.cells.shape}, expected (Y, Y)")
        numbers = [self.total, self.cell_std, self.total_std]
        if not (np.isfinite(self.cells).all() and np.isfinite(numbers).all()):
            raise UsageError(f"{NAME} holds a value that is not finite")
        if not (self.cell_std > 0 and self.total_std > 0):
            raise UsageError(f"{NAME} holds a noise that is not above 0")
        if not _HASH.fullmatch(self.samples_sha256) or min(self.samples, self.steps) < 1:
            raise UsageError(f"{NAME} does not say what samples its classifier was trained on")


def save_confusion(path: Path, matrix: ReleasedConfusion) -> None:
    """Write the matrix atomically. Raises UsageError when it makes no sense."""
    matrix.check()
    metadata = {name: repr(float(getattr(matrix, name))) for name in _STDS}
    metadata |= {name: str(getattr(matrix, name)) for name in (*_WHOLE, "samples_sha256")}
    metadata |= {"format": FORMAT, "room": "released"}
    arrays = {"cells": matrix.cells, "total": np.array([matrix.total])}
    save_tensors(path, arrays, metadata)


def load_confusion(path: Path) -> ReleasedConfusion:
    """Read the matrix.

    Raises:
        MissingError: nothing was released yet.
        UsageError: the file is damaged, of another format, or not a released one.
    """
    arrays, metadata = load_release(path, FORMAT, by="release-evaluation")
    try:
        (total,) = arrays["total"].astype(np.float64).tolist()  # one number
        matrix = ReleasedConfusion(
            cells=arrays["cells"].astype(np.float64),
            total=total,
            samples_sha256=metadata["samples_sha256"],
            cell_std=float(metadata["cell_std"]),
            total_std=float(metadata["total_std"]),
            samples=int(metadata["samples"]),
            steps=int(metadata["steps"]),
            seed=int(metadata["seed"]),
        )
        matrix.check()
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{path.name} is damaged: {error}") from error
    return matrix
