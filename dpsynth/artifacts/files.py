"""Plain files that are either wholly there or not there at all, and JSON with one spelling.

Every artifact is written beside its place, flushed, and renamed into it: a crash at any
moment leaves the old file or the new one. A leftover temporary file is hidden, ends in
`.tmp`, is never read, and is removed by `sweep`.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpsynth.artifacts.failpoints import reach
from dpsynth.errors import DpsynthError, MissingError, UsageError, typed

_BLOCK = 1 << 20
_COMPACT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_SPACED = json.JSONEncoder(sort_keys=True, allow_nan=False)


def canonical_json(obj: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII, no NaN.

    >>> canonical_json({"b": 1e-5, "a": [True, None]})
    b'{"a":[true,null],"b":1e-05}'
    """
    return _COMPACT.encode(obj).encode()


def readable_json(obj: dict[str, Any]) -> bytes:
    """A JSON object for people: one key a line, and one list item a line; one spelling too."""
    rows = [f"{json.dumps(key)}: {_value(obj[key])}" for key in sorted(obj)]
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode() if rows else b"{}\n"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple) and value and all(isinstance(v, dict) for v in value):
        return "[\n" + ",\n".join("  " + _one_line(item) for item in value) + "\n]"
    return _one_line(value)


def _one_line(value: Any) -> str:
    return _SPACED.encode(value)


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def again(path: Path) -> str:
    """The command that makes a file of a run's public room; empty for any other file."""
    room = path.absolute().parent
    inside = room.name == "public" and (room.parent / "plan.lock.json").is_file()
    handed = room.parent.name == "released"
    return typed("dpsynth", "pretrain", path.parent.parent) if inside and not handed else ""


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises MissingError when there is none."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except FileNotFoundError:
        raise MissingError(
            f"{path.name} is missing from {path.parent.name}/", hint=again(path)
        ) from None
    return digest.hexdigest()


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Files and folders that are made inside the block are for their owner alone.

    The mask is the process's: no other thread may make files for others meanwhile.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def storage_error(path: Path, error: OSError) -> DpsynthError:
    """What to raise when the disk refuses a write to `path`."""
    reason = error.strerror or "the file system refused"
    return UsageError(
        f"cannot write {path.name} in {path.parent.name}/: {reason}",
        hint="free some space or make the folder writable, then run the same command again",
    )


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte (a single `os.write` may write fewer)."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_folder(folder: Path) -> None:
    """Make names created or renamed in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Put `data` at `path`, wholly or not at all. `mode` is narrowed by the umask.

    Raises UsageError when the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(temporary, data, mode)
        reach("artifact:written")
        temporary.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise storage_error(path, error) from error
    reach("artifact:renamed")


def write_changed(path: Path, data: bytes) -> None:
    """`write_atomic`, unless the file holds these very bytes already."""
    if not path.exists() or path.read_bytes() != data:
        write_atomic(path, data)


def _write_synced(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, obj: dict[str, Any], *, mode: int = 0o666) -> None:
    """Write a JSON object atomically, in the spelling of `readable_json`."""
    write_atomic(path, readable_json(obj), mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. MissingError when there is no file, UsageError when it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise MissingError(
            f"{path.name} is missing from {path.parent.name}/", hint=again(path)
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path.name}: {error.strerror}") from error
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(
            f"{path.name} in {path.parent.name}/ is damaged: expected a JSON object",
            hint=again(path) or "run again the step that wrote it",
        )
    return value


def sweep(folder: Path) -> None:
    """Remove temporary files that dead processes left anywhere under `folder`."""
    for leftover in folder.rglob(".*.tmp"):
        owner = leftover.name.rsplit(".", 2)[-2]
        if owner.isdigit() and not _alive(int(owner)):
            with contextlib.suppress(OSError):
                leftover.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
