"""`dpsynth close`: end a run's transcript and refresh its hand-out folder."""

from typing import Annotated

import typer

from dpsynth.commands import _options as opt
from dpsynth.console import result


def close(
    run: opt.Run,
    without_model: Annotated[
        bool,
        typer.Option(
            "--without-model",
            help="Close although the checkpoint of the settled steps is lost; no model is made.",
        ),
    ] = False,
    json: opt.Json = False,
) -> None:
    """Close a run whose spending stopped early, and refresh released/.

    Training that was cut off ends as it would have ended: released/model.safetensors is made of
    the last settled steps.

    What was charged and not settled is forfeited for good, and a file that it left in released/ is
    removed; nothing can be charged afterwards.

    Example: dpsynth close runs/digits
    """
    from dpsynth.artifacts.lock import read_lock
    from dpsynth.artifacts.rooms import RunDir
    from dpsynth.artifacts.settled import MODEL
    from dpsynth.artifacts.spending import close_run

    folder = RunDir.open(run)
    state = close_run(folder, read_lock(folder.lock), without_model=without_model)

    from dpsynth.released.handout import hand_out

    hand_out(folder)
    result(
        {
            "run": str(run),
            "head": state.head,
            "settled": len(state.settled),
            "forfeited": len(state.forfeited),
            "model": MODEL if (folder.released / MODEL).is_file() else None,
            "released": str(folder.released),
        },
        json,
    )
