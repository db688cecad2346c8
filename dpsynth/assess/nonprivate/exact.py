"""A plan's moments without noise: its own rounds, and the estimate that its release would get.

Codes are clipped to the public radius as in a release: it belongs to the plan's code space, and
the estimate is made for it.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from dpsynth.artifacts.cells import ReleasedCells
from dpsynth.artifacts.cross import ReleasedCross
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.moments import ReleasedMoments
from dpsynth.assess.audit.chain import Bench, mixture_of
from dpsynth.assess.audit.controls import SilentNoise
from dpsynth.assess.audit.rounds import ReleasedRounds
from dpsynth.assess.check import ensure_checked
from dpsynth.console import progress
from dpsynth.errors import PlanError
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.blocks import blocks_of
from dpsynth.private.captioned import load_captioned
from dpsynth.private.cells import release_cells
from dpsynth.private.cross import add_cross_noise, cross_sums
from dpsynth.private.encoding import private_stream
from dpsynth.private.moments import add_noise, class_sums, next_frame
from dpsynth.private.session import Round, rounds_in
from dpsynth.public.projection import load_release_space
from dpsynth.released.gaussians import ReleasedMixture

Found = TypeVar("Found", ReleasedMoments, ReleasedCells, ReleasedCross)


def exact_mixture(verified: VerifiedPlan) -> ReleasedMixture:
    """The mixtures that the plan's estimator makes of exact moments, whose noise is zero.

    The records are checked first unless the run's own charges came before.

    Raises:
        PlanError: the plan has no moments stage.
        DataError: the records do not fit the plan.
    """
    plan, run = verified.plan, verified.run
    ensure_checked(verified)
    inner = load_release_space(run, plan).representation
    with progress("moments without noise"):
        rounds = _rounds(verified)
    return mixture_of(Bench(run, plan, verified.lock, inner), rounds)


def _rounds(verified: VerifiedPlan) -> ReleasedRounds:
    plan, lock, settings = verified.plan, verified.lock, verified.plan.stages.moments
    if settings is None:
        raise PlanError("this plan has no moments stage")
    representation = load_release_space(verified.run, plan).representation
    captioned = load_captioned(verified.run, plan, representation)
    first, *others = rounds_in(lock)
    stream = private_stream(verified, representation, passes=1 + len(others))
    noise, slots = SilentNoise(), _slots(first, lock.slots)
    if captioned is not None:
        exact = cross_sums(stream, captioned.features_of, captioned.space, slots)
        cross = add_cross_noise(exact, slots, captioned.space, noise)
        return ReleasedRounds(_known(cross), None, ())
    radius, cells = representation.radius, None
    exact = class_sums(stream, slots, plan.private.conditions)
    moments = add_noise(exact, blocks_of(slots, radius), settings.covariance, radius, noise)
    moments = _known(moments)
    for made in others:
        frame = next_frame(plan, settings, moments, cells)
        cells = _known(release_cells(stream, frame, _slots(made, lock.slots)[0], noise))
    return ReleasedRounds(moments, cells, ())


def _slots(made: Round, slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """The planned slots of a round, without spares. Nothing is charged: they say its shape."""
    return tuple(next(s for s in slots if s.name == name) for name in made.releases)


def _known(found: Found) -> Found:
    """The same values, known to be exact: the estimator shrinks nothing for noise."""
    stds: dict[str, Any] = {one.name: 0.0 for one in fields(found) if one.name.endswith("_std")}
    return replace(found, **stds)
