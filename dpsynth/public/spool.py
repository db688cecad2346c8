"""Arrays of public data that may not fit in memory: small ones are held, large ones lie on disk."""

from collections.abc import Iterable, Iterator
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

HELD_BYTES = 2**27
"""An array up to this size stays in memory."""
_PART_BYTES = 2**24

Number = TypeVar("Number", bound=np.generic)


def spooled(
    parts: Iterable[NDArray[Number]], shape: tuple[int, ...], dtype: type[Number]
) -> NDArray[Number]:
    """The parts (n_i, *shape) one after another, as an array (n, *shape).

    Above HELD_BYTES they are written to a temporary file without a name, which the array maps: the
    system reads what is used and drops what is not. It goes with the array.
    """
    held: list[NDArray[Number]] = []
    file: IO[bytes] | None = None
    count = size = 0
    for part in parts:
        held.append(part)
        count, size = count + len(part), size + part.nbytes
        if size > HELD_BYTES:
            file = file or TemporaryFile()  # noqa: SIM115 - the map keeps it open
            for one in held:
                file.write(np.ascontiguousarray(one).data)
            held.clear()
    if file is None:
        return np.concatenate([np.empty((0, *shape), dtype), *held])
    file.flush()
    mapped: NDArray[Number] = np.memmap(file, dtype, "r+", shape=(count, *shape))
    return mapped


def in_parts(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Slices (m, ...) of an array's rows, of some megabytes each."""
    size = max(1, array[:1].nbytes)
    step = max(1, _PART_BYTES // size)
    for start in range(0, len(array), step):
        yield array[start : start + step]
