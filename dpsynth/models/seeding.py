"""Seeded generators for public training and tests, where nothing secret is drawn.

The only module of dpsynth that may fix a seed. Privacy noise and sampling coins never come
from here: they come from `dpsynth.private.noise`, seeded by the operating system.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    """A CPU generator with its own state, fixed by `seed`.

    >>> first, second = (torch.rand(2, generator=generator(3)) for _ in range(2))
    >>> bool((first == second).all())
    True
    """
    return torch.Generator().manual_seed(seed)


@contextmanager
def seeded_initialisation(seed: int) -> Iterator[None]:
    """Fix what torch's layer constructors draw inside the block; the global state is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def batches(count: int, size: int, source: torch.Generator) -> Iterator[Tensor]:
    """One epoch over `count` public records: index tensors (size,), the remainder dropped.

    With fewer records than `size` the whole set is the one batch. For public data only: a
    private batch is a Poisson sample.
    """
    order = torch.randperm(count, generator=source)
    size = min(size, count)
    for start in range(0, count - size + 1, size):
        yield order[start : start + size]
