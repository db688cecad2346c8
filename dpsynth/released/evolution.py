"""Private Evolution (Lin et al. 2024, Algorithm 1): populations that follow the records' votes.

Post-processing: of a public generator and of noisy votes. Class sizes are declared ones; who
survives is drawn by votes inside each class. Every population and every round of votes is a file
of `released/`, so that a run goes on where it ended.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.votes import (
    Population,
    ReleasedVotes,
    load_population,
    population_name,
    save_population,
)
from dpsynth.errors import ReplayError, UsageError
from dpsynth.planning.evolution import Evolution
from dpsynth.public.representation import Representation

PARENTS = "parents_sha256"
"""Fact of a population: the file of the one that it descends from."""
Members = NDArray[Any]
"""float32 codes or uint8 images (P, ...): whatever the generator varies."""
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


class Generator(Protocol):
    """Any public generator: an own flow prior, a frozen text-to-image model."""

    def draw(self, labels: Labels, source: torch.Generator) -> Members:
        """New members of these classes (P,)."""
        ...

    def vary(
        self, members: Members, labels: Labels, strength: float, source: torch.Generator
    ) -> Members:
        """A variation of each member; `strength` in (0, 1]: share of noise, 1 is drawing anew."""
        ...

    def images(self, members: Members) -> Images:
        """The members as images (P, H, W, C)."""
        ...


class Ballots(Protocol):
    """Where the votes of each round (counted from 1) come from: the spending side."""

    def settled(self, number: int) -> ReleasedVotes | None:
        """What a round released in an earlier session; None where it did not yet."""
        ...

    def release(
        self, number: int, digest: str, features: NDArray[np.float64], labels: Labels
    ) -> ReleasedVotes:
        """Charge, make and settle a round: votes for members (P,) by their features (P, d).

        `digest`: SHA-256 of the population's file.
        """
        ...


@dataclass(frozen=True)
class Evolver:
    """What every round needs: declared settings, a public generator, a public feature space.

    `facts`: what the generator is (hashes), kept in every population's file.
    """

    settings: Evolution
    generator: Generator
    space: Representation
    classes: int
    facts: Mapping[str, str]

    def first(self, source: torch.Generator) -> Population:
        """The generator's own population: the declared number of members of each class."""
        labels = np.repeat(np.arange(self.classes, dtype=np.int64), self.settings.population)
        members = self.generator.draw(labels, source)
        return Population(members, labels, 0, {**self.facts, "strength": "1"})

    def features(self, population: Population, source: torch.Generator) -> NDArray[np.float64]:
        """Features (P, d) that members are voted for by, in the round after `population`.

        The mean feature of `variations` variations of a member, of the strength that it will be
        varied with (lookahead); of none: its own feature.
        """
        if self.settings.variations == 0:
            return self._encoded(population.members)
        strength = self.settings.strength(population.number + 1)
        total = np.zeros((len(population.labels), self.space.dim))
        for _ in range(self.settings.variations):
            varied = self.generator.vary(population.members, population.labels, strength, source)
            total += self._encoded(varied)
        return total / self.settings.variations

    def next(
        self, population: Population, votes: ReleasedVotes, source: torch.Generator
    ) -> Population:
        """Survivors of a round by its votes, each varied with the round's strength."""
        number = population.number + 1
        strength = self.settings.strength(number)
        kept = survivors(votes, population.labels, self.settings.threshold, source)
        members, labels = population.members[kept], population.labels[kept]
        varied = self.generator.vary(members, labels, strength, source)
        facts = {**self.facts, "strength": repr(strength), PARENTS: votes.population}
        return Population(varied, labels, number, facts)

    def _encoded(self, members: Members) -> NDArray[np.float64]:
        encoded: NDArray[np.float64] = self.space.encode(self.generator.images(members)).numpy()
        return encoded.astype(np.float64)


def survivors(
    votes: ReleasedVotes, labels: Labels, threshold: float, source: torch.Generator
) -> NDArray[np.int64]:
    """Members (P,) that the next population descends from, as many of each class as there are.

    Drawn with replacement, with probability proportional to the votes above the threshold,
    max(0, votes - threshold std) (Lin et al. 2024, Algorithm 2). A class in which no member is
    above it learned nothing, and stays as it is.

    Raises:
        UsageError: votes for another number of members.
    """
    if votes.votes.shape != labels.shape:
        raise UsageError(f"{len(votes.votes)} votes for a population of {len(labels)} members")
    weights = np.maximum(votes.votes - threshold * votes.std, 0.0)
    kept = np.arange(len(labels))
    for y in np.unique(labels).tolist():
        mine = np.flatnonzero(labels == y)
        if (largest := weights[mine].max()) > 0:
            chances = torch.from_numpy(weights[mine] / largest)
            drawn = torch.multinomial(chances, len(mine), replacement=True, generator=source)
            kept[mine] = mine[np.sort(drawn.numpy())]
    return kept


def evolve(
    evolver: Evolver,
    folder: Path,
    ballots: Ballots,
    source: torch.Generator,
    advance: Callable[[], None] = lambda: None,
) -> Population:
    """Every round in order; the last population, of which the samples are.

    Populations that `folder` holds are read, the others made and written before they are voted on.

    Args:
        evolver: the declared parts.
        folder: `released/` of the run.
        ballots: of the spending side.
        source: of draws and variations: no secret rests on it.
        advance: called after each round.

    Raises:
        ReplayError: a population is not the one that a settled round voted on.
        UsageError: a population is of another generator or size, or damaged.
    """
    population = _made(evolver, folder / population_name(0), lambda: evolver.first(source))
    for number in range(1, evolver.settings.rounds + 1):
        digest = sha256_file(folder / population_name(number - 1))
        votes = ballots.settled(number)
        if votes is None:
            # One that no settled votes made is none of this run's.
            (folder / population_name(number)).unlink(missing_ok=True)
            features = evolver.features(population, source)
            votes = ballots.release(number, digest, features, population.labels)
        if votes.population != digest:
            raise _foreign(number - 1)
        make = partial(evolver.next, population, votes, source)
        population = _made(evolver, folder / population_name(number), make)
        if population.facts.get(PARENTS) != digest:
            raise _foreign(number)
        advance()
    return population


def _foreign(number: int) -> ReplayError:
    return ReplayError(
        f"{population_name(number)} is not the population that the rounds' files speak of",
        hint="restore the file, or plan a new run (its budget adds up)",
    )


def _made(evolver: Evolver, path: Path, make: Callable[[], Population]) -> Population:
    """The population of a file, which is made where it is not there.

    Raises UsageError for one of another generator, or of other declared sizes.
    """
    if not path.exists():
        save_population(path, make())
    population = load_population(path)
    expected = evolver.classes * evolver.settings.population
    same = all(population.facts.get(name) == value for name, value in evolver.facts.items())
    if len(population.labels) != expected or not same:
        raise UsageError(
            f"{path.name} is of another generator or size than the plan's",
            hint="start a new run folder with --run",
        )
    return population
