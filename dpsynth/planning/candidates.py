"""The planner of time-heterogeneous allocation: candidates, their verification, and the choice.

StraightDP, appendix B.5 and remark 3.3; derivations in docs/maths/planner.md. Every candidate is
calibrated and composed on its own, so that whichever is chosen is within the budget, and the
uniform one is always among them, so that the choice never scores below it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpsynth.accounting.statistics import BucketedGradientSums
from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.console import progress
from dpsynth.errors import BudgetError, DpsynthError, PlanError
from dpsynth.planning.allocation import Profile, clips_of, profile_in, utility
from dpsynth.planning.calibrated import Calibrated, calibrate, recalibrate
from dpsynth.planning.schema import Plan
from dpsynth.planning.training import Train
from dpsynth.planning.workload import noise_std

SMALLEST_CLIP = 1e-12
"""As private.engine has it: below, squares in float32 are lost to underflow."""
TIE = 1e-6
"""Relative gain in utility below which the uniform plan stays: rounding of clips and noise."""
WAITING = "uniform until `dpsynth pretrain` has measured the time buckets; plan again then"


@dataclass(frozen=True)
class Candidate:
    """One shape of the family. `calibrated` is None where no noise met the budget: discarded."""

    beta: float
    clips: tuple[float, ...]
    calibrated: Calibrated | None
    noise_std: float | None = None
    utility: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The candidate as plain JSON values."""
        made = self.calibrated
        noise = self.noise_std
        return {
            "beta": self.beta,
            "clips": list(self.clips),
            "noise_std": noise,
            "noise_multipliers": None if noise is None else [noise / clip for clip in self.clips],
            "epsilon": None if made is None else made.bounds.pessimistic,
            "utility": self.utility,
        }


@dataclass(frozen=True)
class Choice:
    """The candidate that won, all that were looked at, and why."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    profile: Profile
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The lock's `allocation`: plain JSON values."""
        return {
            "profile": self.profile.digest,
            "beta": self.chosen.beta,
            "clips": list(self.chosen.clips),
            "edges": list(self.profile.edges),
            "candidates": [one.to_json() for one in self.candidates],
            "reason": self.reason,
        }


def waiting(settings: Train) -> dict[str, Any]:
    """The lock's `allocation` before there is a profile: uniform, and nothing may spend on it."""
    return {
        "profile": None,
        "beta": 0.0,
        "clips": [float(settings.clip)] * settings.buckets,
        "edges": None,
        "candidates": [],
        "reason": WAITING,
    }


def choose(plan: Plan, profile: Profile, delta: float) -> Choice:
    """Calibrate every shape of the plan's family by itself and take the one of highest utility.

    Raises:
        BudgetError: not even the uniform plan meets the budget.
        PlanError: the plan has no allocation.
    """
    settings = _settings(plan)
    family = settings.allocation.family if settings.allocation else ()
    candidates = []
    with progress("verifying each shape of the time buckets", len(family)) as bar:
        uniform = calibrate(plan, delta)
        for beta in family:
            candidates.append(_candidate(plan, profile, beta, delta, uniform))
            bar.advance()
    chosen, reason = decide(candidates)
    return Choice(chosen, tuple(candidates), profile, reason)


def decide(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The candidate of highest utility, and why; the uniform one where none is above it by `TIE`.

    Among equals the smallest beta wins. The first candidate must be the uniform one, calibrated.
    """
    uniform = next(iter(candidates), None)
    scored = [(one.utility, one) for one in candidates if one.utility is not None]
    if uniform is None or uniform.beta != 0 or uniform.utility is None:
        raise PlanError("the uniform plan is not among the candidates")
    best, winner = max(scored, key=lambda pair: (pair[0], -pair[1].beta))
    if winner is uniform or not best > uniform.utility * (1 + TIE):
        return uniform, f"uniform: no shape scores above its utility {uniform.utility:.6f}"
    return winner, (
        f"beta {winner.beta:g} has the highest utility of {len(scored)} verified candidates: "
        f"{best:.6f}, uniform {uniform.utility:.6f}"
    )


def score(plan: Plan, profile: Profile, clips: tuple[float, ...], noise: float) -> float:
    """Utility of clips under the absolute noise `noise` on a sum, by the plan's rate and capacity.

    Raises PlanError: the plan has no allocation.
    """
    settings = _settings(plan)
    entry = noise / (settings.rate * plan.private.capacity)
    return utility(profile, clips, entry, settings.clip)


def _candidate(
    plan: Plan, profile: Profile, beta: float, delta: float, uniform: Calibrated
) -> Candidate:
    clips = clips_of(profile, beta, _settings(plan).clip)
    made = uniform
    if beta != 0:
        if not min(clips) >= SMALLEST_CLIP:
            return Candidate(beta, clips, None)
        try:
            made = recalibrate(plan, delta, uniform, clips)
        except BudgetError:
            return Candidate(beta, clips, None)
    noise = noise_std(BucketedGradientSums(clips), made.multipliers["train"])
    return Candidate(beta, clips, made, noise, score(plan, profile, clips, noise))


def _settings(plan: Plan) -> Train:
    settings = plan.stages.train
    if settings is None or settings.allocation is None:
        raise PlanError(
            "this plan has no allocation", hint="declare stages.train.allocation: {} and re-plan"
        )
    return settings


def is_allocated(run: RunDir, lock: Lock) -> bool:
    """Whether a lock's time buckets are those of the run's public calibration, as it is now.

    False also while there is no calibration, or none that has a profile.
    """
    try:
        profile = profile_in(read_json(run.calibration))
    except DpsynthError:
        return False
    return profile is not None and follows_profile(lock, profile)


def follows_profile(lock: Lock, profile: Profile) -> bool:
    """Whether a lock's allocation is what the planner makes of this profile.

    Clips, utilities and the choice are computed again; each candidate's noise is taken as it
    says, and that of the chosen one must be the slots'.
    """
    try:
        return _follows(lock, Plan.of_facts(lock.facts), profile)
    except (DpsynthError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return False


def _follows(lock: Lock, plan: Plan, profile: Profile) -> bool:
    settings, said = _settings(plan), lock.allocation
    if said is None or settings.allocation is None or said["profile"] != profile.digest:
        return False
    found = [_read(one, plan, profile) for one in said["candidates"]]
    chosen, _ = decide(found)
    noise = {slot.noise_std for slot in lock.stage_slots("train")}
    return (
        profile.fits(settings.buckets, plan.distillation)
        and tuple(one.beta for one in found) == settings.allocation.family
        and (said["beta"], said["clips"]) == (chosen.beta, list(chosen.clips))
        and said["edges"] == list(profile.edges)
        and noise == {chosen.noise_std}
    )


def _read(said: dict[str, Any], plan: Plan, profile: Profile) -> Candidate:
    """A candidate that a lock lists, its utility computed anew. ValueError where it differs."""
    beta, noise = said["beta"], said["noise_std"]
    clips = clips_of(profile, beta, _settings(plan).clip)
    value = None if noise is None else score(plan, profile, clips, noise)
    same = said["utility"] is None if value is None else math.isclose(said["utility"], value)
    if said["clips"] != list(clips) or not same:
        raise ValueError("another profile's candidate")
    return Candidate(beta, clips, None, noise, value)
