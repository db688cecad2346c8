"""Making `released/` whole: copies of lock, transcript and public files, the card, the manifest.

Afterwards `dpsynth replay released/` needs nothing else. Every step may call it again: files that
did not change are left alone, and the manifest, which vouches for all others, comes last.
"""

import re
from pathlib import Path
from typing import Any

from dpsynth.artifacts.adapter import FILES as ADAPTER_FILES
from dpsynth.artifacts.adapter import FOLDER as ADAPTER_FOLDER
from dpsynth.artifacts.adapter import write_adapter
from dpsynth.artifacts.files import read_json, sha256_file, write_changed
from dpsynth.artifacts.lock import Lock, read_lock
from dpsynth.artifacts.manifest import write_manifest
from dpsynth.artifacts.nonprivate import stamped
from dpsynth.artifacts.rooms import LOCK_NAME, TRANSCRIPT_NAME, RunDir
from dpsynth.artifacts.samples import content_digest, read_summary
from dpsynth.artifacts.settled import (
    MODEL,
    made_files,
    require_calibration,
    require_grown,
    require_settled,
)
from dpsynth.artifacts.transcript import parse_transcript, read_transcript
from dpsynth.console import note
from dpsynth.errors import DataError, MissingError, ReplayError, typed
from dpsynth.planning.frozen import KIND as FROZEN
from dpsynth.released.card import build_card, spent
from dpsynth.released.card_contents import FILES
from dpsynth.released.card_page import NAME as CARD_PAGE
from dpsynth.released.card_page import build_card_page
from dpsynth.released.scores import refresh_scores

PUBLIC_FILES = (
    "geometry.safetensors",
    "within.safetensors",
    "projection.safetensors",
    "features.safetensors",
    "tokenizer.safetensors",
    "transformer.safetensors",
    "feature-map.safetensors",
    "vote-features.safetensors",
    "calibration.json",
)
"""What a recipient needs to turn codes or tokens into images, and to complete coarse ones; written
by `pretrain` from public data."""
_FOLDER = re.compile("(samples|coarse)[a-z-]*")


def hand_out(run: RunDir) -> dict[str, Any]:
    """Bring `released/` up to date with the run, and say what it holds.

    Raises:
        MissingError: nothing was planned or spent yet.
        ReplayError: lock or transcript do not hold, a round's file was never settled, or a symlink
            or an image of a reference lies in `released/`.
        DataError: a summary of samples was damaged.
        BudgetError: the transcript is not the one that `released/` comes from.
    """
    _require_plain(run.released)
    lock = read_lock(run.lock)
    whole = read_transcript(run.transcript).whole_bytes
    require_grown(run)
    require_settled(run, [path.name for path in made_files(run.released)])
    # A line that another process is writing this moment is not handed out: whole lines alone.
    data = run.transcript.read_bytes()[:whole]
    transcript = parse_transcript(data)
    folder = run.released
    write_changed(folder / LOCK_NAME, run.lock.read_bytes())
    write_changed(folder / TRANSCRIPT_NAME, data)
    _require_public(run)
    for name in PUBLIC_FILES:
        if (run.public / name).exists():
            write_changed(folder / "public" / name, (run.public / name).read_bytes())
    _renew_adapter(folder, lock)
    evaluation = _evaluation(run, lock)
    _drop_stale(folder)
    files = [name for name in FILES if (folder / name).exists()]
    told = (lock, transcript, _samples(folder), files, evaluation)
    write_changed(folder / "card.md", build_card(*told).encode())
    write_changed(folder / CARD_PAGE, build_card_page(*told, folder=folder).encode())
    epsilon = spent(lock, transcript)
    write_manifest(folder, epsilon=epsilon)
    return {"released": str(folder), "epsilon": epsilon, "head": transcript.head}


def _require_plain(folder: Path) -> None:
    """Refuse links before anything is made of what they lead to, which may lie outside.

    And what bears the stamp of a reference: the manifest would find an image, not its table alone.
    """
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ReplayError(
                f"{path.relative_to(folder)} in released/ is a symlink: a hand-out holds plain "
                "files",
                hint="remove it, then type the same command again",
            )
    for path in stamped(folder):
        raise ReplayError(
            f"{path.relative_to(folder)} in released/ is of a reference, which is the curator's: "
            "it is not for handing out",
            hint="move it out of released/, then type the same command again",
        )


def _renew_adapter(folder: Path, lock: Lock) -> None:
    """The adapter folder holds the factors of the model beside it, and is nowhere without one.

    Raises ReplayError for one that no model here has made, and for files in it that are not its
    own: whoever loads the folder would take them for what the model made.
    """
    held = (folder / ADAPTER_FOLDER).glob("*")
    for path in sorted(path for path in held if path.name not in ADAPTER_FILES):
        if path.suffix != ".tmp":
            raise ReplayError(
                f"released/{ADAPTER_FOLDER}/{path.name} is no file of an adapter that dpsynth made",
                hint="move it out of released/, then type the same command again",
            )
    frozen = lock.facts["prior"].get("kind") == FROZEN
    if frozen and (folder / MODEL).is_file() and write_adapter(folder / MODEL) is not None:
        return
    if (folder / ADAPTER_FOLDER).exists():
        raise ReplayError(
            f"released/{ADAPTER_FOLDER}/ holds LoRA factors, and there is no {MODEL} that they "
            "come from",
            hint="remove it, then type the same command again",
        )


def _require_public(run: RunDir) -> None:
    """Refuse public files that the charges, or the calibration, name otherwise by hash.

    The copies in `released/` may be the last good ones, of which `pretrain` puts them back.

    Raises ReplayError.
    """
    require_calibration(run)
    facts = read_json(run.calibration) if run.calibration.is_file() else {}
    for path in (run.public / name for name in PUBLIC_FILES):
        wanted = facts.get(f"{path.stem}_sha256")
        if wanted is not None and path.is_file() and sha256_file(path) != wanted:
            raise ReplayError(
                f"public/{path.name} is not the one that public/calibration.json names",
                hint=f"{typed('dpsynth', 'pretrain', run.root)} puts it back",
            )


def _evaluation(run: RunDir, lock: Lock) -> dict[str, Any] | None:
    """The scores of a charged evaluation, and which samples here they are of."""
    found, folder = refresh_scores(run, lock), run.released / "samples"
    if found is None:
        return None
    whole = read_summary(folder) is not None
    same = whole and content_digest(folder) == found["samples"]["sha256"]
    return {**found, "of_samples": folder.name if same else None}


def _drop_stale(folder: Path) -> None:
    """Remove public reports on samples that are no longer there: others were drawn since.

    Told by the images, too: `metadata.csv` is the same for other images of the same labels.
    """
    reports = [folder / "evaluation-public.json", *folder.glob("evaluation-public-*.json")]
    for path in [report for report in reports if report.exists()]:
        measured = read_json(path).get("samples")
        said = measured.get("content_sha256") if isinstance(measured, dict) else None
        try:
            found = content_digest(folder / path.stem.replace("evaluation-public", "samples", 1))
        except (DataError, MissingError):  # there is no whole folder
            found = None
        if found is None or found != said:
            path.with_suffix(".png").unlink(missing_ok=True)
            path.unlink()
            note(f"{path.name} was of other samples, and is removed")


def _samples(folder: Path) -> dict[str, dict[str, Any]]:
    """Summaries of the finished folders of samples, coarse ones too, by name."""
    folders = [path for path in sorted(folder.iterdir()) if _FOLDER.fullmatch(path.name)]
    found = {path.name: read_summary(path) for path in folders}
    return {name: summary for name, summary in found.items() if summary is not None}
