"""`dpsynth evaluate`: samples against held-out records, or any image set against another."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dpsynth.commands import _options as opt
from dpsynth.commands._measured_table import evaluation_text
from dpsynth.console import note, result
from dpsynth.errors import UsageError

OUTPUT = Path("evaluation")


def evaluate(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="The run folder. Default: that of the plan.yaml in the working directory; "
            "none with --samples alone.",
            metavar="RUN",
            show_default=False,
            parser=opt.parse_run,
        ),
    ] = None,
    *,
    samples: Annotated[
        str | None,
        typer.Option(
            "--samples",
            metavar="PATH",
            help="Images to measure, made by any tool. A folder (metadata.csv, class subfolders "
            "or pictures alone), a zip of one, an NPZ, or IDX as IMAGES,LABELS. With RUN: in place "
            "of its samples, against its private records; else --reference is needed.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="PATH",
            help="Real images to compare with, of the same kinds. With RUN: in place of its "
            "private records, which are not opened then; --public-reference is needed.",
        ),
    ] = None,
    train_reference: Annotated[
        str | None,
        typer.Option(
            "--train-reference",
            metavar="PATH",
            help="Real images that the samples were made from: ceiling and features. Default: "
            "half of --reference, by a hash of each image.",
        ),
    ] = None,
    public_reference: Annotated[
        bool,
        typer.Option(
            "--public-reference",
            help="The references are public: the report may be released.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Where the report on --samples goes. Default: ./evaluation.",
        ),
    ] = None,
    probe: Annotated[
        Literal["lenet", "wrn", "both"],
        typer.Option(
            "--probe",
            help="Classifier behind accuracy: lenet, wrn (wide residual network, WRN-16-2), both.",
        ),
    ] = "lenet",
    full: Annotated[
        bool,
        typer.Option("--full", help="The wide probe at the public benchmark's size, WRN-40-4."),
    ] = False,
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
    lpips_weights: Annotated[
        Path | None,
        typer.Option(
            "--lpips-weights",
            metavar="FILE",
            help="torchvision's AlexNet, for images with captions. Default: torch's hub cache; "
            "without it no LPIPS.",
        ),
    ] = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Measure accuracy and fidelity of samples on held-out records; curator-only unless public.

    Of a plan that augments its samples, those without augmentation are measured beside.

    Against private records nothing that it writes is for handing out, and choosing a run by it is
    outside the guarantee. Against a public reference the report may be released: that on RUN lies
    in released/evaluation-public.json.

    Example: dpsynth evaluate runs/digits

    Example: dpsynth evaluate runs/digits --samples curator/reference-nonprivate

    Example: dpsynth evaluate --samples others.npz --reference test/ --train-reference train/
    """
    opt.use_threads(threads)
    opt.use_workers(workers)
    measuring: dict[str, Any] = {
        "probe": probe,
        "full": full,
        "inception_weights": inception_weights,
        "lpips_weights": lpips_weights,
    }
    if full and probe == "lenet":
        raise UsageError("--full is of the wide probe", hint="--probe wrn --full")
    sets = {"train_reference": train_reference, "public_reference": public_reference, **measuring}
    if samples is not None and run is not None:
        _refuse_beside(
            {
                "--model": model,
                "--output": output,
                "--reference": reference,
                "--train-reference": train_reference,
                "--public-reference": public_reference or None,
            },
            "--samples of RUN",
        )
        _others(run, private, samples, measuring, show=show_curator, json=json)
        return
    if samples is not None:
        _refuse_beside({"--private": private, "--model": model}, "--samples")
        _sets(samples, reference, output or OUTPUT, sets, show=show_curator, json=json)
        return
    _refuse_beside({"--output": output}, "RUN")
    folder = opt.default_run() if run is None else run
    if reference is not None:
        _refuse_beside({"--private": private}, "--reference")
        _public(folder, model, reference, sets, json=json)
        return
    if public_reference or train_reference:
        raise UsageError("--reference is missing", hint="--reference PATH")
    _run(folder, private, model, measuring, show=show_curator, json=json)


def _run(
    folder: Path,
    private: Path | None,
    model: str | None,
    measuring: dict[str, Any],
    *,
    show: bool,
    json: bool,
) -> None:
    """A run's samples against its held-out private records."""
    from dpsynth.planning.verify import load_verified

    verified = load_verified(folder, private)

    from dpsynth.assess.evaluate import evaluate as library_evaluate

    shown = opt.may_show(verified, show)
    measured = library_evaluate(verified, model=model, **measuring)
    name = "evaluation.json" if model is None else f"evaluation-{model}.json"
    found = opt.findings(measured, verified.run.curator / name, shown)
    result(found, json, lambda: evaluation_text(found))
    opt.say_next(verified)


def _others(
    folder: Path,
    private: Path | None,
    samples: str,
    measuring: dict[str, Any],
    *,
    show: bool,
    json: bool,
) -> None:
    """Images from elsewhere against a run's held-out private records."""
    from dpsynth.planning.verify import load_verified

    verified = load_verified(folder, private)

    from dpsynth.assess.evaluate import evaluate_others

    shown = opt.may_show(verified, show)
    measured, where = evaluate_others(verified, samples, **measuring)
    found = opt.findings(measured, where, shown)
    result(found, json, lambda: evaluation_text(found))


def _public(
    folder: Path, model: str | None, reference: str, sets: dict[str, Any], *, json: bool
) -> None:
    """A run's samples against a public reference: no private file is opened."""
    if not sets["public_reference"]:
        raise UsageError(
            "a run is compared with another reference only where that is public",
            hint="add --public-reference if it is; or: dpsynth evaluate RUN",
        )
    from dpsynth.planning.verify import load_verified

    verified = load_verified(folder)

    from dpsynth.assess.sets import evaluate_in_public

    measured, where = evaluate_in_public(verified, reference, model=model, **sets)
    found = opt.findings(measured, where, True)
    result(found, json, lambda: evaluation_text(found))
    opt.say_next(verified)


def _sets(
    samples: str,
    reference: str | None,
    output: Path,
    sets: dict[str, Any],
    *,
    show: bool,
    json: bool,
) -> None:
    """Two image sets, without a run."""
    if reference is None:
        raise UsageError("--samples needs something to compare with", hint="--reference PATH")
    from dpsynth.assess.sets import REPORT, compare_sets

    public = bool(sets["public_reference"])
    measured = compare_sets(samples, reference, output, reveal=show, **sets)
    found = opt.findings(measured, output / REPORT, public or show)
    result(found, json, lambda: evaluation_text(found))
    if not public:
        note("the reference is not declared public: report and sheet are for the curator alone")


def _refuse_beside(given: dict[str, object], what: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} does not go with {what}", hint="dpsynth evaluate --help")
