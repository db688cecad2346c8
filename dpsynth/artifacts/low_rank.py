"""LoRA factors in the weights that they stand beside: the same bits with torch and without it.

Training's end merges them, and so does closing a run, which has NumPy alone: both by `merged`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import UsageError

Arrays = dict[str, NDArray[Any]]
DOWN, UP = "lora_A.weight", "lora_B.weight"
"""The factors A (rank, in) and B (out, rank), after the layer's name; as in peft."""


def merged(
    weight: NDArray[Any], down: NDArray[Any], up: NDArray[Any], factor: float
) -> NDArray[Any]:
    """W + factor B A in W's type, for W (out, in), A = `down` (rank, in), B = `up` (out, rank).

    Added in float64, one rank after the other, by NumPy's elementwise operations: a matrix product
    would leave the order of its sums, and so the last bits, to a library and a machine.
    """
    total = np.zeros(weight.shape, np.float64)
    for column, row in zip(up.T.astype(np.float64), down.astype(np.float64), strict=True):
        total += column[:, None] * row[None, :]
    total *= factor
    total += weight
    return total.astype(weight.dtype)


def merged_into(start: Arrays, trained: Arrays, factor: float) -> Arrays:
    """The arrays of `start` that factors in `trained` move, with these merged in.

    Raises UsageError where `trained` holds anything but pairs of factors of layers of `start`.
    """
    layers = sorted(name.removesuffix(DOWN) for name in trained if name.endswith(DOWN))
    if {*trained} != {layer + part for layer in layers for part in (DOWN, UP)}:
        raise UsageError("these are no LoRA factors in pairs")
    found: Arrays = {}
    for layer in layers:
        name, down, up = f"{layer}weight", trained[layer + DOWN], trained[layer + UP]
        if name not in start or start[name].shape != (len(up), down.shape[-1]):
            raise UsageError(f"there are LoRA factors beside {name}, which is not there")
        found[name] = merged(start[name], down, up, factor)
    return found
