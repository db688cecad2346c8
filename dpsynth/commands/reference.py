"""`dpsynth reference`: the plan without privacy, or its public model alone, for the curator."""

from typing import Annotated, Literal

import typer

from dpsynth.commands import _options as opt
from dpsynth.console import note, result
from dpsynth.errors import typed


def reference(
    run: opt.Run,
    *,
    kind: Annotated[
        Literal["nonprivate", "pretrained"],
        typer.Option(
            "--kind",
            help="nonprivate: what the plan gives without clip and noise, a ceiling; pretrained: "
            "what its public model gives, a floor.",
        ),
    ] = "nonprivate",
    count: opt.Count = None,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    json: opt.Json = False,
) -> None:
    """Draw a NON-PRIVATE reference into curator/reference-KIND: never hand it out; spends nothing.

    Works before and after the private stages, and changes nothing of them. Interrupted, it goes on;
    what was drawn of the same plan, records and public files is kept.

    Example: dpsynth reference runs/digits --kind nonprivate -n 1000
    """
    opt.use_threads(threads)
    opt.use_workers(workers)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run, private)

    from dpsynth.assess.nonprivate.making import reference as library_reference

    found = library_reference(verified, kind, count)
    result(found, json)
    if kind == "nonprivate":
        note("these images are protected by nothing: never hand them out")
    note(f"next: {typed('dpsynth', 'evaluate', run, '--samples', f'curator/reference-{kind}')}")
