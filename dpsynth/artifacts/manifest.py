"""`manifest.json`: every file of a hand-out folder with its SHA-256, and the transcript's head."""

import hashlib
import re
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import read_json, sha256_file, sweep, write_json
from dpsynth.artifacts.rooms import CURATOR, MANIFEST_NAME, TRANSCRIPT_NAME
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import DpsynthError, ReplayError

FORMAT = 1
NAME = MANIFEST_NAME

_HINT = "ask the custodian for a whole copy, or run `dpsynth close RUN` to refresh released/"
_HASH = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 20
_CURATOR = (b'"room": "curator"', b'"room":"curator"', b"dpsynth\0curator-only")
"""How reports (JSON), arrays (safetensors) and pictures (PNG) say that they are the curator's."""


def write_manifest(folder: Path, *, epsilon: float | None = None) -> dict[str, Any]:
    """List a hand-out folder in its `manifest.json`, and return what was written.

    `epsilon`: the composed value that the card states. Raises ReplayError for a symlink, since
    what it points to could change after the listing, or lie outside; for a file that says of
    itself that it is for the curator alone, whatever its name is; and for one in a curator's room.
    """
    sweep(folder)
    manifest = {
        "format": FORMAT,
        "files": {name: _open_hash(folder, name) for name in _listed(folder)},
        "head": read_transcript(folder / TRANSCRIPT_NAME).head,
        "epsilon": epsilon,
    }
    write_json(folder / NAME, manifest)
    return manifest


def check_manifest(folder: Path) -> dict[str, Any]:
    """Check every file of a hand-out folder against its manifest, and return the manifest.

    Raises ReplayError for a changed, missing or extra file, a symlink, a curator's room in the
    folder, or no manifest.
    """
    manifest = _read(folder)
    said, found = manifest["files"], set(_listed(folder))
    _none(sorted(set(said) - found), "missing from the hand-out")
    _none(sorted(found - set(said)), "not in the manifest")
    changed = [name for name in sorted(found) if sha256_file(folder / name) != said[name]]
    _none(changed, "not what the manifest says")
    return manifest


def _open_hash(folder: Path, name: str) -> str:
    """SHA-256 of a file, in hex, which is read once; refused where it bears a curator's mark."""
    digest, tail = hashlib.sha256(), b""
    with (folder / name).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            piece = tail + block
            if any(mark in piece for mark in _CURATOR):
                raise ReplayError(
                    f"{name} is marked as the curator's: it is not for handing out",
                    hint="move it out of released/, then run the same command again",
                )
            tail = piece[-max(map(len, _CURATOR)) :]
    return digest.hexdigest()


def _none(names: list[str], what: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ReplayError(f"{names[0]}{more}: {what}", hint=_HINT)


def _read(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_json(folder / NAME)
    except DpsynthError as error:
        raise ReplayError(f"{NAME} cannot be read: {error.message}", hint=_HINT) from error
    files = manifest.get("files")
    good = (
        manifest.get("format") == FORMAT
        and isinstance(files, dict)
        and all(isinstance(v, str) and _HASH.fullmatch(v) for v in files.values())
        and isinstance(manifest.get("head"), str)
    )
    if not good:
        raise ReplayError(f"{NAME} is damaged or of another version", hint=_HINT)
    return manifest


def _listed(folder: Path) -> list[str]:
    """Relative POSIX names of all files but the manifest, sorted."""
    names = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise ReplayError(f"{name} is a symlink: a hand-out holds plain files", hint=_HINT)
        if path.is_file() and CURATOR in path.relative_to(folder).parts[:-1]:
            raise ReplayError(
                f"{name} lies in a curator's room: it is not for handing out",
                hint=f"move that {CURATOR}/ out of the hand-out, then run the same command again",
            )
        if path.is_file() and name != NAME:
            names.append(name)
    return sorted(names)
