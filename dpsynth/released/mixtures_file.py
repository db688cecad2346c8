"""`released/mixture.safetensors`: the estimated mixtures, so that they are estimated once."""

from pathlib import Path

import numpy as np

from dpsynth.artifacts.tensors import load_released, save_tensors
from dpsynth.errors import DpsynthError
from dpsynth.released.estimate import ClassMixtures

FORMAT = "dpsynth-mixture-1"
MIXTURE = "mixture.safetensors"
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
        return ClassMixtures(*(np.asarray(arrays[name], dtype=np.float64) for name in _ARRAYS))
    except (DpsynthError, KeyError):
        return None  # made again
