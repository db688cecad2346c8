"""`dpsynth plan`: verify a plan and write its lock."""

from pathlib import Path
from typing import Annotated

import typer

from dpsynth.commands import _options as opt
from dpsynth.console import note, result
from dpsynth.errors import typed


def plan(
    plan: opt.PlanFile = Path("plan.yaml"),
    *,
    run: opt.RunOption = None,
    init: Annotated[
        bool, typer.Option("--init", help="Write a commented starter plan instead.")
    ] = False,
    private: opt.PrivatePath = None,
    unsafe_seed: Annotated[int | None, typer.Option("--unsafe-seed", hidden=True)] = None,
    json: opt.Json = False,
) -> None:
    """Verify a plan: calibrate its noise, compose its epsilon, write the lock.

    A plan with stages.train.allocation is planned again after pretrain, which measures its time
    buckets on public data: then every shape is verified and the best one by a public score is kept.

    Opens no private file. Over budget, or a plan changed after its first charge: exit 3.

    Example: dpsynth plan plans/digits.yaml
    """
    if init:
        from dpsynth.planning.starter import write_starter

        path = write_starter(plan)
        return result(
            {"plan": str(path)},
            json,
            f"wrote {path}; edit it, then: {typed('dpsynth', 'plan', path)}",
        )

    from dpsynth.planning import table
    from dpsynth.planning.steps import status
    from dpsynth.planning.verify import make_run, warnings

    verified = make_run(plan, run, private=private, unsafe_seed=unsafe_seed)
    for warning in warnings(verified.plan):
        note(warning)
    root = verified.run.root
    result(
        {"run": str(root), "lock": str(verified.run.lock), **table.as_json(verified.lock)},
        json,
        lambda: table.render(verified.lock, str(verified.run.lock)),
    )
    if verified.lock.provisional:
        note(
            "the clip and noise of each time bucket are chosen from public data: after pretrain, "
            "plan again (dpsynth run does so by itself)"
        )
    whole = ["dpsynth", "run", plan] if run is None else ["dpsynth", "run", plan, "--run", run]
    following = typed("dpsynth", "check", root)
    if verified.lock.allocation is not None:  # pretrain may be done already
        following = status(verified.run).next_command or following
    note(f"next: {following}   (or all of it: {typed(*whole)})")
    return None
