"""Randomness that privacy rests on: a ChaCha20 generator keyed by the operating system.

Its state is never saved, restored, copied or inherited by a forked child. The discrete
Gaussian of released statistics is drawn by OpenDP (exact sampling of Canonne, Kamath and
Steinke 2020), whose bits come from OpenSSL's generator, itself seeded by the system and
reseeded after a fork.
"""

import hashlib
import math
import os
import secrets
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from randomgen import ChaCha

from dpsynth.artifacts.lock import Lock
from dpsynth.errors import UsageError

_ROUNDS = 20
_KEY_BYTES = 32
_MANTISSA = 53
# opendp answers in int64: keeps 32 standard deviations inside it.
MAX_SCALE = 2**57


class _Forks:
    """Counts the forks in this process's ancestry, so that every source sees that it is a copy."""

    count = 0

    @classmethod
    def happened(cls) -> None:
        cls.count += 1


os.register_at_fork(after_in_child=_Forks.happened)


class NoiseSource:
    """Gaussian noise and sampling coins from 256 bits of operating-system entropy.

    Generates with ChaCha20 (RFC 8439's block function). A forked child draws a key of its own.
    """

    def __init__(self) -> None:
        self._seed: bytes | None = None
        self._start()

    @classmethod
    def unsafe(cls, seed: int, stream: str = "") -> "NoiseSource":
        """A source that repeats itself: for tests alone, and a run that uses it is stamped."""
        source = cls()
        source._seed = f"{seed}/{stream}".encode()
        source._start()
        return source

    @classmethod
    def for_run(cls, lock: Lock, stream: str) -> "NoiseSource":
        """The run's source: the system's, unless the lock itself is stamped with an unsafe seed."""
        return cls() if lock.unsafe_seed is None else cls.unsafe(lock.unsafe_seed, stream)

    @property
    def is_unsafe(self) -> bool:
        """Whether the noise follows from a known seed."""
        return self._seed is not None

    def gaussian(self, shape: tuple[int, ...], std: float) -> NDArray[np.float64]:
        """Independent N(0, std^2), float64 of `shape`. Raises UsageError for a std not > 0."""
        _check_scale(std)
        return self._generator.standard_normal(shape) * std

    def coins(self, count: int, rate: float) -> NDArray[np.bool_]:
        """`count` independent coins (count,), true with probability `rate` in (0, 1].

        The probability is `rate` rounded down to a multiple of 2^-53: towards privacy.
        """
        if not 0 < rate <= 1:
            raise UsageError(f"a sampling rate must be above 0 and at most 1, got {rate}")
        threshold = np.uint64(math.floor(rate * 2**_MANTISSA))
        bits = np.asarray(self._fresh().random_raw(count), dtype=np.uint64)
        return (bits >> np.uint64(64 - _MANTISSA)) < threshold

    def torch_seed(self) -> int:
        """A fresh seed, below 2^63, for draws that privacy does not rest on (times, flow noise)."""
        return int(self._fresh().random_raw(1)[0]) >> 1

    def discrete_gaussian(self, scale: int, size: int) -> list[int]:
        """`size` independent integers with mass proportional to exp(-x^2 / (2 scale^2)).

        Exact for a scale that a float holds, else for the next float above it (towards privacy).

        Raises:
            UsageError: the scale is not a whole number from 1 to 2^57.
        """
        if not isinstance(scale, int) or not 1 <= scale <= MAX_SCALE:
            raise UsageError(f"a discrete Gaussian needs a scale from 1 to 2^57, got {scale}")
        if self.is_unsafe:
            return [int(x) for x in np.rint(self.gaussian((size,), float(scale)))]
        return _opendp_gaussian(scale, size)

    @property
    def _generator(self) -> np.random.Generator:
        self._fresh()
        return self._normal

    def _fresh(self) -> ChaCha:
        if self._born != (os.getpid(), _Forks.count):
            self._start()
        return self._bits

    def _start(self) -> None:
        """Take a new key; nothing of an old one survives."""
        self._born = (os.getpid(), _Forks.count)
        if self._seed is None:
            key = secrets.token_bytes(_KEY_BYTES)
        else:
            key = hashlib.sha256(self._seed + b"/%d" % _Forks.count).digest()
        self._bits = ChaCha(key=int.from_bytes(key, "little"), rounds=_ROUNDS)
        self._normal = np.random.Generator(self._bits)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a noise source is never saved, copied or sent to another process")

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        self.__getstate__()


def _check_scale(std: float) -> None:
    if not (math.isfinite(std) and std > 0):
        raise UsageError(f"a noise standard deviation must be positive and finite, got {std}")


def _opendp_gaussian(scale: int, size: int) -> list[int]:
    if size == 0:
        return []
    import opendp.prelude as dp

    dp.enable_features("contrib")
    rounded = float(scale)
    if int(rounded) < scale:
        rounded = math.nextafter(rounded, math.inf)
    space = dp.vector_domain(dp.atom_domain(T=dp.i64)), dp.l2_distance(T=dp.f64)
    draw = dp.m.make_gaussian(*space, scale=rounded)
    return [int(x) for x in draw([0] * size)]
