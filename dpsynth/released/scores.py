"""What a released confusion matrix says: accuracy, and recall and precision of each class.

Post-processing: `released/evaluation.json` and a picture, from the noisy matrix alone. Estimates,
errors and intervals: docs/maths/evaluation.md, V5 to V8.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.confusion import NAME as MATRIX
from dpsynth.artifacts.confusion import ReleasedConfusion, load_confusion
from dpsynth.artifacts.files import read_json, readable_json, sha256_file, write_changed
from dpsynth.artifacts.lock import Lock, read_lock
from dpsynth.artifacts.rooms import LOCK_NAME, RunDir
from dpsynth.errors import MissingError, ReplayError, UsageError
from dpsynth.released.card import in_words, stamps
from dpsynth.released.matrix_picture import draw_matrix

FORMAT = "dpsynth-released-evaluation-1"
NAME = "evaluation.json"
PICTURE = "confusion.png"
LEVEL = 0.95
_Z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
LEAST = 3.0
"""A score needs so many standard deviations of noise in the records that it is a share of."""
_RATIOS = np.linspace(0.0, 1.0, 1001)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Least-squares counts (V5): cells (Y, Y), unbiased; entries may be negative.

    Their noise has covariance `variance` I - `shift` 1 1^T: the released total tells how much all
    cells together are off.
    """

    cells: Array
    variance: float
    shift: float

    def std(self, cells: int) -> float:
        """Standard deviation of the noise in a sum of so many cells."""
        return math.sqrt(float(self.share_variance(0.0, cells, cells)))

    def share_variance(self, share: Array | float, part: int, whole: int) -> Array:
        """Variance of the noise in (sum of `part` cells) - share x (sum of `whole` cells) (V6).

        The part's cells are among the whole's. `share`: one, or many (r,).
        """
        square = part - 2 * np.asarray(share) * part + np.asarray(share) ** 2 * whole
        linear = part - np.asarray(share) * whole
        found: Array = np.maximum(self.variance * square - self.shift * linear**2, 0.0)
        return found


@dataclass(frozen=True)
class Share:
    """Records `above`, in `part` cells of the matrix, of the records `below` in `whole` cells."""

    above: float
    below: float
    part: int
    whole: int


@dataclass(frozen=True)
class Score:
    """A share of records, such as a recall, with its errors.

    `value` in [0, 1]; None, and an interval of all, where noise hides the records. `noise_error`:
    standard error by the noise; `sampling_error`: by which records happen to be held out; `error`:
    both. [`low`, `high`] holds the true share with probability `LEVEL`, about (V8).
    """

    value: float | None
    error: float | None
    noise_error: float | None
    sampling_error: float | None
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {key: None if v is None else round(v, 6) for key, v in vars(self).items()}


def estimated(matrix: ReleasedConfusion) -> Estimate:
    """Counts that fit both the noisy cells and the noisy total, by weighted least squares (V5).

    >>> made = ReleasedConfusion(np.array([[6.0, 1], [1, 6]]), 10.0, 1.0, 1.0, "0" * 64, 1, 1, 0)
    >>> estimated(made).cells.round(2).tolist()
    [[5.2, 0.2], [0.2, 5.2]]
    """
    cell, total = matrix.cell_std**2, matrix.total_std**2
    pull = cell / (total + matrix.classes**2 * cell)
    gap = matrix.total - float(matrix.cells.sum())
    return Estimate(matrix.cells + pull * gap, cell, pull * cell)


def score(counts: Estimate, share: Share) -> Score:
    """What share of its records it is, with errors and an interval.

    The value is the ratio, cut to [0, 1], with the delta method's errors (V7); the interval inverts
    a test of each share, and so holds for few records too (V8).
    """
    if not share.below > LEAST * counts.std(share.whole):
        return Score(None, None, None, None, 0.0, 1.0)
    low, high = _interval(counts, share)
    value = min(max(share.above / share.below, 0.0), 1.0)
    noise = math.sqrt(float(counts.share_variance(value, share.part, share.whole))) / share.below
    # One record more on each side: the error is not 0 where the value is 0 or 1.
    smooth = (value * share.below + 1) / (share.below + 2)
    sampling = math.sqrt(smooth * (1 - smooth) / share.below)
    return Score(value, math.hypot(noise, sampling), noise, sampling, low, high)


def _interval(counts: Estimate, share: Share) -> tuple[float, float]:
    """Shares that a two-sided test at `LEVEL` does not refuse, as their least and largest."""
    square = counts.share_variance(_RATIOS, share.part, share.whole)
    square += share.below * _RATIOS * (1 - _RATIOS)
    kept = _RATIOS[(share.above - _RATIOS * share.below) ** 2 <= _Z**2 * square]
    if len(kept):
        return float(kept[0]), float(kept[-1])
    end = float(share.above > share.below / 2)  # beyond [0, 1] by more than noise explains
    return end, end


