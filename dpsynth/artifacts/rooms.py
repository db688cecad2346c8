"""A run folder and its three rooms: public, released, curator."""

import os
from dataclasses import dataclass
from pathlib import Path

from dpsynth.artifacts.files import storage_error
from dpsynth.errors import MissingError, UsageError, typed

LOCK_NAME = "plan.lock.json"
TRANSCRIPT_NAME = "transcript.jsonl"
MANIFEST_NAME = "manifest.json"
CURATOR = "curator"
ROOMS = ("public", "released", CURATOR)


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Holds no file open and reads nothing."""

    root: Path

    @classmethod
    def create(cls, path: Path) -> "RunDir":
        """The run at `path`, its rooms made (the curator's with mode 0700)."""
        run = cls(path)
        run.make_rooms()
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """The run at `path`.

        Raises:
            UsageError: a file, a hand-out, or a room of a run; see `require_whole`.
            MissingError: it holds no lock.
        """
        require_whole(path)
        run = cls(path)
        if not run.lock.is_file():
            raise MissingError(
                f"no {LOCK_NAME} in {path.name or path}/: this is not a planned run",
                hint="dpsynth plan PLAN.yaml",
            )
        return run

    def make_rooms(self) -> None:
        """Make the three rooms; narrow the curator's to its owner."""
        try:
            for room in (self.root, self.public, self.released):
                room.mkdir(parents=True, exist_ok=True)
            self.curator.mkdir(mode=0o700, exist_ok=True)
            self.curator.chmod(0o700)
        except OSError as error:
            raise storage_error(self.curator, error) from error

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.root.resolve().name

    @property
    def lock(self) -> Path:
        """What was verified."""
        return self.root / LOCK_NAME

    @property
    def transcript(self) -> Path:
        """What was spent."""
        return self.root / TRANSCRIPT_NAME

    @property
    def public(self) -> Path:
        """From public data alone; free to share."""
        return self.root / "public"

    @property
    def calibration(self) -> Path:
        """What only utility depends on; its SHA-256 is in every charge."""
        return self.public / "calibration.json"

    @property
    def released(self) -> Path:
        """Safe to hand out."""
        return self.root / "released"

    @property
    def curator(self) -> Path:
        """Mode 0700; never hand out."""
        return self.root / CURATOR


def in_curators_room(path: Path) -> bool:
    """Whether a path is the curator's room of some run, or lies in one; by links too."""
    resolved = path.resolve()
    rooms = [at for at in (resolved, *resolved.parents) if at.name == CURATOR]
    return any((room.parent / LOCK_NAME).is_file() for room in rooms)


def in_a_run(path: Path) -> bool:
    """Whether a path is a run or a hand-out, wherever it lies, or lies in one; by links too."""
    resolved = path.resolve()
    marks = (LOCK_NAME, MANIFEST_NAME)
    return any((at / mark).is_file() for at in (resolved, *resolved.parents) for mark in marks)


def require_whole(path: Path) -> None:
    """Refuse what is only a part of a run, or a copy of one, in a run folder's place.

    A hand-out bears lock and transcript as a run does: taken for one, it would get a curator's room
    of its own, inside what is handed out. A folder that is not there yet passes.

    Raises UsageError for a file, a hand-out folder, or one of a run's rooms.
    """
    name, home = path.resolve().name, _home(path)
    where = "" if home is None else f"name the run folder: {_as_typed(home, path)}"
    if path.is_file():
        raise UsageError(
            f"{name} is a file, and a run is a folder", hint=where or "name the run folder"
        )
    if name in ROOMS and home == path.resolve().parent:
        raise UsageError(f"{name}/ is a room of the run {home.name}, not a run", hint=where)
    if (path / MANIFEST_NAME).is_file() and (path / LOCK_NAME).is_file():
        raise UsageError(
            f"{name}/ is a hand-out of a run, not a run",
            hint=where
            or f"name the run folder; a hand-out is checked by: {typed('dpsynth', 'replay', path)}",
        )


def _home(path: Path) -> Path | None:
    """The run folder that `path` lies in, if it lies in one."""
    return next(
        (
            folder
            for folder in path.resolve().parents[:3]
            if (folder / LOCK_NAME).is_file() and not (folder / MANIFEST_NAME).is_file()
        ),
        None,
    )


def _as_typed(home: Path, path: Path) -> str:
    """`home` as people would type it who typed `path`."""
    return str(home) if path.is_absolute() else os.path.relpath(home)
