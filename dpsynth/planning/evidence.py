"""What an auditor was handed: a transcript, and beside it a lock and a manifest if there are.

Everything here is checked for being unaltered; `replay` then checks what it amounts to.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from dpsynth.artifacts.adapter import DIFFUSERS, PEFT
from dpsynth.artifacts.adapter import FOLDER as ADAPTER
from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.lock import Lock, read_lock
from dpsynth.artifacts.manifest import NAME as MANIFEST
from dpsynth.artifacts.manifest import check_manifest
from dpsynth.artifacts.rooms import LOCK_NAME, TRANSCRIPT_NAME, RunDir
from dpsynth.artifacts.settled import (
    DERIVED,
    FOLLOWS,
    MODEL,
    charged_calibrations,
    made_files,
    settled_files,
)
from dpsynth.artifacts.transcript import Line, Transcript, read_transcript
from dpsynth.errors import MissingError, ReplayError, UsageError
from dpsynth.planning.candidates import is_allocated

_NAMED = (
    "geometry", "within", "projection", "features", "feature-map", "vote-features", "tokenizer",
    "transformer",
)  # fmt: skip
"""Public files that a calibration may name: NAME.safetensors by its key NAME_sha256."""
_ARRAYS = {".safetensors", ".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
"""How files of weights end; pickled ones are never part of a hand-out."""


@dataclass(frozen=True)
class Evidence:
    """Unaltered lines, starting with `open`. `head_checked` says against what, or is None."""

    target: str
    lines: tuple[Line, ...]
    head: str
    head_checked: str | None
    lock: Lock | None
    stated_epsilon: float | None
    notes: tuple[str, ...]

    @property
    def closed(self) -> bool:
        """Whether the last line is `close`."""
        return bool(self.lines[-1]["kind"] == "close")


def gather(target: Path, *, head: str | None, partial: bool) -> Evidence:
    """Read a transcript file, a run folder or a hand-out folder, and check each file alone.

    Raises MissingError when `target` is not there, ReplayError when anything was altered.
    UsageError for a zip.
    """
    if not target.exists():
        raise MissingError(f"{target} does not exist", hint="dpsynth replay RUN")
    if target.is_dir() and not (target / TRANSCRIPT_NAME).is_file():
        raise MissingError(
            f"{target} holds no {TRANSCRIPT_NAME}: nothing was spent, it is no run folder, or a "
            "released/ that was not handed out yet",
            hint="dpsynth sample RUN makes released/ whole; dpsynth replay RUN looks at the run",
        )
    if is_zipfile(target):
        raise UsageError(
            f"{target} is a zip, and replay reads a folder",
            hint="unpack it, then dpsynth replay FOLDER",
        )
    folder = target if target.is_dir() else target.parent
    path = folder / TRANSCRIPT_NAME if target.is_dir() else target
    transcript = read_transcript(path)
    notes = _state_notes(transcript, partial)
    lock = _lock_beside(folder, required=target.is_dir())
    if lock is None:
        notes.append(f"lock not checked: no {LOCK_NAME} beside the transcript")
    manifest = _manifest(target, folder, notes)
    checked = _check_head(transcript, head, manifest, notes, grown=_is_run(folder))
    if target.is_dir():
        notes += _check_files(folder, transcript)
        _check_buckets(folder, lock)
    stated = manifest.get("epsilon") if manifest and checked else None
    if stated is not None and not isinstance(stated, int | float):
        raise ReplayError(f"{MANIFEST} states no number as its epsilon")
    if manifest and manifest["head"] != transcript.head:
        stated = None  # it was stated for an earlier state of the run
    return Evidence(
        str(target), transcript.lines, transcript.head, checked, lock, stated, tuple(notes)
    )


def _state_notes(transcript: Transcript, partial: bool) -> list[str]:
    """Notes on how the transcript ends. ReplayError where `--partial` is needed and absent."""
    if not transcript.lines:
        raise ReplayError("the transcript has no whole line: nothing was spent yet")
    notes = []
    if transcript.torn or transcript.unended:
        notes.append("the last line is torn: a crash while it was written; it charged nothing")
    if transcript.unended:
        notes[-1] = "the last line lacks its end: a crash while it was written; it is counted"
    if transcript.lines[-1]["kind"] != "close":
        notes.append("the transcript is not closed: more may be spent")
    if notes and not partial:
        raise ReplayError(
            notes[0],
            hint="dpsynth close RUN ends it; dpsynth replay --partial takes it as it is",
        )
    return notes


def _lock_beside(folder: Path, *, required: bool) -> Lock | None:
    path = folder / LOCK_NAME
    if path.is_file():
        return read_lock(path)
    if required:
        raise ReplayError(f"no {LOCK_NAME} beside the transcript", hint="ask for a whole copy")
    return None


def _is_run(folder: Path) -> bool:
    return not (folder / MANIFEST).is_file()


def _manifest(target: Path, folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """The hand-out's manifest: of the folder itself, or of the run's `released/`.

    A hand-out must match its manifest. In a run, `released/` may be in the middle of a
    refresh that a crash ended; that says nothing about what was spent, and is noted.
    """
    if not _is_run(folder):
        return check_manifest(folder)
    released = RunDir(folder).released
    if not (target.is_dir() and (released / MANIFEST).is_file()):
        if (folder / "card.md").is_file():
            raise ReplayError(
                f"{MANIFEST} is missing: no file of this hand-out can be checked",
                hint="ask the custodian for a whole copy",
            )
        return None
    try:
        return check_manifest(released)
    except ReplayError as error:
        notes.append(
            f"released/ is not to be handed out as it is ({error.message}): "
            "refresh it with `dpsynth close RUN`"
        )
        return None


def _check_head(
    transcript: Transcript,
    head: str | None,
    manifest: dict[str, Any] | None,
    notes: list[str],
    *,
    grown: bool,
) -> str | None:
    """What the last line's hash was compared with; None if with nothing.

    `grown`: a run may have gone on since its hand-out; the manifest's head must then be the
    hash of an earlier line.
    """
    if head is not None and head.strip().lower() != transcript.head:
        raise ReplayError(
            f"the head is {transcript.head}, and --head says {head}",
            hint="the transcript is not the one whose head was published",
        )
    if manifest is not None and manifest["head"] != transcript.head:
        if not grown or manifest["head"] not in {line["hash"] for line in transcript.lines}:
            raise ReplayError(f"the transcript's head is not the one in {MANIFEST}")
        notes.append("released/ is older than the transcript: refresh it with `dpsynth close RUN`")
        manifest = None
    if head is not None:
        return "--head"
    return MANIFEST if manifest is not None else None


def _check_files(folder: Path, transcript: Transcript) -> list[str]:
    """Files that lines name by hash are those files: the calibration, every released round.

    Returns notes on what could not be compared: files never settled, settled files not there.
    """
    _check_calibration(folder, transcript)
    handed = not _is_run(folder)
    released = folder if handed else RunDir(folder).released
    settled = settled_files(transcript.lines)
    closed = transcript.lines[-1]["kind"] == "close"
    notes = [_check_made(path, settled.get(path.name), closed) for path in made_files(released)]
    if handed:
        _refuse_unknown(released)
        _refuse_unpaid(released, settled)
        gone = sorted(n for n, known in settled.items() if known and not (released / n).is_file())
        notes += [f"{name} was settled, and is not in this hand-out" for name in gone]
    return [note for note in notes if note]


def _check_made(path: Path, digests: set[str] | None, closed: bool) -> str:
    """Compare one made file with what settled it; a note where nothing did, else empty.

    `digests`: None where no charge paid for the file, none of them while it is unsettled.
    """
    if digests is None:
        raise ReplayError(
            f"{path.name} is there, and the transcript holds no charge that paid for it",
            hint="it comes from another transcript: ask for that one",
        )
    if path.name == MODEL:
        return ""
    if not digests and closed:
        raise ReplayError(
            f"{path.name} is there, and its charge never settled in this closed transcript",
            hint="the release was lost to a crash: what lies there is not to be used",
        )
    if not digests:  # a crash may have come between the file and its line
        return f"{path.name} was charged and never settled: not checked"
    if sha256_file(path) not in digests:
        raise ReplayError(f"{path.name} is not what the transcript settled")
    return ""


def _refuse_unknown(handed: Path) -> None:
    """Arrays of a hand-out are rounds, the model, or known to be made from them or in public."""
    known = {*DERIVED, *(path.name for path in made_files(handed))}
    for path in sorted(handed.rglob("*")):
        name = path.relative_to(handed).as_posix()
        if path.suffix.lower() in _ARRAYS and name not in known:
            raise ReplayError(
                f"{name} is no file of a hand-out: nothing says what it was made from",
                hint="ask the custodian for a whole copy",
            )


def _refuse_unpaid(handed: Path, settled: dict[str, set[str]]) -> None:
    """What is made of releases, or of the trained model, is there with what it is made of."""
    for name, source in FOLLOWS.items():
        if (handed / name).is_file() and not settled.get(source):
            raise ReplayError(
                f"{name} is made of {source}, which no charge of this transcript settled",
                hint="it comes from another transcript: ask for that one",
            )
    adapter = [name for name in (PEFT, DIFFUSERS) if (handed / ADAPTER / name).is_file()]
    if adapter and not (MODEL in settled and (handed / MODEL).is_file()):
        raise ReplayError(
            f"{ADAPTER}/{adapter[0]} is there without the {MODEL} that it is made of",
            hint="ask the custodian for a whole copy",
        )


def _check_calibration(folder: Path, transcript: Transcript) -> None:
    path = RunDir(folder).calibration
    named = charged_calibrations(transcript.lines)
    if not (path.is_file() and named):
        return
    if sha256_file(path) not in named:
        raise ReplayError(
            "public/calibration.json is not the one that the charges name",
            hint="restore it: the released values are scaled by it",
        )
    _check_named(path)


def _check_buckets(folder: Path, lock: Lock | None) -> None:
    """Clips by time bucket are what the planner makes of the public profile, where it is there.

    Their cost was composed whatever they are; this tells that they were chosen as the docs say.
    """
    path = RunDir(folder).calibration
    if lock is None or lock.allocation is None or lock.provisional or not path.is_file():
        return
    if not is_allocated(RunDir(folder), lock):
        raise ReplayError(
            "the lock's clips by time bucket do not follow from public/calibration.json",
            hint="restore it: the buckets were shaped by its profile",
        )


def _check_named(calibration: Path) -> None:
    """Public files that the calibration names by hash are those beside it, where they are."""
    try:
        facts = read_json(calibration)
    except UsageError as error:
        raise ReplayError(error.message) from error
    for key in _NAMED:
        path, wanted = calibration.parent / f"{key}.safetensors", facts.get(f"{key}_sha256")
        if wanted is not None and path.is_file() and sha256_file(path) != wanted:
            raise ReplayError(
                f"public/{path.name} is not the one that public/calibration.json names",
                hint="restore it: codes and estimates rest on it",
            )
