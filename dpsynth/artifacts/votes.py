"""`released/votes-NN.safetensors`: one round's noisy votes for the members of a population.

And the populations themselves, `released/population-NN.safetensors`: public, for they follow from
a public generator and released votes.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.tensors import load_release, save_tensors
from dpsynth.errors import UsageError

MOST_ROUNDS = 64
"""Vote rounds that a plan may have."""
VOTES, POPULATION = "dpsynth-votes-1", "dpsynth-population-1"
_HASH = re.compile("[0-9a-f]{64}")
_MEMBERS = (np.dtype(np.float32), np.dtype(np.uint8))


def votes_name(number: int) -> str:
    """File name of round `number`, counted from 1.

    >>> votes_name(3)
    'votes-03.safetensors'
    """
    return f"votes-{number:02d}.safetensors"


def population_name(number: int) -> str:
    """File name of a population; number 0 is the generator's own, K that of K vote rounds.

    >>> population_name(0)
    'population-00.safetensors'
    """
    return f"population-{number:02d}.safetensors"


@dataclass(frozen=True)
class ReleasedVotes:
    """Noisy votes (P,) for the members of a population, each with Gaussian noise of std `std`.

    `population`: SHA-256 of the file of the population that was voted on.
    """

    votes: NDArray[np.float64]
    std: float
    population: str

    def check(self) -> None:
        """Raise UsageError when shapes or numbers make no sense."""
        if self.votes.ndim != 1 or len(self.votes) == 0 or not np.isfinite(self.votes).all():
            raise UsageError(f"votes have shape {self.votes.shape}, expected finite numbers (P,)")
        if not (np.isfinite(self.std) and self.std > 0):
            raise UsageError(f"votes hold the noise {self.std}, expected a number above 0")
        if not _HASH.fullmatch(self.population):
            raise UsageError("votes do not say which population they are for")


@dataclass(frozen=True)
class Population:
    """Members and their classes: members (P, ...) codes in float32 or images in uint8; labels (P,).

    `number`: vote rounds that it follows from. `facts`: what made it (hashes of generator and
    votes, strength of the variation), as text.
    """

    members: NDArray[Any]
    labels: NDArray[np.int64]
    number: int
    facts: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise UsageError when shapes or numbers make no sense."""
        if self.members.ndim < 2 or len(self.members) == 0 or self.members.dtype not in _MEMBERS:
            raise UsageError(
                f"a population's members are {self.members.dtype} of shape {self.members.shape}; "
                "expected float32 codes or uint8 images (P, ...), one or more"
            )
        if not np.isfinite(self.members).all():
            raise UsageError("a population holds a member that is not finite")
        if self.labels.shape != self.members.shape[:1] or self.labels.dtype != np.int64:
            raise UsageError("a population has an int64 class for each member")
        if self.labels.min() < 0 or self.number < 0:
            raise UsageError("a population's classes and number are 0 or above")


def save_votes(path: Path, votes: ReleasedVotes) -> None:
    """Write one round atomically. Raises UsageError when it makes no sense."""
    votes.check()
    metadata = {"format": VOTES, "room": "released", "std": repr(float(votes.std))}
    save_tensors(path, {"votes": votes.votes}, {**metadata, "population": votes.population})


def load_votes(path: Path) -> ReleasedVotes:
    """Read one round.

    Raises:
        MissingError: the round was not released yet.
        UsageError: the file is damaged, of another format, or not a released one.
    """
    arrays, metadata = load_release(path, VOTES, by="run")
    try:
        votes = ReleasedVotes(
            arrays["votes"].astype(np.float64), float(metadata["std"]), metadata["population"]
        )
        votes.check()
    except (UsageError, KeyError, ValueError, TypeError) as error:
        raise _damaged(path, error) from error
    return votes


def save_population(path: Path, population: Population) -> None:
    """Write a population atomically. Raises UsageError when it makes no sense."""
    population.check()
    metadata = {f"fact.{name}": value for name, value in population.facts.items()}
    metadata |= {"format": POPULATION, "room": "released", "number": str(population.number)}
    save_tensors(path, {"members": population.members, "labels": population.labels}, metadata)


def load_population(path: Path) -> Population:
    """Read a population. Raises as `load_votes`."""
    arrays, metadata = load_release(path, POPULATION, by="run")
    facts = {k.removeprefix("fact."): v for k, v in metadata.items() if k.startswith("fact.")}
    try:
        population = Population(arrays["members"], arrays["labels"], int(metadata["number"]), facts)
        population.check()
    except (UsageError, KeyError, ValueError, TypeError) as error:
        raise _damaged(path, error) from error
    return population


def _damaged(path: Path, error: Exception) -> UsageError:
    why = error.message if isinstance(error, UsageError) else str(error)
    return UsageError(
        f"{path.name} is damaged: {why}", hint="ask for the file that `dpsynth run` wrote"
    )
