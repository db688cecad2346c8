"""The processes of one run as a value. Here: a single one, which costs nothing and needs no torch.

Process 0 is the main one: it alone spends, draws noise, writes and speaks. `group.Group` is the
same interface over torch.distributed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, dtype

T = TypeVar("T")
Whole = NDArray[np.object_]


class Ranks:
    """Process `rank` of `world`; every method is called by all of them, in the same order."""

    rank = 0
    world = 1

    @property
    def is_main(self) -> bool:
        """Whether this process spends, draws the noise, writes and speaks."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process is here."""

    def lead(self, work: Callable[[], T]) -> T | None:
        """Do `work` in the main process while the others wait, however long; its result, or None.

        What it raises ends every process, and the main one alone says why.
        """
        return work()

    def main_first(self, work: Callable[[], T]) -> T:
        """Do `work` in every process, in the main one first: what fails there is said once."""
        done = self.lead(lambda: (work(),))
        return work() if done is None else done[0]

    def tell(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """The main process's JSON message, in every process. The others give None."""
        return message or {}

    def tell_bytes(self, data: bytes | None) -> bytes:
        """The main process's bytes, in every process. The others give None."""
        return data or b""

    def gather(self, data: bytes) -> list[bytes]:
        """Each process's bytes in the order of ranks, in the main process; [] elsewhere."""
        return [data]

    def sum_on_grid(self, tensors: Mapping[str, "Tensor"], step: float) -> dict[str, "Tensor"]:
        """Sums of float64 tensors whose entries are multiples of `step`, in the main process.

        Exact: whole multiples are added, each below 2^52 / world. {} in the other processes.

        Raises:
            UsageError: an entry is not finite or too large to be added exactly.
        """
        del step
        return dict(tensors)

    def spread(
        self, tensors: Mapping[str, "Tensor"], like: Mapping[str, "Tensor"]
    ) -> dict[str, "Tensor"]:
        """The main process's tensors in every process, named and shaped as `like`.

        Rounded to the widest type of `like`, in the main process too.
        """
        kind = widest(like)
        return {name: tensors[name].to(kind) for name in like}

    def sum_whole(self, arrays: Sequence[Whole]) -> list[Whole]:
        """Sums of arrays of Python ints, exact, in the main process; [] elsewhere.

        Raises:
            UsageError: an entry's magnitude is above 2^102 / world.
        """
        return list(arrays)

    def require_same(self, what: str, value: str) -> None:
        """Refuse to go on unless every process holds the same `value`, which no message shows.

        Raises:
            RankError: they differ; `what` names it.
        """


def widest(like: Mapping[str, "Tensor"]) -> "dtype":
    """The floating type that holds every value of these tensors."""
    from torch import promote_types

    return reduce(promote_types, (tensor.dtype for tensor in like.values()))


ALONE = Ranks()
"""The one process of a run without torchrun."""
