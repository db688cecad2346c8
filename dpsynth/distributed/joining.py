"""Joining the processes of a run, and ending together whatever happens to one of them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from dpsynth.console import mute
from dpsynth.distributed.environment import place_in
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import RankError

if TYPE_CHECKING:
    from dpsynth.distributed.group import Group

PATIENCE = 1800.0
"""Seconds that a process waits in a step for one that neither comes nor dies."""
MEETING = 300.0
"""Seconds in which all processes must have started."""


@contextmanager
def joined(*, patience: float = PATIENCE, meeting: float = MEETING) -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone.

    Inside the block the others than the main process are silent, and SIGTERM is an error like any
    other. An error that leaves the block in one process ends all of them.

    Raises:
        UsageError: the environment is half set.
        RankError: a process did not come, was lost, or failed.
    """
    place = place_in(os.environ)
    if place is None or place.world == 1:
        yield ALONE
        return
    # torch's own remarks on a lost peer are stack traces; set before torch is loaded.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from dpsynth.distributed.group import Group

    with mute(not place.is_main):
        group = Group.join(place, patience=patience, meeting=meeting)
        try:
            with _hearing_sigterm(group):
                yield group
                group.leave()
        except KeyboardInterrupt as error:
            group.abandon(error)
            if place.is_main:
                raise
            raise RankError("interrupted", told=True) from None
        except BaseException as error:
            group.abandon(error)
            raise


@contextmanager
def _hearing_sigterm(group: "Group") -> Iterator[None]:
    """Make SIGTERM raise inside the block; torchrun sends it to the mates of a dead process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise group.stopped()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:
        # This process ends by itself, and is not to be cut off while it says why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)
