"""Work on many small items by threads, in order: decoding, for Pillow's decoders leave the GIL.

Threads and not processes: what they open is seen in this process (by the audit hook of the tests
too), no forked child inherits anything, and none has to import libraries first.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

WORKERS = "DPSYNTH_WORKERS"
"""Environment variable of `--workers`: a machine setting, which changes no record."""


def workers() -> int:
    """How many threads decode: as `--workers` says, else one for each core of this process."""
    given = os.environ.get(WORKERS, "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(work: Callable[[T], R], items: Iterable[T], size: int) -> Iterator[list[R]]:
    """`work` of each item, in lists of `size` (the last one may be shorter), in the items' order.

    Twice as many lists as there are threads are under way or wait to be taken, no more. What
    `work` raises is raised here, in its place. A caller that leaves early waits for those begun.
    """
    rest, count = iter(items), workers()

    def many(part: list[T]) -> list[R]:
        return [work(item) for item in part]

    with ThreadPoolExecutor(count, thread_name_prefix="reader") as pool:
        under_way: deque[Future[list[R]]] = deque()
        try:
            while True:
                while len(under_way) < 2 * count and (part := list(islice(rest, size))):
                    under_way.append(pool.submit(many, part))
                if not under_way:
                    return
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
