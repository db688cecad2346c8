"""A ChaCha20 generator keyed by the operating system, whose past can't be computed from it.

OpenSSL's ChaCha20 (RFC 8439) through the package `cryptography`. Every draw takes a stream under
a key of its own, whose first 32 bytes become the next draw's key and then are forgotten: who
reads the memory later learns nothing of what was drawn (fast key erasure, Bernstein 2017), and
no key ever gives two draws.
"""

import hashlib
import os
import secrets
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

KEY_BYTES = 32
_NONCE = bytes(16)
_ZEROS = bytes(2**17)


class _Forks:
    """Counts the forks in this process's ancestry, so that every source sees that it is a copy."""

    count = 0
    starting = threading.Lock()

    @classmethod
    def happened(cls) -> None:
        cls.count += 1
        cls.starting = threading.Lock()  # a parent's other thread may hold the old one for ever


os.register_at_fork(after_in_child=_Forks.happened)


def _here() -> tuple[int, int]:
    """This process, told apart from every fork of it."""
    return os.getpid(), _Forks.count


class Stream:
    """The keystream of one key of 32 bytes; nonce and counter start at zero (RFC 8439, 2.4)."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor()

    def fill(self, array: NDArray[Any]) -> None:
        """Overwrite a contiguous array with the next bytes of the stream."""
        target = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(target), len(_ZEROS)):
            part = target[start : start + len(_ZEROS)]
            self._cipher.update_into(memoryview(_ZEROS)[: len(part)], part)

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` little-endian words of 64 bits."""
        words = np.empty(count, dtype="<u8")
        self.fill(words)
        return words


@dataclass(frozen=True)
class _State:
    """A key and who may use it. Replaced as a whole, so that no thread sees half of it."""

    born: tuple[int, int]
    key: NDArray[np.uint8]
    lock: threading.Lock


class Keys:
    """Fresh streams, from 256 bits of system entropy or, for tests alone, from a seed.

    Never saved or copied; a forked child starts again from a key of its own. Threads may share it.
    """

    def __init__(self, seed: bytes | None = None) -> None:
        self.seed = seed
        self._state = self._started()

    def stream(self) -> Stream:
        """A stream that no other call gets."""
        state = self._state
        if state.born != _here():
            with _Forks.starting:  # one of the child's threads starts again, the others wait
                if self._state.born != _here():
                    self._state = self._started()
                state = self._state
        with state.lock:
            stream = Stream(bytes(state.key))
            stream.fill(state.key)
            return stream

    def _started(self) -> _State:
        """A new key; nothing of an old one survives."""
        if self.seed is None:
            key = secrets.token_bytes(KEY_BYTES)
        else:
            key = hashlib.sha256(self.seed + b"/%d" % _Forks.count).digest()
        return _State(_here(), np.frombuffer(bytearray(key), dtype=np.uint8), threading.Lock())

    def __getstate__(self) -> NoReturn:
        raise TypeError("a noise source is never saved, copied or sent to another process")

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        self.__getstate__()
