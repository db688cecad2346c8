"""The vote rounds of Private Evolution in a spending session: each charged, made and settled.

A session goes on where an earlier one ended: settled rounds are read back from their files, and a
round that a crash forfeited is paid for by its spare.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.spending import Spender
from dpsynth.artifacts.votes import ReleasedVotes, load_votes, save_votes, votes_name
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.planning.evolution import round_name
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.noise import NoiseSource
from dpsynth.private.session import read_settled
from dpsynth.private.votes import Ballot, ballot_of, give_votes, release_votes, vote_block

Read = Callable[[], Iterable[UnitCodes]]
"""A pass over the units' features, quantised at the vote space's radius; called after a charge."""


class SpentVotes:
    """`released.evolution.Ballots` under a run's spending lock; a session is the main process's.

    Args:
        spender: of the run.
        lock: of the run.
        released: the run's folder of that name.
        radius: of the vote space.
        read: opens the records, which happens after the first charge.
        several: whether the plan's units have several images.
        ranks: the processes that hold the records; the others call `follow`.
    """

    def __init__(
        self,
        spender: Spender,
        lock: Lock,
        released: Path,
        *,
        radius: float,
        read: Read,
        several: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self._spender, self._lock, self._released = spender, lock, released
        self._radius, self._read, self._several, self._ranks = radius, read, several, ranks
        self.charged: list[str] = []

    def settled(self, number: int) -> ReleasedVotes | None:
        """A round's votes, read back; None while it is not settled.

        Raises MissingError or ReplayError where the file is gone or another one by now.
        """
        digest = self._spender.settled_digest(round_name(number))
        return read_settled(self._released / votes_name(number), digest, load_votes)

    def release(
        self,
        number: int,
        digest: str,
        features: NDArray[np.float64],
        labels: NDArray[np.int64],
    ) -> ReleasedVotes:
        """Charge a round on disk, let the records vote, write the noisy votes, settle them.

        Raises:
            BudgetError: every slot of the round is spent, or the run is closed.
            PlanError: the slot is for another population, or its noise out of range.
            UsageError: members' features make no ballot; nothing was charged.
        """
        ballot = ballot_of(features, labels, radius=self._radius, population=digest)
        slot = self._spender.release_slot(round_name(number))
        vote_block(slot, ballot, several=self._several)  # refused before it is charged
        noise = NoiseSource.for_run(self._lock, str(slot.id))
        self._spender.charge(slot)
        self.charged.append(slot.name)
        self._ranks.tell({"charged": slot.id})  # only now: it is on disk
        if self._ranks.world > 1:
            self._ranks.tell_bytes(ballot.to_bytes())  # the same bits for all
        votes = release_votes(self._read(), ballot, slot, noise, self._ranks)
        reach("mechanism:done")
        path = self._released / votes_name(number)
        save_votes(path, votes)
        self._spender.settle(slot, path)
        return votes


def follow(read: Read, ranks: Ranks) -> None:
    """Give a shard's votes in every round that the main process tells of, once it is charged.

    The main process tells {} after the last one.
    """
    while ranks.tell(None):
        give_votes(read(), Ballot.from_bytes(ranks.tell_bytes(None)), ranks)
