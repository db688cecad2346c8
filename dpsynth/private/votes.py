"""One vote round of Private Evolution: each unit votes for the nearest members of a population.

Lin et al. 2024, Algorithm 2. Whom a record votes for follows from its own quantised feature and
the released population alone, in exact arithmetic; derivations in docs/maths/votes.md.
"""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import pairwise_distances_chunked

from dpsynth.accounting.queries import VoteHistogram
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.votes import ReleasedVotes
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError, UsageError
from dpsynth.private.blocks import UP
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.lattice import CODE_MAX, SHARE_BITS, Block, quantise_rows
from dpsynth.private.noise import NoiseSource
from dpsynth.private.products import Whole
from dpsynth.private.shares import NOWHERE, Weights, unit_shares

VOTE = Weights(count=1.0, sum=0.0, second=0.0)
"""A unit's votes are a vector of counts, of L2 norm at most 1 (P3)."""
# Rows compared with the members at once: bounds memory, and changes no bit of any result.
_ROWS = 2**13

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Ballot:
    """Whom records may vote for: members of a released population, known before the charge.

    features (P, d) int64 in steps of `radius` / 2^16, each of norm at most 2^16; labels (P,), the
    members' classes; `population`: SHA-256 of the population's file. Raises UsageError for
    anything else: the exactness of `cast` rests on it.
    """

    features: Codes
    labels: Codes
    radius: float
    population: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.radius) and self.radius > 0):
            raise UsageError(f"a ballot needs a finite radius above 0, got {self.radius}")
        if self.features.dtype != np.int64 or self.features.ndim != 2 or len(self.features) == 0:
            raise UsageError("a ballot has one member or more, of whole features (P, d)")
        if self.labels.shape != self.features.shape[:1] or self.labels.min() < 0:
            raise UsageError("a ballot has a class, 0 or above, for each member")
        # Each number first: the square of a large one would wrap around to a small sum.
        wide = (self.features > CODE_MAX) | (self.features < -CODE_MAX)
        if wide.any() or (np.square(self.features).sum(axis=1) > CODE_MAX**2).any():
            raise UsageError("a member's feature lies outside the ball of features")

    def to_bytes(self) -> bytes:
        """The ballot for another process."""
        out = io.BytesIO()
        about = {"radius": np.array([self.radius]), "population": np.array([self.population])}
        np.savez(out, allow_pickle=False, features=self.features, labels=self.labels, **about)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Ballot":
        """What `to_bytes` wrote, to the bit."""
        with np.load(io.BytesIO(data), allow_pickle=False) as held:
            (radius,), (population,) = held["radius"].tolist(), held["population"].tolist()
            return cls(held["features"], held["labels"], radius, population)


def ballot_of(
    features: NDArray[np.float64], labels: Codes, *, radius: float, population: str
) -> Ballot:
    """The ballot of members with these features (P, d), real units, by the records' own rule.

    Raises:
        UsageError: a feature that is not finite, or as `Ballot` says.
    """
    if not (math.isfinite(radius) and radius > 0):
        raise UsageError(f"a ballot needs a finite radius above 0, got {radius}")
    whole, finite = quantise_rows(np.asarray(features, np.float64), radius)
    if not finite.all():
        raise UsageError("a member's feature is not finite")
    return Ballot(whole.astype(np.int64), labels.astype(np.int64), radius, population)


def release_votes(
    chunks: Iterable[UnitCodes],
    ballot: Ballot,
    slot: Slot,
    noise: NoiseSource,
    ranks: Ranks = ALONE,
) -> ReleasedVotes:
    """The round's mechanism: votes by member, with discrete Gaussian noise on every one.

    Args:
        chunks: one pass over the units' features, quantised at the ballot's radius; one chunk or
            more, none of which need hold a unit. A record of a class without members votes for
            nothing.
        ballot: made from released values, before the slot was charged.
        slot: pays for the round.
        noise: a source for this round alone.
        ranks: this is the main one; the others give the votes of their shards by `give_votes`.

    Raises:
        PlanError: the slot's statistic is no histogram of the ballot's size, or noise out of range.
    """
    chunks = iter(chunks)
    first = next(chunks, None)
    if first is None:
        raise UsageError("a pass over the features has one chunk or more, got none")
    several = first.sizes is not None
    block = vote_block(slot, ballot, several=several)
    exact = shard_votes(_again(first, chunks), ballot)
    (total,) = ranks.sum_whole([exact.astype(object)])
    return ReleasedVotes(
        votes=block.release(total, noise), std=block.real_std, population=ballot.population
    )


