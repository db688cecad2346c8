"""`dpsynth sample`: draw synthetic images from what was released."""

from typing import Annotated

import typer

from dpsynth.commands import _options as opt
from dpsynth.console import result


def sample(
    run: opt.Run,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=1, metavar="N", help="Images. Default: the plan's."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="model, distilled, prior, field or release. Default: the plan's own.",
        ),
    ] = None,
    threads: opt.Threads = None,
    json: opt.Json = False,
) -> None:
    """Draw synthetic images into released/samples, an image folder; spends nothing.

    Example: dpsynth sample runs/digits -n 1000
    """
    opt.use_threads(threads)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run)

    from dpsynth.released.sampling import sample as library_sample

    result(library_sample(verified, count, model=model), json)
