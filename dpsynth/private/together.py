"""What private stages do over several processes; derivations in docs/distributed.md.

Each process holds a shard of the privacy units. Sums are exact, the main process adds the noise
once, and nothing of the mechanism depends on how many processes there are.
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.lock import Lock
from dpsynth.distributed.ranks import Ranks
from dpsynth.errors import UsageError
from dpsynth.private.coding import TokenCodes
from dpsynth.private.lattice import ExactSums
from dpsynth.private.noise import NoiseSource

T = TypeVar("T")

PROBES = 64
"""Images whose codes the processes compare."""
CAPTIONS = ("a cat", "two small dogs, side by side", "7")
"""Captions of which they compare what the transformer is told."""
MOST_ROUNDING = 2.0**-12
"""Share of C that rounding on every process may take: a quarter of the clip's margin."""


class Encodes(Protocol):
    """What makes codes of images (n, *shape), each by itself."""

    @property
    def shape(self) -> tuple[int, int, int]: ...  # noqa: D102

    def encode_exact_many(self, images: NDArray[np.uint8]) -> NDArray[Any]: ...  # noqa: D102


class Shard:
    """Which units are this process's: number i of the source's order belongs to i mod world.

    Every unit is in exactly one shard, if all processes read the same units in the same order:
    that is what `finish` checks, by a digest of what each said of every unit.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._next = ranks, 0
        self._digest = hashlib.sha256()

    def take(self, count: int, marks: Callable[[], Iterable[bytes]]) -> slice:
        """Those of the `count` units that follow; `marks` tells them apart, 32 bytes each.

        It is not asked where there is one process alone.
        """
        world, rank = self._ranks.world, self._ranks.rank
        if world == 1:
            return slice(None)
        for mark in marks():
            self._digest.update(mark)
        first = (rank - self._next) % world
        self._next = (self._next + count) % world
        return slice(first, None, world)

    def finish(self) -> None:
        """Call after the last unit.

        Raises:
            RankError: the processes read different units; none may be used.
        """
        if self._ranks.world > 1:
            self._ranks.require_same("the private records that they read", self._digest.hexdigest())


def shard(units: Iterable[T], ranks: Ranks, mark: Callable[[T], bytes]) -> Iterator[T]:
    """The units of this process's `Shard`, one by one; read it to the end. `mark` tells each apart.

    Raises:
        RankError: as `Shard.finish`.
    """
    own = Shard(ranks)
    for unit in units:
        # Hashed, as a unit's mark may be of any length: two must not read as one longer.
        marks = partial(_hashed, mark, unit)
        yield from [unit][own.take(1, marks)]
    own.finish()


def _hashed(mark: Callable[[T], bytes], unit: T) -> list[bytes]:
    return [hashlib.sha256(mark(unit)).digest()]


def require_same_codes(space: Encodes, ranks: Ranks) -> None:
    """Refuse processes whose kernels encode differently: which one holds a unit would then matter.

    Asked with the same public random images, before any charge; of spectral tokens with public
    captions too. Equal codes of these are strong evidence of equal kernels, no proof of it.

    Raises:
        RankError: the processes' codes differ.
    """
    if ranks.world == 1:
        return
    shape = (PROBES, *space.shape)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    found = hashlib.sha256(space.encode_exact_many(images).tobytes())
    if isinstance(space, TokenCodes):
        found.update(space.space.text_of(CAPTIONS).numpy().tobytes())
    ranks.require_same("the codes of the same public images", found.hexdigest())


def own_noise(lock: Lock, stream: str, ranks: Ranks) -> NoiseSource:
    """A source of this process's own: from the system, or, for tests, by its name.

    A repeatable run depends on the number of processes, since each has a stream of its own.
    """
    if ranks.world > 1:
        stream = f"{stream}/process-{ranks.rank}-of-{ranks.world}"
    return NoiseSource.for_run(lock, stream)


def require_small_rounding(ranks: Ranks, weights: int, grid: float) -> None:
    """Refuse more processes than the rounding bound covers: world sqrt(P) grid <= 2^-12.

    `grid` is the sums' step as a share of C. Raises UsageError.
    """
    if ranks.world * weights**0.5 * grid > MOST_ROUNDING:
        most = int(MOST_ROUNDING / (weights**0.5 * grid))
        raise UsageError(
            f"{ranks.world} processes are too many for a model of {weights} weights",
            hint=f"start {most} or fewer: torchrun --nproc-per-node {most} -m dpsynth train RUN",
        )


def total_sums(exact: ExactSums, ranks: Ranks) -> ExactSums:
    """Sums over all shards, bit for bit those of one process; the main process's call."""
    counts, sums, seconds = ranks.sum_whole([exact.counts, exact.sums, exact.seconds])
    return ExactSums(counts, sums, seconds, exact.bits)


def give_sums(exact: ExactSums, ranks: Ranks) -> None:
    """What another process than the main one adds to `total_sums`."""
    ranks.sum_whole([exact.counts, exact.sums, exact.seconds])


def gathered(arrays: list[NDArray[np.float64]], ranks: Ranks) -> list[NDArray[np.float64]]:
    """Each array (n_i,) joined over the processes, in the main process; [] elsewhere.

    For the curator's log alone.
    """
    if ranks.world == 1:
        return arrays
    parts = [_unpacked(data) for data in ranks.gather(_packed(arrays))]
    return [np.concatenate(same) for same in zip(*parts, strict=True)]


def _packed(arrays: list[NDArray[np.float64]]) -> bytes:
    out = io.BytesIO()
    named = {str(number): np.asarray(a, np.float64) for number, a in enumerate(arrays)}
    np.savez(out, allow_pickle=False, **named)
    return out.getvalue()


def _unpacked(data: bytes) -> list[NDArray[np.float64]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return [archive[str(number)] for number in range(len(archive.files))]
