"""A run folder and its three rooms: public, released, curator."""

from dataclasses import dataclass
from pathlib import Path

from dpsynth.artifacts.files import storage_error
from dpsynth.errors import MissingError

LOCK_NAME = "plan.lock.json"
TRANSCRIPT_NAME = "transcript.jsonl"


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
        """The run at `path`. Raises MissingError when it holds no lock."""
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
        return self.root / "curator"
