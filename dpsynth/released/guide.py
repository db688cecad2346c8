"""Guided samples by hand: any start, any model, and the controls of StraightDP section 4.4."""

from typing import Any

from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import UsageError
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.drawing import Route
from dpsynth.released.guidance import MEANS, Guide, plan_start
from dpsynth.released.sampling import last_model, sample, sample_by

MODELS = ("prior", "distilled", "model")
"""What can be guided: the untouched prior, and the models that it became."""


def guide(
    verified: VerifiedPlan,
    count: int | None = None,
    chosen: Guide | None = None,
    *,
    model: str | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Write guided samples, a contact sheet and the hand-out folder around them.

    They are the plan's own (`released/samples/`) where the plan guides and nothing asked for
    differs from it; else they go to `released/samples-guided[-MODEL][-MEAN-mean]/`.

    Args:
        verified: the run to sample from.
        count: images in all; the plan's `sampling.count` if None.
        chosen: the start and the means; None is the plan's start and the released means.
        model: one of `MODELS`; the last one that the plan makes if None.
        ranks: the processes that draw; the main one writes. The others return nothing.

    Raises:
        UsageError: an unknown model or mean, a start outside (0, 1), no moments stage, or a count
            below 1.
        MissingError: what the samples are made of is not there yet.
    """
    plan, guide = verified.plan, chosen or Guide()
    ranks.lead(lambda: _check(verified, guide, model))
    if _is_own(verified, guide, model):
        return sample(verified, count, ranks=ranks)
    return sample_by(verified, count, _route(plan, guide, model), ranks)


def _route(plan: Plan, guide: Guide, model: str | None) -> Route:
    """The model, and a folder named by what differs."""
    name = model or last_model(plan)
    suffix = "-guided"
    suffix += "" if name == last_model(plan) else f"-{name}"
    suffix += "" if guide.mean == "released" else f"-{guide.mean}-mean"
    return Route(model=name, name=suffix.removeprefix("-"), suffix=suffix, guide=guide)


def _is_own(verified: VerifiedPlan, guide: Guide, model: str | None) -> bool:
    """Whether this is what `dpsynth sample` makes of the plan."""
    plan, run = verified.plan, verified.run
    return (
        plan.sampling.method == "guide"
        and guide.mean == "released"
        and model in {None, last_model(plan)}
        and (guide.start is None or guide.start == plan_start(run, plan))
    )


def _check(verified: VerifiedPlan, guide: Guide, model: str | None) -> None:
    if verified.plan.stages.moments is None:
        raise UsageError(
            "guidance starts from released moments, and the plan has no moments stage",
            hint="declare stages.moments in the plan",
        )
    if model is not None and model not in MODELS:
        raise UsageError(
            f"there is no model {model!r} to guide", hint=f"--model {'|'.join(MODELS)}"
        )
    if guide.mean not in MEANS:
        raise UsageError(f"there is no mean {guide.mean!r}", hint=f"--mean {'|'.join(MEANS)}")
    guide.at(verified.run, verified.plan)
