"""What the releases of other methods are, in a line each below the table of `dpsynth plan`."""

import math
from collections.abc import Iterator

from dpsynth.accounting.queries import CentralSums, EmbeddingSums, VoteHistogram
from dpsynth.artifacts.lock import Lock, Slot


def method_notes(lock: Lock) -> Iterator[str]:
    """One line a stage: sizes and noise, all declared."""
    own = [slot for slot in lock.slots if not slot.spare]
    for slot in own:
        if isinstance(slot.statistic, EmbeddingSums):
            yield _embedding(lock, slot, slot.statistic)
        if isinstance(slot.statistic, CentralSums):
            yield _central(lock, slot, slot.statistic)
    rounds = [slot for slot in own if isinstance(slot.statistic, VoteHistogram)]
    if rounds:
        yield _votes(lock, rounds)


def _embedding(lock: Lock, slot: Slot, sums: EmbeddingSums) -> str:
    kind = lock.facts["stages"]["embedding"]["kind"]
    count = f"{slot.noise_std / sums.count:.3g}"
    return (
        f"embedding: {sums.dim} {kind} features a class, each sum +- "
        f"{slot.noise_std / sums.sum:.3g}; {sums.classes} counts, each +- {count} records"
    )


def _central(lock: Lock, slot: Slot, sums: CentralSums) -> str:
    expected = (slot.rate or 0.0) * lock.facts["private"]["capacity"] / sums.classes
    noise = slot.noise_std / expected
    return (
        f"central images: {slot.steps} a class, of {expected:.4g} expected records each; noise of "
        f"norm {noise * math.sqrt(sums.dim):.3g} clip radii on an image"
    )


def _votes(lock: Lock, rounds: list[Slot]) -> str:
    """Votes an average bin gets against its noise (docs/maths/votes.md, P6)."""
    votes = lock.facts["stages"]["votes"]
    average = lock.facts["private"]["capacity"] / (
        len(lock.facts["private"]["classes"]) * votes["population"]
    )
    return (
        f"votes: {len(rounds)} rounds for {votes['population']} members a class; an average member "
        f"has {average:.3g} votes, +- {rounds[0].noise_std:.3g}"
    )
