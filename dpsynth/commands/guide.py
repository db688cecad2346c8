"""`dpsynth guide`: draw synthetic images that start from the released moments."""

from typing import Annotated, Literal

import typer

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result
from dpsynth.errors import UsageError


def guide(
    run: opt.Run,
    *,
    count: opt.Count = None,
    start: Annotated[
        float | None,
        typer.Option(
            "--start",
            metavar="T0",
            help="When sampling starts, 0 < T0 < 1. Default: the plan's, chosen by public data.",
        ),
    ] = None,
    sigma: Annotated[
        float | None,
        typer.Option(
            "--sigma",
            metavar="S",
            help="The same said as a noise level, T0 = 1 - S: 0.95 for --start 0.05.",
        ),
    ] = None,
    model: Annotated[
        Literal["prior", "distilled", "model"] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="prior, distilled or model: what is guided. Default: the plan's last one.",
        ),
    ] = None,
    mean: Annotated[
        Literal["released", "zero", "public", "random"],
        typer.Option(
            "--mean",
            metavar="NAME",
            show_default=False,
            help="Means of the start: released (default), or a control for research: zero, "
            "public (those of the prior's draws), random (a direction of the same length).",
        ),
    ] = "released",
    threads: opt.Threads = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    offload: opt.Offload = False,
    batch: opt.Batch = None,
    json: opt.Json = False,
) -> None:
    """Start sampling at T0 from what was released, and let a model finish; spends nothing.

    Writes released/samples-guided, or released/samples where the plan guides and nothing differs.

    Example: dpsynth guide runs/digits --start 0.2
    """
    opt.use_machine(device, dtype, offload, batch)
    at = _start(start, sigma)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run)

        from dpsynth.released.guidance import Guide
        from dpsynth.released.guide import guide as library_guide

        facts = library_guide(verified, count, Guide(at, mean), model=model, ranks=ranks)
        if ranks.is_main:
            result(facts, json)
            opt.say_next(verified)


def _start(start: float | None, sigma: float | None) -> float | None:
    """The start T0 of either option. Raises UsageError: both are given, or sigma is no sigma."""
    if start is not None and sigma is not None:
        raise UsageError(
            f"--start {start:g} and --sigma {sigma:g} say the same in two ways",
            hint=f"--start {start:g}",
        )
    if sigma is None:
        return start
    if not 0.0 < sigma < 1.0:
        raise UsageError(f"--sigma {sigma:g}: expected 0 < sigma < 1", hint="--sigma 0.95")
    return round(1.0 - sigma, 12)
