"""`manifest.json`: every file of a hand-out folder with its SHA-256, and the transcript's head."""

import re
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import read_json, sha256_file, sweep, write_json
from dpsynth.artifacts.rooms import TRANSCRIPT_NAME
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import DpsynthError, ReplayError

FORMAT = 1
NAME = "manifest.json"

_HINT = "ask the custodian for a whole copy, or run `dpsynth close RUN` to refresh released/"
_HASH = re.compile(r"[0-9a-f]{64}")


def write_manifest(folder: Path, *, epsilon: float | None = None) -> dict[str, Any]:
    """List a hand-out folder in its `manifest.json`, and return what was written.

    `epsilon`: the composed value that the card states. Raises ReplayError for a symlink:
    what it points to could change after the listing, or lie outside.
    """
    sweep(folder)
    manifest = {
        "format": FORMAT,
        "files": {name: sha256_file(folder / name) for name in _listed(folder)},
        "head": read_transcript(folder / TRANSCRIPT_NAME).head,
        "epsilon": epsilon,
    }
    write_json(folder / NAME, manifest)
    return manifest


def check_manifest(folder: Path) -> dict[str, Any]:
    """Check every file of a hand-out folder against its manifest, and return the manifest.

    Raises ReplayError for a changed, missing or extra file, a symlink, or no manifest.
    """
    manifest = _read(folder)
    said, found = manifest["files"], set(_listed(folder))
    _none(sorted(set(said) - found), "missing from the hand-out")
    _none(sorted(found - set(said)), "not in the manifest")
    changed = [name for name in sorted(found) if sha256_file(folder / name) != said[name]]
    _none(changed, "not what the manifest says")
    return manifest


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
        if path.is_file() and name != NAME:
            names.append(name)
    return sorted(names)
