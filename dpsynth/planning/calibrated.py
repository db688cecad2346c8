"""The noise of a plan's stages: the least that meets its budget, composed exactly.

Rounding is towards privacy: multipliers are rounded up, epsilons are the pessimistic ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpsynth.accounting.calibrate import round_up, smallest_scale
from dpsynth.accounting.compose import EpsilonBounds, epsilon
from dpsynth.accounting.events import Event
from dpsynth.errors import BudgetError, PlanError
from dpsynth.planning.schema import Plan
from dpsynth.planning.workload import active_weights, delta_slack, slots

_NUDGES = 50


@dataclass(frozen=True)
class Calibrated:
    """Noise multipliers by stage whose composed epsilon, `bounds`, is within the plan's budget.

    `clips`: of training's time buckets; None where they are all the plan's one clip.
    """

    multipliers: dict[str, float]
    bounds: EpsilonBounds
    clips: tuple[float, ...] | None = None


def composition_delta(plan: Plan) -> tuple[float, float]:
    """The delta that slots are composed at, and the slack that pays for discrete noise.

    Raises PlanError where the slack is all of it.
    """
    slack = delta_slack(plan)
    delta = plan.budget.delta - slack
    if delta <= 0:
        raise PlanError(
            f"budget.delta {plan.budget.delta:g} is used up by the discrete noise's own share "
            f"({slack:.2g})",
            hint="declare a larger delta, such as `delta: 1e-5`",
        )
    return delta, slack


def calibrate(plan: Plan, delta: float) -> Calibrated:
    """Noise multiplier of each active stage, and the composed epsilon of everything.

    Time buckets, where the plan has them, have the plan's one clip.

    Raises:
        BudgetError: no noise in the search range meets the budget.
    """
    weights, budget = active_weights(plan), plan.budget.epsilon
    if plan.split == "epsilon":
        found = {s: _alone(plan, s, w * budget, delta) for s, w in weights.items()}
        return _within(plan, {s: round_up(m) for s, m in found.items()}, delta)
    base = {s: _alone(plan, s, budget, delta) / math.sqrt(w) for s, w in weights.items()}
    scale = _scale(plan, base, delta) if len(weights) > 1 else 1.0
    return _within(plan, {s: round_up(scale * m) for s, m in base.items()}, delta)


def recalibrate(
    plan: Plan, delta: float, uniform: Calibrated, clips: tuple[float, ...]
) -> Calibrated:
    """Noise for other clips of the time buckets, from that of the uniform ones (StraightDP, B.5).

    One scale is searched: under `split: noise` of every stage's absolute noise together, so that
    the stages stay as they are to each other; under `split: epsilon` of training's alone, within
    its share. Training's multiplier is that of the largest clip.

    Raises:
        BudgetError: no noise in the search range meets the budget.
    """
    settings = plan.stages.train
    if settings is None:
        raise PlanError("this plan has no train stage", hint="declare stages.train and re-plan")
    if plan.split == "epsilon":
        most = active_weights(plan)["train"] * plan.budget.epsilon
        found = {**uniform.multipliers, "train": _alone(plan, "train", most, delta, clips)}
    else:
        base = {**uniform.multipliers}
        base["train"] *= settings.clip / max(clips)
        scale = _scale(plan, base, delta, clips)
        found = {s: scale * m for s, m in base.items()}
    return _within(plan, {s: round_up(m) for s, m in found.items()}, delta, clips)


def _alone(
    plan: Plan, stage: str, budget: float, delta: float, clips: tuple[float, ...] | None = None
) -> float:
    return smallest_scale(lambda m: stage_events(plan, {stage: m}, clips), budget, delta)


def _scale(
    plan: Plan,
    base: Mapping[str, float],
    delta: float,
    clips: tuple[float, ...] | None = None,
) -> float:
    """The one scale of all stages' noise together that meets the plan's budget."""

    def events_at(scale: float) -> list[Event]:
        return stage_events(plan, {s: scale * m for s, m in base.items()}, clips)

    return smallest_scale(events_at, plan.budget.epsilon, delta)


def stage_events(
    plan: Plan, multipliers: Mapping[str, float], clips: tuple[float, ...] | None = None
) -> list[Event]:
    """Events of every slot of the stages that `multipliers` names."""
    return [slot.event() for slot in slots(plan, multipliers, clips)]


def _within(
    plan: Plan,
    multipliers: dict[str, float],
    delta: float,
    clips: tuple[float, ...] | None = None,
) -> Calibrated:
    """Nudge rounded multipliers up until the composed epsilon is within the budget."""
    for _ in range(_NUDGES):
        bounds = epsilon(stage_events(plan, multipliers, clips), delta)
        if bounds.pessimistic <= plan.budget.epsilon:
            return Calibrated(multipliers, bounds, clips)
        multipliers = {s: round_up(math.nextafter(m, math.inf)) for s, m in multipliers.items()}
    raise BudgetError(
        f"the composed epsilon {bounds.pessimistic:.6g} is over the budget {plan.budget.epsilon:g}",
        hint="declare a larger epsilon, fewer steps or a lower rate",
    )
