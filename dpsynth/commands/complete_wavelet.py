"""`dpsynth complete-wavelet`: add fine detail to coarse images by the public transformer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpsynth.commands import _options as opt
from dpsynth.console import note, result
from dpsynth.errors import typed

if TYPE_CHECKING:
    from dpsynth.planning.verify import VerifiedPlan


def complete_wavelet(
    run: opt.Run,
    *,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            min=1,
            max=opt.MOST_SAMPLES,
            metavar="N",
            help="The first N coarse images. Default: all of them.",
        ),
    ] = None,
    coarse: Annotated[
        str | None,
        typer.Option(
            "--coarse",
            metavar="SOURCE",
            help="What to complete: another run, or an image folder or zip, its images of the "
            "plan's size or of its coarse band's. Default: the run's own released/coarse.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="NAME|DIR",
            help="Where to write: samples-NAME, a folder of released/, or else any folder outside "
            "the run. Default: samples; samples-completed for another SOURCE.",
        ),
    ] = None,
    threads: opt.Threads = None,
    json: opt.Json = False,
) -> None:
    """Complete coarse samples with public detail; spends nothing, opens no private data.

    Writes an image folder with labels and captions carried over, and a contact sheet of coarse
    images beside completed ones. A call that was cut short goes on where it ended.

    Example: dpsynth complete-wavelet runs/emoji
    """
    opt.use_threads(threads)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run)

    from dpsynth.released.completion import complete_wavelet as library_complete

    found = library_complete(verified, count, coarse=coarse, out=out)
    result(found, json)
    _say_next(verified, Path(found["samples"]))


def _say_next(verified: "VerifiedPlan", folder: Path) -> None:
    """The plan's own samples are a step of the run; others are measured by their name."""
    released = verified.run.released
    if folder == released / "samples":
        opt.say_next(verified)
        return
    name = folder.name.removeprefix("samples-")
    which = ("--model", name) if folder.parent == released else ("--samples", folder)
    note(f"next: {typed('dpsynth', 'evaluate', verified.run.root, *which)}")
