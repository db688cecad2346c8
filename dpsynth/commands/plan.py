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
    whole = ["dpsynth", "run", plan] if run is None else ["dpsynth", "run", plan, "--run", run]
    note(f"next: {typed('dpsynth', 'check', root)}   (or all of it: {typed(*whole)})")
    return None
