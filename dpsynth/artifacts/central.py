"""`released/central.safetensors`: noisy sums of codes by class over random subsets."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.tensors import load_release, save_tensors
from dpsynth.errors import UsageError

FORMAT = "dpsynth-central-1"
NAME = "central.safetensors"
_NUMBERS = ("std", "rate", "divisor", "radius")


@dataclass(frozen=True)
class ReleasedCentral:
    """Sums (M, Y, d) of codes clipped to `radius`, of M Poisson subsets at `rate`, by class.

    Every number carries independent Gaussian noise of std `std`, in the codes' units. `divisor`:
    the declared q N / Y; no number of records is released, and none is divided by.
    """

    sums: NDArray[np.float64]
    std: float
    rate: float
    divisor: float
    radius: float

    @property
    def codes(self) -> NDArray[np.float64]:
        """Central images (M Y, d) as codes, subset by subset."""
        found: NDArray[np.float64] = (self.sums / self.divisor).reshape(-1, self.sums.shape[2])
        return found

    @property
    def labels(self) -> NDArray[np.int64]:
        """Classes (M Y,) of `codes`."""
        return np.tile(np.arange(self.sums.shape[1]), len(self.sums))

    @property
    def code_std(self) -> float:
        """Noise on each number of a central image."""
        return self.std / self.divisor

    def check(self) -> None:
        """Raise UsageError when shapes or numbers make no sense."""
        if self.sums.ndim != 3 or min(self.sums.shape) < 1:
            raise UsageError(f"central sums have shape {self.sums.shape}, expected (M, Y, d)")
        numbers = np.array([getattr(self, name) for name in _NUMBERS], dtype=np.float64)
        if not (np.isfinite(self.sums).all() and np.isfinite(numbers).all()):
            raise UsageError("central images hold a value that is not finite")
        if numbers.min() <= 0 or self.rate > 1:
            raise UsageError("central images hold a noise, rate, divisor or radius out of range")


def save_central(path: Path, central: ReleasedCentral) -> None:
    """Write the central images atomically. Raises UsageError when they make no sense."""
    central.check()
    metadata = {name: repr(float(getattr(central, name))) for name in _NUMBERS}
    save_tensors(path, {"sums": central.sums}, {**metadata, "format": FORMAT, "room": "released"})


def load_central(path: Path) -> ReleasedCentral:
    """Read the central images.

    Raises:
        MissingError: nothing was released yet.
        UsageError: the file is damaged, of another format, or not a released one.
    """
    arrays, metadata = load_release(path, FORMAT, by="run")
    try:
        numbers = {name: float(metadata[name]) for name in _NUMBERS}
        central = ReleasedCentral(arrays["sums"].astype(np.float64), **numbers)
        central.check()
    except (UsageError, KeyError, ValueError, TypeError) as error:
        why = error.message if isinstance(error, UsageError) else str(error)
        raise UsageError(f"{path.name} is damaged: {why}") from error
    return central
