"""`dpsynth train`: distil the release, then spend the plan's train stage."""

from typing import Any

from dpsynth.commands import _options as opt
from dpsynth.console import result
from dpsynth.errors import UsageError, typed


def train(
    run: opt.Run,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Distil the released moments into the flow, then train it with DP-SGD, as the plan says.

    Interrupted, it goes on after the last settled chunk of steps.

    Example: dpsynth train runs/digits
    """
    opt.use_threads(threads)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run, private)  # over budget: the data is never opened
    plan, found = verified.plan, dict[str, Any]()
    if plan.distillation is None and plan.stages.train is None:
        raise UsageError(
            "the plan has nothing to train: it samples from the release alone",
            hint=typed("dpsynth", "sample", run),
        )
    if plan.distillation is not None:
        from dpsynth.released.distill import distill

        found["distilled"] = distill(verified)
    if plan.stages.train is not None:
        from dpsynth.assess.check import ensure_checked
        from dpsynth.private.dpsgd import train as library_train

        ensure_checked(verified)
        shown = opt.may_show(verified, show_curator)
        found["train"] = opt.visible(library_train(verified), shown)
    result(found, json)
    opt.say_next(verified)
