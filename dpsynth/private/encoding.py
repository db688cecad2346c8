"""Private records as quantised codes, one record at a time."""

import numpy as np
from numpy.typing import NDArray

from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.lattice import quantise
from dpsynth.public.representation import Representation
from dpsynth.vault import Units, open_private


def encode_private(
    verified: VerifiedPlan, representation: Representation
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Codes int64 (n, d) in steps of R / 2^16 and labels int64 (n,) of the training side.

    Call after the charge: this is where private records are read.
    """
    classes = len(verified.plan.private.classes)
    return encode_units(open_private(verified).train, representation, classes)


def encode_units(
    units: Units, representation: Representation, classes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Encode each unit's first record on its own, so that no record moves another's code.

    A unit contributes once, whatever it holds; a record whose code is not finite, or whose
    label is not declared, contributes nothing.
    """
    records = [unit[0] for unit in units.records() if 0 <= unit[0].label < classes]
    if not records:
        return np.zeros((0, representation.dim), np.int64), np.zeros(0, np.int64)
    exact = representation.encode_exact_many(np.stack([record.image for record in records]))
    codes = [quantise(code, representation.radius) for code in exact]
    kept = [(code, r.label) for code, r in zip(codes, records, strict=True) if code is not None]
    stacked = np.array([code for code, _ in kept], dtype=np.int64)
    labels = np.array([label for _, label in kept], dtype=np.int64)
    return stacked.reshape(len(kept), representation.dim), labels
