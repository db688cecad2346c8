"""`dpsynth sample`: draw synthetic images from what was released."""

from typing import Annotated

import typer

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result


def sample(
    run: opt.Run,
    *,
    count: opt.Count = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="model, distilled, prior, field, release, population or generator; plain: the "
            "plan's own without its augmentation. Default: the plan's own (with plain beside it "
            "if it augments).",
        ),
    ] = None,
    threads: opt.Threads = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    offload: opt.Offload = False,
    batch: opt.Batch = None,
    json: opt.Json = False,
) -> None:
    """Draw synthetic images into released/samples, an image folder; spends nothing.

    Of a plan with spectral tokens they are coarse: they go to released/coarse, and
    dpsynth complete-wavelet makes released/samples of them.

    Example: dpsynth sample runs/digits -n 1000
    """
    opt.use_machine(device, dtype, offload, batch)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run)

        from dpsynth.released.sampling import sample as library_sample

        facts = library_sample(verified, count, model=model, ranks=ranks)
        if ranks.is_main:
            result(facts, json)
            opt.say_next(verified)
