"""Randomness that privacy rests on: a ChaCha20 generator keyed by the operating system.

Its state is never saved, restored, copied or inherited by a forked child (`keystream`). Gaussian
noise is float64, by the ziggurat (`ziggurat`). The noise of released statistics is discrete
Gaussian, drawn exactly (`discrete_gaussian`).
"""

import math
from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.lock import Lock
from dpsynth.errors import UsageError
from dpsynth.private.discrete_gaussian import Integers, fill_discrete_gaussian
from dpsynth.private.keystream import Keys
from dpsynth.private.ziggurat import fill_normal

_MANTISSA = 53
MAX_SCALE = 2**57
"""Of discrete noise: 64 standard deviations fit 64 bits."""


class NoiseSource:
    """Gaussian noise and sampling coins from 256 bits of operating-system entropy.

    Generates with ChaCha20 (RFC 8439's block function). A forked child draws a key of its own.
    """

    def __init__(self) -> None:
        self._keys = Keys()

    @classmethod
    def unsafe(cls, seed: int, stream: str = "") -> "NoiseSource":
        """A source that repeats itself: for tests alone, and a run that uses it is stamped."""
        source = cls()
        source._keys = Keys(f"{seed}/{stream}".encode())
        return source

    @classmethod
    def for_run(cls, lock: Lock, stream: str) -> "NoiseSource":
        """The run's source: the system's, unless the lock itself is stamped with an unsafe seed."""
        return cls() if lock.unsafe_seed is None else cls.unsafe(lock.unsafe_seed, stream)

    @property
    def is_unsafe(self) -> bool:
        """Whether the noise follows from a known seed."""
        return self._keys.seed is not None

    def gaussian(self, shape: tuple[int, ...], std: float) -> NDArray[np.float64]:
        """Independent N(0, std^2), float64 of `shape`. Raises UsageError for a std not > 0."""
        return self._normal(math.prod(shape), std).reshape(shape)

    def gaussian_like(self, shapes: Mapping[str, tuple[int, ...]], std: float) -> dict[str, Tensor]:
        """Independent N(0, std^2) for every entry of every tensor, float64 on the CPU, one draw.

        The tensors are parts of one buffer that no other call shares. Raises UsageError for a std
        not > 0.

        >>> noise = NoiseSource().gaussian_like({"weight": (3, 2), "scale": ()}, std=1.0)
        >>> {name: tuple(part.shape) for name, part in noise.items()}
        {'weight': (3, 2), 'scale': ()}
        """
        sizes = [math.prod(shape) for shape in shapes.values()]
        parts = torch.from_numpy(self._normal(sum(sizes), std)).split_with_sizes(sizes)
        return {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def coins(self, count: int, rate: float) -> NDArray[np.bool_]:
        """`count` independent coins (count,), true with probability `rate` in (0, 1].

        The probability is `rate` rounded down to a multiple of 2^-53: towards privacy.
        """
        if not 0 < rate <= 1:
            raise UsageError(f"a sampling rate must be above 0 and at most 1, got {rate}")
        threshold = np.uint64(math.floor(rate * 2**_MANTISSA))
        words = self._keys.stream().words(count)
        return (words >> np.uint64(64 - _MANTISSA)) < threshold

    def torch_seed(self) -> int:
        """A fresh seed, below 2^63, for draws that privacy does not rest on (times, flow noise)."""
        return int(self._keys.stream().words(1)[0]) >> 1

    def discrete_gaussian(self, scale: int, size: int) -> Integers:
        """Independent int64 (size,) with mass proportional to exp(-x^2 / (2 scale^2)), exactly.

        Raises:
            UsageError: the scale is not a whole number from 1 to 2^57.
        """
        if not isinstance(scale, int) or not 1 <= scale <= MAX_SCALE:
            raise UsageError(f"a discrete Gaussian needs a scale from 1 to 2^57, got {scale}")
        out = np.empty(size, np.int64)
        fill_discrete_gaussian(out, scale, self._keys.stream())
        return out

    def _normal(self, count: int, std: float) -> NDArray[np.float64]:
        if not (math.isfinite(std) and std > 0):
            raise UsageError(f"a noise standard deviation must be positive and finite, got {std}")
        out = np.empty(count)
        fill_normal(out, self._keys.stream())
        return np.multiply(out, std, out=out)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a noise source is never saved, copied or sent to another process")

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        self.__getstate__()
