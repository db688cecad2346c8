"""The audit's own papers: `curator/audit/` with a lock, a transcript, and the worlds made so far.

None of it is the run's. An audit releases nothing, so it spends nothing: the run's lock, transcript
and ledger are neither written nor held. The transcript has the charge lines of every world all the
same, each on disk before the world's mechanism reads a record, chained by hashes as the run's are.

A world is kept, 0600 and without pickle, until the verdict is written. Then all of them go: some
were made without noise.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import (
    canonical_json,
    read_json,
    readable_json,
    sha256_bytes,
    sha256_file,
    storage_error,
    sweep,
    write_all,
    write_atomic,
)
from dpsynth.artifacts.lock import Slot
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.transcript import GENESIS, Line, seal
from dpsynth.errors import BudgetError, DpsynthError, ReplayError, UsageError

LOCK_FORMAT = "dpsynth-audit-lock-1"
TRANSCRIPT_FORMAT = "dpsynth-audit-transcript-1"
LOCK, TRANSCRIPT, WORLDS = "audit.lock.json", "audit-transcript.jsonl", "worlds"
_MODE = 0o600


def audit_folder(run: RunDir, *, public_data: bool = False) -> Path:
    """Where an audit of this run lies; one on public data in the private source's place apart."""
    return run.curator / ("audit-public-data" if public_data else "audit")


class Journal:
    """One audit in progress. Only `journal` makes one, and holds the folder while it lasts."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder = folder
        self.facts = {"format": LOCK_FORMAT, **facts}
        self.lock_hash = sha256_bytes(canonical_json(self.facts))
        self._lines: list[Line] = []
        self._size = 0  # bytes of these lines

    @property
    def worlds(self) -> Path:
        """Where finished worlds lie."""
        return self.folder / WORLDS

    @property
    def _path(self) -> Path:
        return self.folder / TRANSCRIPT

    def path(self, world: str) -> Path:
        """The file of a finished world."""
        return self.worlds / f"{world}.safetensors"

    def begin(self) -> None:
        """Go on with an audit of the same lock that was cut off, else start anew."""
        try:
            same = read_json(self.folder / LOCK) == {**self.facts, "lock_hash": self.lock_hash}
            self._lines = _parsed(self._path.read_bytes()) if same else []
        except (DpsynthError, OSError):
            self._lines = []
        self._size = sum(len(canonical_json(line)) + 1 for line in self._lines)
        if not self._lines or self._lines[-1]["kind"] == "close":
            self._start()

    def _start(self) -> None:
        self.delete_worlds()
        self._path.unlink(missing_ok=True)
        body = {**self.facts, "lock_hash": self.lock_hash}
        write_atomic(self.folder / LOCK, readable_json(body), mode=_MODE)
        self._lines, self._size = [], 0
        self._append("open", {"format": TRANSCRIPT_FORMAT, "lock_hash": self.lock_hash})

    def finished(self, world: str) -> bool:
        """Whether a world settled and its file is the one that settled."""
        digest = self._settled(world)
        return (
            digest is not None
            and self.path(world).is_file()
            and sha256_file(self.path(world)) == digest
        )

    def attempt(self, world: str) -> int:
        """Number of the attempt at a world that begins now, from 1: earlier ones were cut off."""
        tried = [line["attempt"] for line in self._lines if line.get("world") == world]
        return 1 + max(tried, default=0)

    def charge(self, world: str, attempt: int, slot: Slot, noise: str) -> None:
        """Put a slot's charge on disk, before its mechanism reads a record."""
        fields = {"world": world, "attempt": attempt, "slot": slot.id, **slot.spec()}
        self._append("charge", {**fields, "noise_source": noise})

    def settle(self, world: str, attempt: int) -> None:
        """Record the hash of a finished world's file."""
        digest = sha256_file(self.path(world))
        self._append("settle", {"world": world, "attempt": attempt, "sha256": digest})

    def close(self, report: Path) -> None:
        """End the audit with the hash of its report, and delete every world."""
        self._append("close", {"report_sha256": sha256_file(report)})
        self.delete_worlds()

    def delete_worlds(self) -> None:
        """Remove all worlds, finished or not."""
        for path in self.worlds.glob("*"):
            path.unlink()

    def _settled(self, world: str) -> str | None:
        digests = [
            str(line["sha256"])
            for line in self._lines
            if line["kind"] == "settle" and line["world"] == world
        ]
        return digests[-1] if digests else None

    def _append(self, kind: str, fields: dict[str, Any]) -> None:
        head = str(self._lines[-1]["hash"]) if self._lines else GENESIS
        line = seal(len(self._lines) + 1, kind, fields, head)
        data = canonical_json(line) + b"\n"
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, _MODE)
            try:
                os.ftruncate(descriptor, self._size)  # a torn tail of a crash goes
                os.lseek(descriptor, 0, os.SEEK_END)
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise storage_error(self._path, error) from error
        self._lines.append(line)
        self._size += len(data)


@contextmanager
def journal(folder: Path, facts: dict[str, Any]) -> Iterator[Journal]:
    """Hold an audit's folder, and go on where an audit of the same facts was cut off.

    Args:
        folder: `audit_folder(run)`; made with mode 0700.
        facts: plain JSON values that decide what the audit does; others start it anew.

    Raises:
        BudgetError: another process audits this run.
        UsageError: the disk refuses.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / WORLDS).mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder / ".audit.lock", os.O_RDWR | os.O_CREAT, _MODE)
    except OSError as error:
        raise storage_error(folder, error) from error
    try:
        _hold(descriptor)
        sweep(folder)
        made = Journal(folder, facts)
        made.begin()
        yield made
    finally:
        os.close(descriptor)


def _hold(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BudgetError(
            "another process audits this run",
            hint="wait until it ends, then type the same command again",
        ) from None


def read_transcript(folder: Path) -> list[Line]:
    """The lines of an audit's transcript, every hash checked.

    Raises:
        UsageError: there is none.
        ReplayError: a line does not hold.
    """
    path = folder / TRANSCRIPT
    if not path.is_file():
        raise UsageError("there is no audit of this run yet", hint="dpsynth audit RUN")
    return _parsed(path.read_bytes())


def _parsed(data: bytes) -> list[Line]:
    """Whole lines; a torn tail is left out. Raises ReplayError where a line does not hold."""
    lines: list[Line] = []
    for number, raw in enumerate(data.split(b"\n")[:-1], start=1):
        head = str(lines[-1]["hash"]) if lines else GENESIS
        try:
            line = json.loads(raw)
            fields = {k: v for k, v in line.items() if k not in {"line", "kind", "prev", "hash"}}
            holds = line == seal(number, str(line["kind"]), fields, head)
        except (ValueError, KeyError, AttributeError, RecursionError):
            holds = False
        if not holds:
            raise ReplayError(
                f"the audit's transcript does not hold at line {number}",
                hint="dpsynth audit RUN starts it anew",
            )
        lines.append(line)
    return lines
