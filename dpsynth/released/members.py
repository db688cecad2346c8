"""Images of a plan whose rounds of votes made a population: its members, then variations of them.

Post-processing. Image number i of class y is the member at place k = i div Y of a public order of
the class; once they are all drawn, variations of them in the same order, of the last round's
strength.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.lock import Lock, read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import require_settled
from dpsynth.artifacts.spending import SpendState, read_state
from dpsynth.artifacts.votes import Population, load_population, population_name, votes_name
from dpsynth.errors import MissingError, ReplayError, UsageError, typed
from dpsynth.planning.evolution import Evolution
from dpsynth.planning.schema import Plan
from dpsynth.released.evolution import PARENTS, Generator
from dpsynth.released.varying import own_generator

STAGE = "votes"


@dataclass(frozen=True)
class Members:
    """How samples are taken of a population; `order` (Y, members a class): places of members."""

    generator: Generator
    population: Population
    order: NDArray[np.int64]
    strength: float

    def codes(self, labels: Tensor, first: int, source: torch.Generator) -> Tensor:
        """Codes (B, d) of the images `first`, `first` + 1, ..., whose classes are `labels` (B,)."""
        turns = (first + np.arange(len(labels))) // len(self.order)
        own = labels.numpy()
        places = self.order[own, turns % self.order.shape[1]]
        codes = self.population.members[places]
        again = np.flatnonzero(turns >= self.order.shape[1])
        if len(again):
            codes[again] = self.generator.vary(codes[again], own[again], self.strength, source)
        return torch.from_numpy(codes)


def load_members(run: RunDir, plan: Plan) -> tuple[Members, dict[str, Any]]:
    """The population that the plan's samples are of, and their origin.

    That of the last round; of a run that was closed before it, of the last round that settled.

    Raises:
        UsageError: the plan has no votes stage, or the file is not of this plan.
        MissingError: a round is still to come.
        ReplayError: the population does not follow from what the transcript settled.
    """
    settings = plan.stages.votes
    if settings is None:
        raise UsageError("the plan has no votes stage", hint="declare stages.votes in the plan")
    number = _last_round(run, settings)
    path = run.released / population_name(number)
    if not path.exists():
        raise MissingError(
            f"{path.name} is not there yet", hint=typed("dpsynth", "evolve", run.root)
        )
    generator, facts = own_generator(run, plan)
    population = load_population(path)
    _require_own(run, population, number, facts)
    classes, digest = plan.private.conditions, sha256_file(path)
    order = _order(population.labels, classes, settings.population, digest)
    origin = {"model": "population", "population_sha256": digest, "rounds": number}
    return Members(generator, population, order, settings.strength(max(1, number))), origin


def _last_round(run: RunDir, settings: Evolution) -> int:
    """Of a closed run the last settled round; else all of them, which must be settled."""
    lock = read_lock(run.lock)
    state = read_state(run, lock)
    settled = settled_rounds(lock, state)
    if settled < settings.rounds and not state.closed:
        raise MissingError(
            f"{settled} of {settings.rounds} vote rounds are settled",
            hint=typed("dpsynth", "evolve", run.root),
        )
    return settled


def settled_rounds(lock: Lock, state: SpendState) -> int:
    """How many vote rounds are settled; they settle in order."""
    groups = lock.releases(STAGE).values()
    return sum(any(slot.id in state.settled for slot in group) for group in groups)


def _require_own(run: RunDir, population: Population, number: int, facts: dict[str, str]) -> None:
    """The population is of this generator, and descends from the one that was voted on last."""
    same = all(population.facts.get(name) == value for name, value in facts.items())
    if population.number != number or not same:
        raise UsageError(
            f"{population_name(number)} is of another generator than the plan's",
            hint="start a new run folder with --run",
        )
    if number == 0:
        return
    require_settled(run, [votes_name(n) for n in range(1, number + 1)])
    parents = run.released / population_name(number - 1)
    if parents.exists() and population.facts.get(PARENTS) != sha256_file(parents):
        raise ReplayError(
            f"{population_name(number)} does not descend from {parents.name}",
            hint="restore both files",
        )


def _order(labels: NDArray[np.int64], classes: int, size: int, digest: str) -> NDArray[np.int64]:
    """Places (Y, `size`) of each class's members, in an order that the file's hash decides.

    So that few samples are of no one part of the population, and a sampler that goes on takes the
    members that are left. Raises UsageError for a population of other sizes.
    """
    if not (np.bincount(labels, minlength=classes) == size).all():
        raise UsageError(
            f"the population does not have {size} members of each of {classes} classes",
            hint="restore the file that `dpsynth evolve` wrote",
        )
    source = np.random.default_rng(int(digest[:16], 16))
    return np.stack([source.permutation(np.flatnonzero(labels == y)) for y in range(classes)])
