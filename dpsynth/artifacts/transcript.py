"""`transcript.jsonl`: what was spent, one canonical JSON line an event, chained by hashes.

Kinds: `open` (first), `charge` (on disk before its mechanism sees data), `settle` (after
the artifact is in place), `close` (last). Each line carries the hash of the line before
and its own: SHA-256 of its canonical JSON without `hash`. There are no timestamps.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import (
    canonical_json,
    fsync_folder,
    sha256_bytes,
    storage_error,
    write_all,
)
from dpsynth.errors import MissingError, ReplayError

FORMAT = 1
GENESIS = "0" * 64

_CHAIN = {"line", "kind", "prev", "hash"}
KEYS: dict[str, set[str]] = {
    "open": {
        "format",
        "run_id",
        "plan_hash",
        "lock_hash",
        "budget",
        "delta_slack",
        "versions",
        "noise_source",
    },
    "charge": {
        "slot",
        "stage",
        "mechanism",
        "statistic",
        "noise_std",
        "rate",
        "steps",
        "noise_source",
        "calibration_hash",
    },
    "settle": {"slot", "sha256"},
    "close": {"charged", "settled", "forfeited"},
}

Line = dict[str, Any]


@dataclass(frozen=True)
class Transcript:
    """Verified lines. `torn`: an unterminated tail follows them (a crash while appending).

    `whole_bytes` is the length of the verified part, in bytes. `unended` marks a last line
    that is complete but for its newline; it is among the lines.
    """

    lines: tuple[Line, ...]
    whole_bytes: int
    torn: bool = False
    unended: bool = False

    @property
    def head(self) -> str:
        """Hash of the last line (zeros when there is none): it stands for all of them."""
        return str(self.lines[-1]["hash"]) if self.lines else GENESIS


def seal(number: int, kind: str, fields: dict[str, Any], prev: str) -> Line:
    """The line `number` of a transcript, with its hash."""
    body = {"line": number, "kind": kind, "prev": prev, **fields}
    return {**body, "hash": sha256_bytes(canonical_json(body))}


def _damaged(number: int, why: str) -> ReplayError:
    return ReplayError(
        f"the transcript does not hold at line {number}: {why}",
        hint="ask for an unedited copy; nothing after this line can be trusted",
    )


def _check_line(raw: bytes, number: int, prev: str) -> Line:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        raise _damaged(number, "it is not JSON") from None
    if not isinstance(line, dict) or not set(line) >= _CHAIN:
        raise _damaged(number, "it is not a transcript line")
    if line["line"] != number:
        raise _damaged(number, "a line was removed, added or moved before it")
    if line["prev"] != prev:
        raise _damaged(number, "it does not follow the line before it")
    said = str(line.pop("hash"))
    try:
        body = canonical_json(line)
    except (ValueError, RecursionError):
        raise _damaged(number, "it holds a value that no transcript holds") from None
    if said != sha256_bytes(body):
        raise _damaged(number, "it was changed after it was written")
    # Sorted keys put `hash` right before `kind`: this is the one way to spell the line.
    if raw.replace(f'"hash":"{said}","kind":'.encode(), b'"kind":', 1) != body:
        raise _damaged(number, "it is not spelt as dpsynth writes it")
    line["hash"] = said
    if set(line) - _CHAIN != KEYS.get(str(line["kind"])):
        raise _damaged(number, "its kind or its keys are unknown to this version")
    return line


def parse_transcript(data: bytes) -> Transcript:
    """Verify every line of a transcript's bytes: spelling, numbering, hashes, order of kinds.

    Raises ReplayError at the first line that does not hold. An unterminated last line that
    is not complete is left out and reported as `torn`.
    """
    *whole, tail = data.split(b"\n")
    lines: list[Line] = []
    prev = GENESIS
    for number, raw in enumerate(whole, start=1):
        lines.append(_check_line(raw, number, prev))
        prev = lines[-1]["hash"]
    size = len(data) - len(tail)
    if not tail:
        return Transcript(checked_order(lines), size)
    if not _is_json(tail):
        return Transcript(checked_order(lines), size, torn=True)
    lines.append(_check_line(tail, len(whole) + 1, prev))
    return Transcript(checked_order(lines), len(data), unended=True)


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def checked_order(lines: Iterable[Line]) -> tuple[Line, ...]:
    """The lines as a tuple, if their kinds come in a possible order.

    One `open` first; each slot charged at most once; a settle after its charge, once;
    nothing after `close`, which counts right. Raises ReplayError otherwise.
    """
    known = tuple(lines)
    charged: set[int] = set()
    settled: set[int] = set()
    for number, line in enumerate(known, start=1):
        kind = line["kind"]
        if (kind == "open") != (number == 1):
            raise _damaged(number, "`open` must be the first line and no other")
        if kind == "open":
            _check_open(line)
        if kind == "charge":
            _once(charged, line["slot"], number, "is charged twice")
        if kind == "settle":
            _once(settled, line["slot"], number, "is settled twice")
            if line["slot"] not in charged:
                raise _damaged(number, f"slot {line['slot']} is settled but was never charged")
            if not re.fullmatch("[0-9a-f]{64}", str(line["sha256"])):
                raise _damaged(number, "it settles with something that is no SHA-256")
        if kind == "close":
            _check_close(line, charged, settled)
            if number != len(known):
                raise _damaged(number + 1, "it comes after `close`")
    return known


def _once(seen: set[int], slot: object, number: int, what: str) -> None:
    if not isinstance(slot, int) or isinstance(slot, bool):
        raise _damaged(number, f"slot {slot!r} is no number")
    if slot in seen:
        raise _damaged(number, f"slot {slot} {what}")
    seen.add(slot)


def _check_open(line: Line) -> None:
    if line["format"] != FORMAT:
        raise _damaged(
            1, f"format {line['format']!r} is unknown; this dpsynth reads format {FORMAT}"
        )


def _check_close(line: Line, charged: set[int], settled: set[int]) -> None:
    if summary(charged, settled) != {key: line[key] for key in KEYS["close"]}:
        raise _damaged(line["line"], "`close` does not count the lines before it")


def summary(charged: set[int], settled: set[int]) -> dict[str, Any]:
    """What a `close` line says: how many slots were charged and settled, which were lost."""
    return {
        "charged": len(charged),
        "settled": len(settled),
        "forfeited": sorted(charged - settled),
    }


def read_transcript(path: Path) -> Transcript:
    """Read and verify a transcript. MissingError when absent, ReplayError when damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise MissingError(
            f"{path.name} is missing from {path.parent.name or path.parent}/: nothing was spent",
            hint="dpsynth status RUN",
        ) from None
    except OSError as error:
        raise ReplayError(f"cannot read {path.name}: {error.strerror}") from error
    return parse_transcript(data)


