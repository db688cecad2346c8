"""The attacks of an audit, in the order in which their results are shown.

Each scores the canaries of a world by one part of what the world shows; none of them reads which
canaries are included. What is done with the scores (ROC curve, lower bound) is the same for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dpsynth.assess.audit.gradients import dirac_scores, repeat_scores
from dpsynth.assess.audit.moments import contrast_scores, moment_scores
from dpsynth.assess.audit.neighbours import copied, neighbour_scores
from dpsynth.assess.audit.reference import References, online_scores
from dpsynth.assess.audit.residual import Draws, residual_scores, residuals
from dpsynth.assess.audit.verdict import Copies
from dpsynth.assess.audit.worlds import Attack, Coded, Observed, OwnRun, WhiteBox, World
from dpsynth.errors import UsageError

Array = NDArray[np.float64]

LATEST = 0.98
"""Latest time of a residual: at t = 1 it says nothing of the model."""
TIMES = 5
# Reference models from which on a ratio is worth its noise.
_FEWEST = 2


@dataclass(frozen=True)
class _Scored:
    """An attack made of two functions."""

    name: str
    needs: Callable[[World], bool]
    scores: Callable[[World], Array]

    def applies(self, world: World) -> bool:
        """Whether the world shows what this attack needs."""
        return self.needs(world)

    def score(self, world: World) -> Array:
        """Scores (m,), higher for rather included; equal scores where it cannot tell.

        Raises:
            UsageError: the world does not show what is needed.
        """
        if not self.applies(world):
            raise UsageError(f"the attack {self.name} does not apply to {world.name}")
        found = np.asarray(self.scores(world), np.float64)
        if found.shape != (len(world.canaries),):
            raise UsageError(f"the attack {self.name} gave scores of shape {found.shape}")
        # Not a number is no guess: it ranks in the middle of the others.
        known = np.isfinite(found)
        middle = float(np.median(found[known])) if known.any() else 0.0
        return np.where(np.isnan(found), middle, found)


def times_from(low: float) -> tuple[float, ...]:
    """Times at which residuals are taken: equally spaced from `low`, where training began.

    >>> times_from(0.0)
    (0.098, 0.294, 0.49, 0.686, 0.882)
    """
    width = (LATEST - low) / TIMES
    return tuple(round(low + (index + 0.5) * width, 6) for index in range(TIMES))


def _of_model(model: nn.Module, low: float, coded: Coded) -> Array:
    draws = Draws.fixed(coded.codes.shape[1], times=times_from(low))
    return residuals(model, coded.codes, coded.labels, draws)


def _canaries(world: World) -> Coded:
    canaries = world.canaries
    return Coded(canaries.images, canaries.labels, canaries.codes)


def _shown(observed: Observed) -> nn.Module:
    if observed.model is None:
        raise UsageError("this world shows no model")
    return observed.model


def _residual(world: World) -> Array:
    coded = _canaries(world)
    found = _of_model(_shown(world.observed), world.observed.low, coded)
    return residual_scores(found, coded.labels)


def _ratio(world: World) -> Array:
    coded, low = _canaries(world), world.observed.low
    target = -_of_model(_shown(world.observed), low, coded)
    others = [-_of_model(one.model, low, coded) for one in world.references]
    return online_scores(target, References(np.stack(others), _coins(world)))


def _coins(world: World) -> NDArray[np.bool_]:
    """Coins of the reference worlds (N, m), which their maker knows."""
    return np.stack([one.included for one in world.references])


def _enough(world: World) -> bool:
    if world.observed.model is None or len(world.references) < _FEWEST:
        return False
    count = _coins(world).sum(axis=0)
    return bool(((count > 0) & (count < len(world.references))).any())


def _neighbours(world: World) -> Array:
    if world.observed.samples is None:
        raise UsageError("this world shows no samples")
    return neighbour_scores(world.canaries.images, world.observed.samples[0])


ATTACKS: tuple[Attack, ...] = (
    _Scored(
        "moments",
        lambda world: bool(world.observed.moments),
        lambda world: moment_scores(world.observed.moments or ()),
    ),
    _Scored(
        "moments-differences",
        lambda world: len(world.observed.moments or ()) > 1,
        lambda world: contrast_scores(world.observed.moments or ()),
    ),
    _Scored(
        "gradients",
        lambda world: world.observed.gradients is not None,
        lambda world: dirac_scores(_gradients(world)),
    ),
    _Scored(
        "gradient-differences",
        lambda world: world.observed.gradients is not None,
        lambda world: repeat_scores(_gradients(world)),
    ),
    # One adversary who sees all that is released and every step: independent ratios add up.
    _Scored(
        "moments-and-gradients",
        lambda world: bool(world.observed.moments) and world.observed.gradients is not None,
        lambda world: moment_scores(world.observed.moments or ()) + dirac_scores(_gradients(world)),
    ),
    _Scored("velocity-residual", lambda world: world.observed.model is not None, _residual),
    _Scored("likelihood-ratio", _enough, _ratio),
    _Scored("nearest-sample", lambda world: world.observed.samples is not None, _neighbours),
)
"""All attacks. An audit takes those that apply to a world (`applicable`)."""


def applicable(world: World, attacks: Sequence[Attack] = ATTACKS) -> list[Attack]:
    """The attacks that a world shows enough for; their number goes into the correction of bounds.

    It follows from what the world shows and never from the canaries' coins.
    """
    return [attack for attack in attacks if attack.applies(world)]


def _gradients(world: World) -> WhiteBox:
    if world.observed.gradients is None:
        raise UsageError("this world shows no gradients")
    return world.observed.gradients


def copies_in(world: World) -> Copies | None:
    """Canaries that the samples hold as they are; None where there are no samples.

    Not an attack: it reads which canaries were included.
    """
    if world.observed.samples is None:
        return None
    found, included = copied(world.canaries.images, world.observed.samples[0]), world.canaries
    return Copies(int((found & included.included).sum()), int((found & ~included.included).sum()))


@dataclass(frozen=True)
class Membership:
    """Scores (n,) of an attack on a run's own records, and which are members (n,)."""

    attack: str
    scores: Array
    member: NDArray[np.bool_]


def membership(own: OwnRun, reference: nn.Module | None = None) -> list[Membership]:
    """Attacks without canaries: real training records of a run against held-out ones.

    The two sides are split by a hash of each record, so that nothing but training tells them
    apart. Curator-only, since what is compared are private records.

    Args:
        own: the run's model and samples, and records of both sides.
        reference: a model that saw neither side, such as the public prior; what is easy about a
            record by itself then falls out.

    Returns:
        "velocity-residual" where there is a model, "nearest-sample" where there are samples.
    """
    member = np.repeat([True, False], [len(own.members.labels), len(own.others.labels)])
    both = Coded(
        np.concatenate([own.members.images, own.others.images]),
        np.concatenate([own.members.labels, own.others.labels]),
        np.concatenate([own.members.codes, own.others.codes]),
    )
    found = []
    if own.model is not None:
        usual = None if reference is None else _of_model(reference, own.low, both)
        scores = residual_scores(_of_model(own.model, own.low, both), both.labels, usual)
        found.append(Membership("velocity-residual", scores, member))
    if own.samples is not None:
        scores = neighbour_scores(both.images, own.samples[0])
        found.append(Membership("nearest-sample", scores, member))
    return found