def give_votes(chunks: Iterable[UnitCodes], ballot: Ballot, ranks: Ranks) -> None:
    """What another process than the main one adds to `release_votes`."""
    ranks.sum_whole([shard_votes(chunks, ballot).astype(object)])


def vote_block(slot: Slot, ballot: Ballot, *, several: bool) -> Block:
    """The noise of one bin, in steps of 2^-16 for units of several images.

    Raises PlanError as `release_votes`.
    """
    statistic = slot.statistic
    if not isinstance(statistic, VoteHistogram):
        raise PlanError(f"slot {slot.name} is no vote round")
    if statistic.bins != len(ballot.labels):
        raise PlanError(
            f"slot {slot.name} declares {statistic.bins} members, "
            f"and the population has {len(ballot.labels)}"
        )
    block = Block(1.0, slot.noise_std * UP)
    block = block.finer(SHARE_BITS) if several else block
    block.check()
    return block


def shard_votes(chunks: Iterable[UnitCodes], ballot: Ballot) -> Codes:
    """Exact votes (P,) of these units: of records whole, else in steps of 2^-16. Never released.

    A unit of several images has a vote of each, all by one factor k / 2^16 that keeps its vector
    of votes to L2 norm 1 (P3).
    """
    found = np.zeros(len(ballot.labels), np.int64)
    for chunk in chunks:
        places = cast(chunk.codes, chunk.labels, ballot)
        shares = _shares(places, chunk.sizes)
        known = places != NOWHERE
        np.add.at(found, places[known], shares[known])
    return found


def _shares(places: Codes, sizes: Codes | None) -> Codes:
    """What each vote (n,) counts: 1, or whole numbers from 0 to 2^16 for units of several."""
    if sizes is None:
        return np.ones(len(places), np.int64)
    return unit_shares(np.zeros((len(places), 1), np.int64), places, sizes, VOTE)


def cast(codes: Whole, labels: Codes, ballot: Ballot, rows: int = _ROWS) -> Codes:
    """Whom each record (n,) votes for: the nearest member of its class, ties to the lowest place.

    NOWHERE where its class has no member. scikit-learn's squared distances |q|^2 - 2 q.c + |c|^2
    are exact here: |q| and |c| are at most 2^16, so that every partial sum, in any order, is a
    whole number below 2^35 (P2).

    Raises:
        UsageError: features of another length than the members'.
    """
    if codes.shape[1:] != ballot.features.shape[1:]:
        raise UsageError(
            f"records have features {codes.shape[1:]}, members {ballot.features.shape[1:]}"
        )
    found = np.full(len(codes), NOWHERE, np.int64)
    for y in np.unique(ballot.labels).tolist():
        members = np.flatnonzero(ballot.labels == y)
        targets = ballot.features[members].astype(np.float64)
        mine = np.flatnonzero(labels == y)
        for start in range(0, len(mine), rows):
            part = mine[start : start + rows]
            found[part] = members[_nearest(codes[part].astype(np.float64), targets)]
    return found


def _nearest(points: NDArray[np.float64], targets: NDArray[np.float64]) -> Codes:
    """Place of the nearest target of each point (n,), the first of equal ones.

    Not by a search that reports neighbours alone: of two equal ones it may take either, by how many
    points it was asked about.
    """
    blocks = pairwise_distances_chunked(
        points,
        targets,
        reduce_func=lambda distances, _: distances.argmin(axis=1),  # takes the first
        metric="euclidean",
        squared=True,
    )
    return np.concatenate(list(blocks)).astype(np.int64)


def _again(first: UnitCodes, rest: Iterable[UnitCodes]) -> Iterable[UnitCodes]:
    yield first
    yield from rest
