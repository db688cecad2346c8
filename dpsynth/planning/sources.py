"""Where the bytes lie: paths of the plan and its sources, in the curator's room alone.

`curator/source.json` is written by `dpsynth plan`. `--private` names another place for the
private records; before the first charge it is kept there, so that the ledger knows it.
"""

import os
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import read_json, write_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import MissingError, UsageError
from dpsynth.planning.schema import Plan, SourceHeldOut
from dpsynth.planning.source_kinds import FolderSource, IdxSource, NpzSource, Source

NAME = "source.json"
_MODE = 0o600


def write(run: RunDir, plan_file: Path, plan: Plan, override: Path | None = None) -> None:
    """Keep where the plan and its sources lie. `plan` has absolute paths."""
    write_json(run.curator / NAME, _record(plan_file, plan, override), mode=_MODE)


def refresh(run: RunDir, plan_file: Path, plan: Plan, override: Path | None) -> None:
    """`write`, where something lies elsewhere by now."""
    if _read(run) != _record(plan_file, plan, override):
        write(run, plan_file, plan, override)


def _record(plan_file: Path, plan: Plan, override: Path | None) -> dict[str, Any]:
    return {
        "plan": os.path.abspath(plan_file),  # noqa: PTH100 - keeps symlinks as given
        "override": None if override is None else _absolute_text(override),
        "private": plan.private.source.model_dump(mode="json"),
        "held_out": plan.private.held_out.model_dump(mode="json"),
        "public": [source.model_dump(mode="json") for source in plan.public],
    }


def move_plan(run: RunDir, plan_file: Path, plan: Plan, override: Path | None) -> None:
    """Keep that the plan file lies elsewhere by now; the rest stays, the dataset too.

    A lost or damaged record is written anew: the next charge lists the run for its dataset again.
    """
    try:
        record = _read(run) | {"plan": os.path.abspath(plan_file)}  # noqa: PTH100
    except (MissingError, UsageError):
        record = _record(plan_file, plan, override)
    write_json(run.curator / NAME, record, mode=_MODE)


def plan_file(run: RunDir) -> Path:
    """The plan file that the run was planned from."""
    path = Path(str(_read(run)["plan"]))
    if not path.is_file():
        raise MissingError(
            f"the run's plan file {path.name} is no longer where it was planned from",
            hint="put it back, or: dpsynth plan PLAN --run RUN",
        )
    return path


def override(run: RunDir) -> Path | None:
    """Where an earlier `--private` said that the private records lie."""
    known = _read(run).get("override")
    return None if known is None else Path(str(known))


def with_private(plan: Plan, path: Path | None) -> Plan:
    """The plan with its private records at `path`: see `--private`.

    For an IDX source, `path` is a folder that holds files of the plan's names, or
    IMAGES,LABELS; held-out IDX files are looked for in that folder too.

    Raises UsageError where the plan's private source has no path.
    """
    if path is None:
        return plan
    source = _at(plan.private.source, path)
    held_out = plan.private.held_out
    if isinstance(held_out, SourceHeldOut) and isinstance(held_out.source, IdxSource):
        moved = _at(held_out.source, path) if "," not in str(path) else held_out.source
        if isinstance(moved, IdxSource) and moved.images.is_file() and moved.labels.is_file():
            held_out = held_out.model_copy(update={"source": moved})
    private = plan.private.model_copy(update={"source": source, "held_out": held_out})
    return plan.model_copy(update={"private": private})


def _at(source: Source, path: Path) -> Source:
    text = _absolute_text(path)
    if isinstance(source, FolderSource | NpzSource):
        return source.model_copy(update={"path": Path(text)})
    if not isinstance(source, IdxSource):
        raise UsageError(
            f"--private does not fit a built-in source ({source.kind}): it has no path",
            hint="leave --private out, or declare a source of kind idx, folder or npz in the plan",
        )
    images, comma, labels = text.partition(",")
    if not comma:
        folder = Path(text)
        images, labels = str(folder / source.images.name), str(folder / source.labels.name)
    return source.model_copy(update={"images": Path(images), "labels": Path(labels)})


def _absolute_text(path: Path) -> str:
    return ",".join(os.path.abspath(Path(part).expanduser()) for part in str(path).split(","))  # noqa: PTH100


def _read(run: RunDir) -> dict[str, Any]:
    try:
        return read_json(run.curator / NAME)
    except MissingError:
        raise MissingError(
            "the run does not know its plan file (curator/source.json is missing)",
            hint="dpsynth plan PLAN --run RUN",
        ) from None
