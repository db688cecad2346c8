"""`dpsynth evaluate`: measure the samples against held-out private records."""

from pathlib import Path
from typing import Annotated

import typer

from dpsynth.commands import _options as opt
from dpsynth.commands._chain import evaluation_text
from dpsynth.console import result


def evaluate(
    run: opt.Run,
    *,
    private: opt.PrivatePath = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Measure released/samples-NAME instead of samples."
        ),
    ] = None,
    inception_weights: Annotated[
        Path | None,
        typer.Option(
            "--inception-weights",
            metavar="FILE",
            help="pytorch-fid's weights. Default: torch's hub cache; without them no FID.",
        ),
    ] = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Measure accuracy and fidelity of the samples on held-out records; curator-only.

    Of a plan that augments its samples, those without augmentation are measured beside.

    Nothing that it writes is for handing out, and choosing a run by it is outside the guarantee.

    Example: dpsynth evaluate runs/digits
    """
    opt.use_threads(threads)
    opt.use_workers(workers)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run, private)

    from dpsynth.assess.evaluate import evaluate as library_evaluate

    shown = opt.may_show(verified, show_curator)
    measured = library_evaluate(verified, inception_weights=inception_weights, model=model)
    name = "evaluation.json" if model is None else f"evaluation-{model}.json"
    found = opt.findings(measured, verified.run.curator / name, shown)
    result(found, json, lambda: evaluation_text(found))
    opt.say_next(verified)
