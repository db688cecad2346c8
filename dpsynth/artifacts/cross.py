"""`released/cross-moments.safetensors`: noisy moments of codes and caption features together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.tensors import load_release, save_tensors
from dpsynth.errors import UsageError

FORMAT = "dpsynth-cross-moments-1"
NAME = "cross-moments.safetensors"
_ARRAYS = ("ff", "zf", "zz", "count", "total")
_STDS = ("ff_std", "zf_std", "zz_std", "count_std", "total_std")
_NUMBERS = (*_STDS, "radius", "feature_radius", "constant")
_SENSITIVITIES = ("tight", "paper")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReleasedCross:
    """Noisy sums over the private records of outer products of codes z and features f (equation 5).

    ff (m, m) of f f^T, zf (d, m) of z f^T, zz (d, d) of z z^T, in real units, with |z| <= `radius`
    and |f| <= `feature_radius`; none is divided by a count. `constant`: value of the first feature
    where it is the same for every record, so that ff[0, 0] / constant^2 is the count and
    zf[:, 0] / constant the sum; 0 where there is none. `sensitivity: paper` releases these two
    beside: count (1,), total (1, d); else both have no rows.

    Every entry carries Gaussian noise of its block's std, symmetric blocks of 1/sqrt(2) of it off
    the diagonal, where the two halves are one draw.
    """

    ff: Array
    zf: Array
    zz: Array
    count: Array
    total: Array
    ff_std: float
    zf_std: float
    zz_std: float
    count_std: float
    total_std: float
    radius: float
    feature_radius: float
    constant: float
    sensitivity: Literal["tight", "paper"]

    @property
    def features(self) -> int:
        """Length m of a feature vector, its constant included."""
        return len(self.ff)

    @property
    def dim(self) -> int:
        """Length d of a code."""
        return len(self.zz)

    def check(self) -> None:
        """Raise UsageError when shapes or numbers make no sense."""
        beside = int(self.sensitivity == "paper")
        d, m = self.zf.shape if self.zf.ndim == 2 else (0, 0)
        shapes = tuple(getattr(self, name).shape for name in _ARRAYS)
        if d < 1 or m < 1 or shapes != ((m, m), (d, m), (d, d), (beside,), (beside, d)):
            raise UsageError(f"{NAME} holds arrays of shapes {shapes} that do not fit together")
        numbers = [getattr(self, name) for name in _NUMBERS]
        finite = all(np.isfinite(getattr(self, name)).all() for name in _ARRAYS)
        if not (finite and np.isfinite(numbers).all()) or min(numbers) < 0:
            raise UsageError(f"{NAME} holds a value that is not finite, or a negative noise")
        if self.radius == 0 or self.feature_radius <= self.constant:
            raise UsageError(f"{NAME} holds radii that no record keeps to")
        if not (np.array_equal(self.ff, self.ff.T) and np.array_equal(self.zz, self.zz.T)):
            raise UsageError(f"{NAME} holds a second moment that is not symmetric")


def save_cross(path: Path, moments: ReleasedCross) -> None:
    """Write the cross moments atomically."""
    moments.check()
    metadata = {name: repr(float(getattr(moments, name))) for name in _NUMBERS}
    metadata |= {"format": FORMAT, "room": "released", "sensitivity": moments.sensitivity}
    save_tensors(path, {name: getattr(moments, name) for name in _ARRAYS}, metadata)


def load_cross(path: Path) -> ReleasedCross:
    """Read the cross moments.

    Raises:
        MissingError: nothing was released yet.
        UsageError: the file is damaged, of another format, or not a released one.
    """
    arrays, metadata = load_release(path, FORMAT)
    try:
        sensitivity = metadata["sensitivity"]
        if sensitivity not in _SENSITIVITIES:
            raise ValueError(f"sensitivity {sensitivity!r}")
        numbers = {name: float(metadata[name]) for name in _NUMBERS}
        ff, zf, zz, count, total = (np.asarray(arrays[name], np.float64) for name in _ARRAYS)
        kind: Literal["tight", "paper"] = "paper" if sensitivity == "paper" else "tight"
        moments = ReleasedCross(ff, zf, zz, count, total, sensitivity=kind, **numbers)
        moments.check()
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(f"{path.name} is damaged: {error}") from error
    return moments
