"""What a stage of `pretrain` may keep, and what may come back after it was lost."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.errors import DpsynthError


def made_by(path: Path, recipe: str) -> bool:
    """Whether a file of arrays is there and says that it was made by this recipe."""
    try:
        return path.exists() and load_tensors(path)[1].get("recipe") == recipe
    except DpsynthError:
        return False  # damaged: made again


def kept_calibration(run: RunDir, recipe: str) -> dict[str, Any] | None:
    """The run's calibration, if it is there and was made by this recipe."""
    try:
        facts: dict[str, Any] = read_json(run.calibration)
    except DpsynthError:
        return None  # none, or damaged: made again
    return dict(facts) if facts.get("recipe") == recipe else None


def is_named(run: RunDir, key: str, save: Callable[[Path], None]) -> bool:
    """Whether what `save` writes is the very file that the calibration names under `key`.

    Then it may come back at any time, if it was lost: no charge means another one.
    """
    try:
        wanted = read_json(run.calibration).get(key)
    except DpsynthError:
        return False
    with TemporaryDirectory() as folder:
        path = Path(folder) / "made"
        save(path)
        return sha256_file(path) == wanted
