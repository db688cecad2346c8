"""`released/cells.safetensors` and `cells-lloyd-N.safetensors`: noisy sums by class and cell.

Both hold one round of a cell release in real code units; a Lloyd round has no second moments.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.tensors import load_release, save_tensors
from dpsynth.errors import UsageError

FORMAT = "dpsynth-cells-1"
NAME = "cells.safetensors"
MOST_LLOYD = 16
"""A plan may declare this many DP-Lloyd rounds at most."""
_ARRAYS = ("centres", "counts", "sums", "seconds")
_NUMBERS = ("count_std", "sum_std", "second_std", "radius", "clip")


def lloyd_name(number: int) -> str:
    """File name of the DP-Lloyd round `number`, counted from 1.

    >>> lloyd_name(2)
    'cells-lloyd-2.safetensors'
    """
    return f"cells-lloyd-{number}.safetensors"


@dataclass(frozen=True)
class ReleasedCells:
    """Noisy sums over the private records of each class-cell, of residuals about its centre.

    centres (Y, K, d): the centres that this round used, on the codes' grid, in the ball of
    `clip` (R); used (Y, K) bool: an unused cell receives no record, its centre is zeros, and
    its sums are noise. counts (Y, K); sums (Y, K, d) of residuals z - centre clipped to norm
    `radius` (rho); seconds (Y, K, d, d) of their outer products, None in a Lloyd round. Noise
    as in `ReleasedMoments`: std `second_std` on the diagonal, that over sqrt(2) off it.
    """

    centres: NDArray[np.float64]
    used: NDArray[np.bool_]
    counts: NDArray[np.float64]
    sums: NDArray[np.float64]
    seconds: NDArray[np.float64] | None
    count_std: float
    sum_std: float
    second_std: float
    radius: float
    clip: float

    @property
    def classes(self) -> int:
        """Number of declared classes Y."""
        return int(self.centres.shape[0])

    @property
    def cells(self) -> int:
        """Most cells of a class, K."""
        return int(self.centres.shape[1])

    @property
    def dim(self) -> int:
        """Length d of a code."""
        return int(self.centres.shape[2])

    def check(self) -> None:
        """Raise UsageError when shapes or numbers make no sense."""
        self._check_shapes()
        numbers = np.array([getattr(self, name) for name in _NUMBERS], dtype=np.float64)
        finite = all(np.isfinite(array).all() for array in (*_arrays(self).values(), numbers))
        if not finite or numbers.min() < 0 or self.radius == 0 or self.clip == 0:
            raise UsageError("the cells hold a value that is not finite, or a negative noise")
        if self.seconds is None and self.second_std != 0:
            raise UsageError("the cells hold no second moments, and a noise for them")
        if not self.used.any(axis=1).all():
            raise UsageError("the cells leave a class without any")
        if self.centres[~self.used].any():
            raise UsageError("the cells hold a centre of a cell that is not used")

    def _check_shapes(self) -> None:
        shapes = {name: array.shape for name, array in _arrays(self).items()}
        base = shapes["centres"]
        if len(base) != 3 or min(base) < 1:
            raise UsageError(f"the cells' centres have shape {base}, expected (Y, K, d)")
        expected = {
            "centres": base,
            "counts": base[:2],
            "sums": base,
            "seconds": (*base, base[2]),
            "used": base[:2],
        }
        if any(shape != expected[name] for name, shape in shapes.items()):
            raise UsageError(f"the cells hold arrays of shapes {shapes} that do not fit together")
        if self.used.dtype != np.bool_:
            raise UsageError(f"the cells' `used` is {self.used.dtype}, expected bool")


def _arrays(cells: ReleasedCells) -> dict[str, NDArray[Any]]:
    """All arrays of a round that are there, by name."""
    given = {name: getattr(cells, name) for name in (*_ARRAYS, "used")}
    return {name: array for name, array in given.items() if array is not None}


def save_cells(path: Path, cells: ReleasedCells) -> None:
    """Write one round atomically. Raises UsageError when it makes no sense."""
    cells.check()
    metadata = {name: repr(float(getattr(cells, name))) for name in _NUMBERS}
    metadata |= {"format": FORMAT, "room": "released"}
    arrays = _arrays(cells)
    for name in arrays.keys() & set(_ARRAYS):
        arrays[name] = arrays[name].astype(np.float64)
    save_tensors(path, arrays, metadata)


def load_cells(path: Path) -> ReleasedCells:
    """Read one round.

    Raises:
        MissingError: the round was not released yet.
        UsageError: the file is damaged, of another format, or not a released one.
    """
    arrays, metadata = load_release(path, FORMAT)
    try:
        cells = _read(arrays, metadata)
        cells.check()
    except (UsageError, KeyError, ValueError, TypeError) as error:
        why = error.message if isinstance(error, UsageError) else str(error)
        raise UsageError(
            f"{path.name} is damaged: {why}",
            hint="ask for the file that `dpsynth release-moments` wrote",
        ) from error
    return cells


def _read(arrays: dict[str, Any], metadata: dict[str, str]) -> ReleasedCells:
    unknown = set(arrays) - {*_ARRAYS, "used"}
    if unknown:
        raise ValueError(f"it holds unknown arrays {sorted(unknown)}")
    if any(arrays[name].dtype != np.float64 for name in arrays.keys() & set(_ARRAYS)):
        raise ValueError("it holds numbers that are not float64")
    numbers = {name: float(metadata[name]) for name in _NUMBERS}
    return ReleasedCells(
        arrays["centres"], arrays["used"], arrays["counts"], arrays["sums"],
        arrays.get("seconds"), **numbers,
    )  # fmt: skip
