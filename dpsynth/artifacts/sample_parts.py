"""What a cut sampling leaves beside its images: lists of complete shards, and whose they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import read_json
from dpsynth.errors import DpsynthError

PARTS, MARKER = ".parts", "origin.json"


def unfinished_origin(folder: Path) -> dict[str, Any] | None:
    """The origin of samples that are being written, or were cut short; None where there are none.

    One that cannot be read is {}.
    """
    marker = folder / PARTS / MARKER
    if not marker.exists():
        return None
    try:
        origin = read_json(marker).get("origin")
    except DpsynthError:
        return {}
    return origin if isinstance(origin, dict) else {}


def matches(parts: Path, mark: Mapping[str, Any]) -> bool:
    """Whether shards were left there by a writer of just these facts."""
    marker = parts / MARKER
    try:
        return marker.exists() and read_json(marker) == mark
    except DpsynthError:  # a damaged marker: start over
        return False


def discard_parts(parts: Path) -> None:
    """Remove all shards of an unfinished sampling."""
    if parts.is_dir():
        # The marker goes first: without it, what is left counts as nobody's.
        (parts / MARKER).unlink(missing_ok=True)
        for part in sorted(parts.iterdir()):
            part.unlink()
        parts.rmdir()
