"""`released/mixture.safetensors`: the estimated mixtures, so that they are estimated once."""

from pathlib import Path

import numpy as np

from dpsynth.artifacts.tensors import load_released, save_tensors
from dpsynth.errors import DpsynthError
from dpsynth.released.estimate import ClassMixtures

FORMAT = "dpsynth-mixture-1"
MIXTURE = "mixture.safetensors"
# Of sums of float64: what the estimate's own divisions leave, and far more.
_ROUNDING = 1e-9
_ARRAYS = ("weights", "shares", "means", "covariances")


def save_mixtures(path: Path, mixtures: ClassMixtures, recipe: str) -> None:
    """Write the mixtures, stamped with what they were made from."""
    arrays = {name: getattr(mixtures, name) for name in _ARRAYS}
    save_tensors(path, arrays, {"format": FORMAT, "room": "released", "recipe": recipe})


def load_mixtures(path: Path, recipe: str) -> ClassMixtures | None:
    """The mixtures of this very recipe; None where the file is absent, damaged or another's."""
    try:
        arrays, metadata = load_released(path)
        if (metadata.get("format"), metadata.get("recipe")) != (FORMAT, recipe):
            return None
        found = ClassMixtures(*(np.asarray(arrays[name], dtype=np.float64) for name in _ARRAYS))
    except (DpsynthError, KeyError):
        return None  # made again
    return found if _sound(found) else None


def _sound(found: ClassMixtures) -> bool:
    """Whether these are mixtures: arrays that fit together, finite, with sums of one."""
    arrays = [getattr(found, name) for name in _ARRAYS]
    if found.means.ndim != 3 or not found.means.size:
        return False
    classes, cells, dim = found.means.shape
    shapes = [(classes,), (classes, cells), (classes, cells, dim), (classes, cells, dim, dim)]
    if [array.shape for array in arrays] != shapes:
        return False
    return (
        all(np.isfinite(array).all() for array in arrays)
        and bool((found.weights > 0).all() and (found.shares >= 0).all())
        and abs(found.weights.sum() - 1.0) <= _ROUNDING
        and bool((abs(found.shares.sum(axis=1) - 1.0) <= _ROUNDING).all())
    )
