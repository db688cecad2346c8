"""`released/moments.safetensors`: the noisy class moments, in real code units."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.tensors import load_release, save_tensors
from dpsynth.errors import UsageError

FORMAT = "dpsynth-moments-1"
NAME = "moments.safetensors"
_ARRAYS = ("counts", "sums", "seconds")
_NUMBERS = ("count_std", "sum_std", "second_std", "radius")


@dataclass(frozen=True)
class ReleasedMoments:
    """Noisy sums over the private records, of codes clipped to the ball of `radius`.

    counts (Y,), sums (Y, d), seconds (Y, d, d) by class or (1, d, d) shared: all sums, none
    divided by a count. With covariance `public` there are no seconds, (0, d, d), their noise is 0,
    and Y is 1 where all records are one group.

    Every entry carries Gaussian noise: std `count_std`, `sum_std`, and in seconds `second_std` on
    the diagonal and `second_std` / sqrt(2) off it (the two halves are one draw), so that an entry
    is as noisy as it is in an isotropic Frobenius-norm mechanism.
    """

    counts: NDArray[np.float64]
    sums: NDArray[np.float64]
    seconds: NDArray[np.float64]
    count_std: float
    sum_std: float
    second_std: float
    radius: float
    covariance: str

    @property
    def classes(self) -> int:
        """Number of groups Y that counts and sums are of: the declared classes, or one."""
        return len(self.counts)

    @property
    def dim(self) -> int:
        """Length d of a code."""
        return int(self.sums.shape[1])

    def check(self) -> None:
        """Raise UsageError when shapes or numbers make no sense."""
        classes, dim = self.classes, self.sums.shape[-1]
        blocks = {"class": classes, "public": 0}.get(self.covariance, 1)
        shapes = (self.counts.shape, self.sums.shape, self.seconds.shape)
        if shapes != ((classes,), (classes, dim), (blocks, dim, dim)) or classes < 1 or dim < 1:
            raise UsageError(f"{NAME} holds arrays of shapes {shapes} that do not fit together")
        arrays = (self.counts, self.sums, self.seconds)
        numbers = [getattr(self, name) for name in _NUMBERS]
        finite = all(np.isfinite(a).all() for a in arrays) and np.isfinite(numbers).all()
        if not finite or min(numbers) < 0 or self.radius == 0:
            raise UsageError(f"{NAME} holds a value that is not finite, or a negative noise")
        if blocks == 0 and self.second_std != 0:
            raise UsageError(f"{NAME} states noise on second moments, and holds none")


def save_moments(path: Path, moments: ReleasedMoments) -> None:
    """Write the moments atomically."""
    moments.check()
    metadata = {name: repr(float(getattr(moments, name))) for name in _NUMBERS}
    metadata |= {"format": FORMAT, "room": "released", "covariance": moments.covariance}
    arrays = {name: getattr(moments, name) for name in _ARRAYS}
    save_tensors(path, arrays, metadata)


def load_moments(path: Path) -> ReleasedMoments:
    """Read the moments.

    Raises:
        MissingError: nothing was released yet.
        UsageError: the file is damaged, of another format, or not a released one.
    """
    arrays, metadata = load_release(path, FORMAT)
    try:
        numbers = {name: float(metadata[name]) for name in _NUMBERS}
        counts, sums, seconds = (arrays[name].astype(np.float64) for name in _ARRAYS)
        moments = ReleasedMoments(
            counts, sums, seconds, covariance=metadata["covariance"], **numbers
        )
        moments.check()
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(f"{path.name} is damaged: {error}") from error
    return moments
