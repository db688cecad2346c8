"""Where a frozen prior's own samples lie, which are public images of a plan."""

from pathlib import Path

from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import read_summary
from dpsynth.errors import MissingError, typed
from dpsynth.planning.source_kinds import FolderSource, PriorSource, PublicSource, Source

OWN = "own-samples"


def own_folder(run: RunDir) -> Path:
    """Where the prior's own samples lie."""
    return run.public / OWN


def readable(source: PublicSource, run: RunDir | None) -> Source:
    """A public source as readers know it: the prior's own samples are a folder of the run.

    Raises MissingError: they were not drawn yet.
    """
    if not isinstance(source, PriorSource):
        return source
    if run is None or read_summary(own_folder(run)) is None:
        raise MissingError(
            "the prior's own samples are not there yet",
            hint="dpsynth pretrain RUN" if run is None else typed("dpsynth", "pretrain", run.root),
        )
    return FolderSource(kind="folder", path=own_folder(run))
