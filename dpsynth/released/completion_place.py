"""Where completed images go: beside the run's samples by name, or a folder of the user's."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsynth.artifacts.rooms import RunDir, in_a_run
from dpsynth.artifacts.sample_parts import unfinished_origin
from dpsynth.artifacts.samples import read_summary, summary_path
from dpsynth.errors import UsageError
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.coarse_source import Coarse, require_open
from dpsynth.released.sampling import MODELS, POPULATION, is_coarse, sheet_name

FOREIGN = "samples-completed"
_NAME = re.compile("samples(-[a-z]+)*")
_OWN = {"samples", *(f"samples-{model}" for model in (*MODELS, POPULATION))}
"""What `sample` writes, and `evaluate` and `report` take for the plan's."""


@dataclass(frozen=True)
class Place:
    """The folder and its contact sheet; `handed`: whether both lie in `released/`."""

    folder: Path
    sheet: Path
    handed: bool


def place_of(verified: VerifiedPlan, coarse: Coarse, out: str | None) -> Place:
    """Where to write.

    `out`: NAME (`samples-...`) for a folder of `released/`, any other path for itself. None: the
    run's own coarse samples become its samples, and others `released/samples-completed/`.

    Raises UsageError for a place inside a run that is none for samples, for one of the plan's own
    samples where the coarse ones are not, or a private one.
    """
    run = verified.run
    if out is None or _NAME.fullmatch(out):
        return _released(run, out or own_name(run, coarse) or FOREIGN, coarse)
    folder = Path(out)
    require_open(verified, folder, "--out")
    resolved, released = folder.resolve(), run.released.resolve()
    if resolved.parent == released and _NAME.fullmatch(resolved.name):
        return _released(run, resolved.name, coarse)
    if resolved.is_relative_to(run.root.resolve()) or run.root.resolve().is_relative_to(resolved):
        raise UsageError(
            "--out lies in the run folder, and its rooms hold what the run's own steps write",
            hint=f"--out {FOREIGN}   (in released/), or a folder outside the run",
        )
    if in_a_run(resolved):
        raise UsageError(
            "--out lies in another run, or in a hand-out, whose card does not know these images",
            hint="--out a folder outside of it",
        )
    if resolved.is_relative_to(coarse.path.resolve()):
        raise UsageError(
            "--out is, or lies in, the folder of the coarse images", hint=f"--out {FOREIGN}"
        )
    return Place(folder, folder.with_name(f"{folder.name}.png"), handed=False)


def own_name(run: RunDir, coarse: Coarse) -> str | None:
    """What the run's own coarse samples become: `samples` of `coarse`; None for foreign ones.

    Those that no sampler tells of are foreign, wherever they lie.
    """
    path = coarse.path.resolve()
    inside = path.parent == run.released.resolve() and is_coarse(path.name)
    if not inside or not coarse.origin:
        return None
    return "samples" + path.name.removeprefix("coarse")


def require_free(place: Place, origin: dict[str, Any]) -> None:
    """Refuse (UsageError) a folder that holds what is not ours to replace.

    In `released/` samples give way to others, as `dpsynth sample` does it; elsewhere a folder must
    be empty, or hold images of this very origin.
    """
    folder = place.folder
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder} is there already, and is no folder", hint="name another --out")
    if place.handed:
        return
    if not folder.is_dir() or not any(folder.iterdir()):
        beside = [path for path in (place.sheet, summary_path(folder)) if path.exists()]
        if beside:
            raise UsageError(
                f"{beside[0]} is there already, where a file about the new folder would lie",
                hint="name another --out, or move that file",
            )
        return
    summary, begun = read_summary(folder), unfinished_origin(folder)
    if origin != (begun if summary is None else summary.get("origin")):
        raise UsageError(
            f"{folder} holds something else than images of this completion",
            hint="name a new folder with --out, or remove that one",
        )


def _released(run: RunDir, name: str, coarse: Coarse) -> Place:
    """A folder of `released/`; the plan's own samples are made of its own coarse ones alone."""
    if name in _OWN and own_name(run, coarse) is None:
        raise UsageError(
            f"{name} is for samples of the plan's own, and these coarse images are not",
            hint=f"--out {FOREIGN}",
        )
    return Place(run.released / name, run.released / sheet_name(name), handed=True)
