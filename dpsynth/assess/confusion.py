"""Confusion matrices of probes on held-out records, and the score of each class."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import UsageError

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Confusion:
    """How often records of one class were taken for another.

    Attributes:
        counts: int64 (Y, Y), row the true class, column the predicted one, summed over probes.
        probes: how many predictions of each record were counted.
    """

    counts: Counts
    probes: int = 1

    def __add__(self, other: "Confusion") -> "Confusion":
        """The matrix of both probes' predictions of the same records."""
        return Confusion(self.counts + other.counts, self.probes + other.probes)

    @property
    def accuracy(self) -> float:
        """Share of predictions that were right."""
        return float(np.trace(self.counts) / self.counts.sum())

    @property
    def recall(self) -> NDArray[np.float64]:
        """Of each class's records the share that was recognised (Y,); NaN without a record."""
        return _ratio(np.diag(self.counts), self.counts.sum(axis=1))

    @property
    def precision(self) -> NDArray[np.float64]:
        """Of what was taken for each class the share that was it (Y,); NaN for none taken."""
        return _ratio(np.diag(self.counts), self.counts.sum(axis=0))

    def per_class(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """One row a class: class, count (held-out records), recall, precision; None for no value.

        Raises:
            UsageError: there are more or fewer names than classes.

        >>> Confusion(np.array([[3, 1], [0, 0]])).per_class(["cat", "dog"])[1]
        {'class': 'dog', 'count': 0, 'recall': None, 'precision': 0.0}
        """
        if len(names) != len(self.counts):
            raise UsageError(f"{len(names)} class names for {len(self.counts)} classes")
        records = self.counts.sum(axis=1) // self.probes
        rows = zip(names, records.tolist(), self.recall, self.precision, strict=True)
        return [
            {
                "class": name,
                "count": count,
                "recall": None if np.isnan(recall) else float(recall),
                "precision": None if np.isnan(precision) else float(precision),
            }
            for name, count, recall, precision in rows
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values: `counts` as rows of integers, and `probes`."""
        return {"counts": self.counts.tolist(), "probes": self.probes}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Confusion":
        """What `to_json` made."""
        return cls(np.array(value["counts"], np.int64), int(value["probes"]))


def confusion_of(labels: Counts, predicted: Counts, classes: int) -> Confusion:
    """The matrix of one probe's predictions (n,) of records with these labels (n,).

    Raises:
        UsageError: unequal lengths, no record, or a class outside [0, classes).

    >>> confusion_of(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).counts.tolist()
    [[1, 1], [0, 1]]
    """
    if len(labels) != len(predicted) or not len(labels):
        raise UsageError("a confusion matrix needs one prediction for each label, and some of them")
    if min(labels.min(), predicted.min()) < 0 or max(labels.max(), predicted.max()) >= classes:
        raise UsageError(f"labels and predictions are expected in [0, {classes})")
    pairs = np.bincount(labels * classes + predicted, minlength=classes * classes)
    return Confusion(pairs.reshape(classes, classes).astype(np.int64))


def _ratio(right: Counts, of: Counts) -> NDArray[np.float64]:
    found = np.full(len(of), np.nan)
    np.divide(right, of, out=found, where=of > 0)
    return found
