"""`dpsynth train`: distil or fit to the release, then spend the plan's train stage."""

from typing import TYPE_CHECKING, Any

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result
from dpsynth.errors import UsageError, typed

if TYPE_CHECKING:
    from dpsynth.planning.verify import VerifiedPlan


def train(
    run: opt.Run,
    *,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    physical_batch: opt.PhysicalBatch = None,
    precision: opt.Precision = "float32",
    exact_sums: opt.ExactSums = False,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    offload: opt.Offload = False,
    batch: opt.Batch = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Distil the released moments into the flow, then train it with DP-SGD, as the plan says.

    Of a plan that releases an embedding it fits the generator, and spends nothing. Of one that
    released central images it learns them first, and DP-SGD starts there.

    Interrupted, it goes on after the last settled chunk of steps.

    Example: dpsynth train runs/digits
    """
    opt.use_workers(workers)
    opt.use_machine(device, dtype, offload, batch)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run, private)  # over budget: the data is never opened
        found = ranks.lead(lambda: _prepared(verified)) or {}
        if verified.plan.stages.train is not None:
            from dpsynth.private.dpsgd import train as library_train
            from dpsynth.private.engine import EngineSettings

            engine = EngineSettings(physical_batch, precision, exact_sums=exact_sums)
            shown = opt.may_show(verified, show_curator)
            found["train"] = opt.visible(library_train(verified, ranks, engine), shown)
        if ranks.is_main:
            result(found, json)
            opt.say_next(verified)


def _prepared(verified: "VerifiedPlan") -> dict[str, Any]:
    """What one process does before the steps: distil, and see that the records were checked."""
    plan, found = verified.plan, dict[str, Any]()
    if plan.stages.embedding is not None:
        from dpsynth.released.generating import fit

        found["generator"] = fit(verified)
        return found
    if plan.distillation is None and plan.stages.train is None:
        raise UsageError(
            "the plan has nothing to train: it samples from the release alone",
            hint=typed("dpsynth", "sample", verified.run.root),
        )
    if plan.distillation is not None:
        from dpsynth.released.distill import distill

        found["distilled"] = distill(verified)
    if plan.stages.central is not None:
        from dpsynth.released.warm import warm_start

        found["warm_up"] = warm_start(verified)
    if plan.stages.train is not None:
        from dpsynth.assess.check import ensure_checked

        ensure_checked(verified)
    return found
