"""`dpsynth run`: all of a plan, resumable."""

from pathlib import Path
from typing import TYPE_CHECKING

from dpsynth.commands import _chain
from dpsynth.commands import _options as opt
from dpsynth.console import note, result
from dpsynth.errors import ReplayError

if TYPE_CHECKING:
    from dpsynth.private.engine import EngineSettings


def run(
    plan: opt.PlanFile = Path("plan.yaml"),
    *,
    run: opt.RunOption = None,
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
    """Plan, check, pretrain, release, train, sample, evaluate and replay; skips what is done.

    A plan with spectral tokens has its coarse samples completed before they are evaluated. Stopped,
    it goes on where it was.

    Example: dpsynth run plans/digits.yaml
    """
    opt.use_threads(threads)
    opt.use_workers(workers)
    opt.use_machine(device, dtype, offload, batch)
    from dpsynth.planning.verify import make_run, warnings

    verified = make_run(plan, run, private=private)
    for warning in warnings(verified.plan):
        note(warning)
    shown = opt.may_show(verified, show_curator)

    def engine() -> "EngineSettings":
        from dpsynth.private.engine import EngineSettings  # torch enters here

        return EngineSettings(physical_batch, precision, exact_sums=exact_sums)

    verified = _chain.carry_out(verified, engine)
    found = _chain.summary(verified, shown)
    result(found, json, lambda: _chain.summary_text(verified, found))
    if not found["replay"]["ok"]:
        raise ReplayError(found["replay"]["verdict"], hint="never hand this out")
