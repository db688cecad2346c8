"""One thread for small work: below some thousand numbers an operation, a second one costs time.

Measured: a training step of a 96-wide velocity MLP takes 10 ms on one thread and 30 to 400 ms on
two of two cores once anything else runs beside it, since each of its many small operations waits
for both.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block on one CPU thread; the former number is put back.

    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
