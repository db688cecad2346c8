"""Making `released/` whole: copies of lock, transcript and public files, the card, the manifest.

Afterwards `dpsynth replay released/` needs nothing else. Every step may call it again: files that
did not change are left alone, and the manifest, which vouches for all others, comes last.
"""

from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import write_atomic
from dpsynth.artifacts.lock import Lock, read_lock
from dpsynth.artifacts.manifest import write_manifest
from dpsynth.artifacts.rooms import LOCK_NAME, TRANSCRIPT_NAME, RunDir
from dpsynth.artifacts.samples import content_digest, read_summary
from dpsynth.artifacts.settled import made_files, require_grown, require_settled
from dpsynth.artifacts.transcript import parse_transcript, read_transcript
from dpsynth.released.card import FILES, build_card, spent
from dpsynth.released.card_page import NAME as CARD_PAGE
from dpsynth.released.card_page import build_card_page
from dpsynth.released.scores import refresh_scores

PUBLIC_FILES = (
    "geometry.safetensors",
    "within.safetensors",
    "projection.safetensors",
    "features.safetensors",
    "calibration.json",
)
"""What a recipient needs to turn codes into images; written by `pretrain` from public data."""


def hand_out(run: RunDir) -> dict[str, Any]:
    """Bring `released/` up to date with the run, and say what it holds.

    Raises:
        MissingError: nothing was planned or spent yet.
        ReplayError: lock or transcript do not hold, or a round's file was never settled.
        BudgetError: the transcript is not the one that `released/` comes from.
    """
    lock = read_lock(run.lock)
    whole = read_transcript(run.transcript).whole_bytes
    require_grown(run)
    require_settled(run, [path.name for path in made_files(run.released)])
    # A line that another process is writing this moment is not handed out: whole lines alone.
    data = run.transcript.read_bytes()[:whole]
    transcript = parse_transcript(data)
    folder = run.released
    _put(folder / LOCK_NAME, run.lock.read_bytes())
    _put(folder / TRANSCRIPT_NAME, data)
    for name in PUBLIC_FILES:
        if (run.public / name).exists():
            _put(folder / "public" / name, (run.public / name).read_bytes())
    evaluation = _evaluation(run, lock)
    files = [name for name in FILES if (folder / name).exists()]
    told = (lock, transcript, _samples(folder), files, evaluation)
    _put(folder / "card.md", build_card(*told).encode())
    _put(folder / CARD_PAGE, build_card_page(*told, folder=folder).encode())
    epsilon = spent(lock, transcript)
    write_manifest(folder, epsilon=epsilon)
    return {"released": str(folder), "epsilon": epsilon, "head": transcript.head}


def _put(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        write_atomic(path, data)


def _evaluation(run: RunDir, lock: Lock) -> dict[str, Any] | None:
    """The scores of a charged evaluation, and which samples here they are of."""
    found, folder = refresh_scores(run, lock), run.released / "samples"
    if found is None:
        return None
    whole = read_summary(folder) is not None
    same = whole and content_digest(folder) == found["samples"]["sha256"]
    return {**found, "of_samples": folder.name if same else None}


def _samples(folder: Path) -> dict[str, dict[str, Any]]:
    """Summaries of the finished sample folders, by name."""
    found = {path.name: read_summary(path) for path in sorted(folder.glob("samples*"))}
    return {name: summary for name, summary in found.items() if summary is not None}