class Appender:
    """Appends lines to one transcript, each flushed to disk before `append` returns.

    Only `spending` makes one, under the run's file lock. After a failed append it refuses
    all further ones, since the state of the disk is unknown.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, verify it, and repair a tail that a crash tore.

        The tail is cut off only if it is unterminated and no JSON: the data is touched
        only once a whole line is on disk, so such a line charged nothing.
        """
        self._path = path
        self._broken = False
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise storage_error(path, error) from error
        try:
            self._known = self._repaired()
        except OSError as error:
            self.close()
            raise storage_error(path, error) from error
        except BaseException:
            self.close()
            raise

    def _repaired(self) -> Transcript:
        known = parse_transcript(self._path.read_bytes())
        if known.torn:
            os.ftruncate(self._descriptor, known.whole_bytes)
        if known.unended:
            write_all(self._descriptor, b"\n")
        os.fsync(self._descriptor)
        fsync_folder(self._path.parent)
        self._count, self._head = len(known.lines), known.head
        return known

    @property
    def known(self) -> Transcript:
        """The lines found on opening."""
        return self._known

    @property
    def head(self) -> str:
        """Hash of the last line written or found."""
        return self._head

    def append(self, kind: str, fields: dict[str, Any]) -> Line:
        """Add one line and flush it. Raises UsageError when the disk refuses."""
        if self._broken:
            raise ReplayError(
                "an earlier line could not be written", hint="run the same command again"
            )
        line = seal(self._count + 1, kind, fields, self._head)
        before = os.fstat(self._descriptor).st_size
        self._broken = True
        try:
            write_all(self._descriptor, canonical_json(line) + b"\n")
            os.fsync(self._descriptor)
        except OSError as error:
            self._undo(before)
            raise storage_error(self._path, error) from error
        self._broken = False
        self._count, self._head = self._count + 1, line["hash"]
        return line

    def _undo(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
            os.fsync(self._descriptor)
        except OSError:
            return  # the next opening repairs the tail, or counts the line as spent

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)
