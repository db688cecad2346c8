"""The votes stage of a plan: Private Evolution's rounds, from the first charge to the last.

Everything but a round's votes is post-processing (`released.evolution`): populations are written
before they are voted on, and a session that was cut off goes on with the first round that is not
settled. Derivations in docs/maths/votes.md.
"""

from collections.abc import Iterable
from typing import Any

from dpsynth.artifacts.spending import calibration_hash, spending
from dpsynth.artifacts.votes import load_votes, population_name, votes_name
from dpsynth.console import progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError
from dpsynth.planning.evolution import Evolution
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.encoding import CodeStream, UnitCodes, private_stream
from dpsynth.private.evolving import Read, SpentVotes, follow
from dpsynth.private.together import require_same_codes
from dpsynth.public.representation import Representation
from dpsynth.public.vote_stage import load_vote_space
from dpsynth.released.evolution import Evolver
from dpsynth.released.evolution import evolve as evolve_all
from dpsynth.released.sampling import fresh_generator
from dpsynth.released.varying import own_generator
from dpsynth.vault.checked import require_checked


def evolve(verified: VerifiedPlan, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Spend the plan's vote rounds, each once: `released/votes-NN`, `released/population-NN`.

    Every process of `ranks` calls this; the main one spends and writes, the others give their
    records' votes and return {}. Where every round is settled, nothing is charged: what a crash
    kept from being written after the last one is made.

    Returns:
        What was released, in declared and released values alone.

    Raises:
        PlanError: the plan has no votes stage.
        BudgetError: every slot of a round is spent, or the run was closed before its last round.
        MissingError: `dpsynth pretrain` has not run, or a file of an earlier round is gone.
        ReplayError: a round's file is not the one that was settled, or a population not the one
            that was voted on.
        UsageError, DataError: the records were not checked, or do not fit the plan; a public file
            is not the one that the calibration names.
    """
    plan, run, lock = verified.plan, verified.run, verified.lock
    settings = plan.stages.votes
    if settings is None:
        raise PlanError("this plan has no votes stage", hint="declare stages.votes and re-plan")
    space = load_vote_space(run, plan, settings)
    require_same_codes(space, ranks)
    if not ranks.is_main:
        follow(_reader(verified, space, settings, ranks), ranks)
        return {}
    require_checked(verified)
    generator, facts = own_generator(run, plan)
    evolver = Evolver(settings, generator, space, plan.private.conditions, facts)
    with spending(
        run, lock, calibration_hash=calibration_hash(run), noise_source=verified.noise_source
    ) as spender:
        ballots = SpentVotes(
            spender,
            lock,
            run.released,
            radius=space.radius,
            read=_reader(verified, space, settings, ranks),
            several=plan.budget.column is not None,
            ranks=ranks,
        )
        with progress("vote rounds", settings.rounds) as bar:
            evolve_all(evolver, run.released, ballots, fresh_generator(), bar.advance)
        ranks.tell({})
        if lock.last_stage == "votes":
            spender.close()
    return _summary(verified, settings, ballots.charged)


def _reader(
    verified: VerifiedPlan, space: Representation, settings: Evolution, ranks: Ranks
) -> Read:
    """A pass over the units' features. Asked after a charge; what may be kept is read once."""
    opened: list[CodeStream] = []

    def read() -> Iterable[UnitCodes]:
        if not opened:
            opened.append(private_stream(verified, space, ranks, passes=settings.rounds))
        return opened[0]

    return read


def _summary(verified: VerifiedPlan, settings: Evolution, charged: list[str]) -> dict[str, Any]:
    released = verified.run.released
    numbers = range(1, settings.rounds + 1)
    return {
        "released": population_name(settings.rounds),
        "slots": charged,
        "members": settings.population * verified.plan.private.conditions,
        "rounds": {
            votes_name(number): {"std": load_votes(released / votes_name(number)).std}
            for number in numbers
        },
    }