def scores(matrix: ReleasedConfusion, classes: list[str]) -> dict[str, Any]:
    """Everything that follows from the matrix, as plain JSON values.

    Raises UsageError unless it is of these declared classes.
    """
    if matrix.classes != len(classes):
        raise UsageError(f"{MATRIX} has {matrix.classes} classes, and the plan has {len(classes)}")
    counts, side = estimated(matrix), len(classes)
    whole = float(counts.cells.sum())
    accuracy = Share(float(np.trace(counts.cells)), whole, side, side**2)
    return {
        "format": FORMAT,
        "room": "released",
        "what": "a probe trained on the samples alone, asked about held-out private records",
        "classes": classes,
        "accuracy": score(counts, accuracy).to_json(),
        "per_class": [_of_class(counts, number, name) for number, name in enumerate(classes)],
        "records": {"value": round(whole, 2), "error": round(counts.std(side**2), 2)},
        "matrix": (np.round(counts.cells, 2) + 0.0).tolist(),  # without -0
        "cell_error": round(counts.std(1), 4),
        "level": LEVEL,
        "probe": {"kind": "lenet", "seed": matrix.seed, "steps": matrix.steps},
        "samples": {"count": matrix.samples, "sha256": matrix.samples_sha256},
        "notes": list(NOTES),
    }


NOTES = (
    "Every number here follows from confusion.safetensors, which carries noise and was charged.",
    "matrix: rows are true classes, columns the probe's answers; least-squares counts, unbiased: "
    "noise may make them negative.",
    "error: standard error by noise and sampling together; low and high: an interval at `level`.",
    "A value of null: the noise hides how many records it would be a share of.",
    "Sampling errors take records for independent; where a unit holds several, they are larger.",
)


def _of_class(counts: Estimate, number: int, name: str) -> dict[str, Any]:
    side, own = len(counts.cells), float(counts.cells[number, number])
    row, column = float(counts.cells[number].sum()), float(counts.cells[:, number].sum())
    return {
        "class": name,
        "records": round(row, 2),
        "records_error": round(counts.std(side), 2),
        "recall": score(counts, Share(own, row, 1, side)).to_json(),
        "precision": score(counts, Share(own, column, 1, side)).to_json(),
    }


def read_scores(released: Path) -> dict[str, Any]:
    """`released/evaluation.json`. MissingError where nothing was released yet."""
    return read_json(released / NAME)


def made_scores(released: Path, lock: Lock) -> dict[str, Any]:
    """What `evaluation.json` has to say, made of the released matrix; the file is not believed.

    Raises:
        MissingError: there is no matrix, or no safetensors to read it.
        UsageError: it is damaged, or of other classes than the lock's.
    """
    path = released / MATRIX
    found = scores(load_confusion(path), list(lock.facts["private"]["classes"]))
    return {**found, "matrix_sha256": sha256_file(path), "stamps": stamps(lock)}


def refresh_scores(run: RunDir, lock: Lock) -> dict[str, Any] | None:
    """Make `evaluation.json` and its picture of the released matrix, whatever they hold by now.

    Returns the scores; None, and no file of an earlier matrix, where there is no matrix.
    """
    source, path, picture = (run.released / name for name in (MATRIX, NAME, PICTURE))
    if not source.is_file():
        path.unlink(missing_ok=True)
        picture.unlink(missing_ok=True)
        return None
    found = made_scores(run.released, lock)
    heads = [
        f"{lock.facts['name']}: accuracy {in_words(found['accuracy'])}",
        "rows: true class, columns: the probe's answer, in records",
        f"noise of a cell: +- {found['cell_error']:.2g} records; grey: within twice that",
    ]
    cells, noise = np.array(found["matrix"]), found["cell_error"]
    draw_matrix(cells, found["classes"], picture, noise=noise, heads=heads, stamp=stamps(lock))
    write_changed(path, readable_json(found))
    return found


def check_scores(folder: Path) -> str:
    """Compare a hand-out's `evaluation.json` with what its matrix says: it is recomputed.

    Returns a note where that could not be done, else nothing.

    Raises:
        ReplayError: the file says something else, or is there without a matrix.
    """
    if not (folder / NAME).is_file():
        return ""
    if not (folder / MATRIX).is_file():
        raise ReplayError(f"{NAME} is there without {MATRIX}, which it follows from")
    try:
        said, found = read_json(folder / NAME), made_scores(folder, read_lock(folder / LOCK_NAME))
    except MissingError as error:  # a light install
        return f"{NAME} was not recomputed from {MATRIX}: {error.message}"
    except UsageError as error:
        raise ReplayError(error.message) from error
    if said.get("format") != FORMAT:
        return f"{NAME} was not recomputed from {MATRIX}: it is of another version"
    wrong = [key for key in _FOLLOWS if said.get(key) != found[key]]
    if wrong:
        raise ReplayError(f"{NAME} is not what {MATRIX} says: {', '.join(wrong)}")
    return ""


_FOLLOWS = (
    "accuracy", "cell_error", "classes", "level", "matrix", "matrix_sha256", "per_class", "probe",
    "records", "samples",
)  # fmt: skip
