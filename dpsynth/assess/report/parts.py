"""What the curator's page shows, part by part; a part that is not there yet says what to type."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import content_digest
from dpsynth.assess.report.audits import Audit, audit
from dpsynth.assess.report.measures import Measures, measures, name_of
from dpsynth.errors import DpsynthError
from dpsynth.released.page.pictures import png_file
from dpsynth.released.page.render import number
from dpsynth.released.scores import made_scores

AUDITS = {
    "audit": "With the private records (curator/audit)",
    "audit-public-data": "With public images in their place (curator/audit-public-data)",
}
"""Folders of the curator's room, and what the page calls each audit."""


@dataclass(frozen=True)
class Picture:
    """A picture of the curator's room as a `data:` address."""

    source: str
    text: str
    caption: str


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: `name` of the samples, its tables, its pictures, and remarks on it."""

    name: str
    measured: Measures
    pictures: tuple[Picture, ...] = ()
    protocol: tuple[tuple[str, str], ...] = ()
    stale: bool = False
    damaged: str = ""


@dataclass(frozen=True)
class Audited:
    """An audit with its pictures; `name` says of which records; `damaged` why it cannot be read."""

    name: str
    found: Audit | None = None
    pictures: tuple[Picture, ...] = ()
    damaged: str = ""


def evaluations(run: RunDir) -> list[Evaluated]:
    """The evaluations in the curator's room, the plan's own samples first."""
    paths = sorted(run.curator.glob("evaluation*.json"), key=lambda path: path.stem)
    return [_evaluated(run, path) for path in paths if path.is_file()]


def audits(run: RunDir) -> list[Audited]:
    """The audits of a run's plan: with its private records, and with public ones in their place."""
    paths = {run.curator / folder / "audit.json": name for folder, name in AUDITS.items()}
    found = [_audited(run, path, name) for path, name in paths.items()]
    return [one for one in found if one is not None]


def _audited(run: RunDir, path: Path, name: str) -> Audited | None:
    if not path.is_file():
        return None
    try:
        report = read_json(path)
    except DpsynthError:
        return Audited(name, damaged=f"{path.name} is damaged and cannot be read.")
    names = [path.parent / "audit.png", *_named(run, measures(report).pictures)]
    return Audited(name, audit(report), tuple(_pictures(names, name)))


def charged_scores(run: RunDir, lock: Lock) -> dict[str, Any] | None:
    """The scores of a charged evaluation as `build_card` takes them; None where there are none."""
    samples = run.released / "samples"
    try:
        found = made_scores(run.released, lock)
        same = content_digest(samples) == found["samples"]["sha256"] if samples.is_dir() else False
    except DpsynthError:
        return None
    return {**found, "of_samples": samples.name if same else None}


def _evaluated(run: RunDir, path: Path) -> Evaluated:
    suffix = path.stem.removeprefix("evaluation")
    name = f"samples{suffix}"
    try:
        report = read_json(path)
    except DpsynthError:
        return Evaluated(name, Measures(), damaged=f"{path.name} is damaged and cannot be read.")
    measured = measures(report)
    names = [path.with_suffix(".png"), *_named(run, measured.pictures)]
    return Evaluated(
        name,
        measured,
        tuple(_pictures(names, name)),
        (*_protocol(report), *measured.methods),
        _is_stale(report, run.released / name / "metadata.csv"),
    )


def _protocol(report: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    said = report.get("protocol")
    rows = said.items() if isinstance(said, dict) else ()
    return tuple((name_of(str(key)), number(value)) for key, value in rows)


def _is_stale(report: dict[str, Any], metadata: Path) -> bool:
    """Whether the samples have changed since they were measured."""
    samples = report.get("samples")
    digest = samples.get("metadata_sha256") if isinstance(samples, dict) else None
    return digest is not None and (not metadata.is_file() or sha256_file(metadata) != digest)


def _named(run: RunDir, names: Iterable[str]) -> list[Path]:
    """Pictures that a report names, as files of the curator's room: nothing else is opened."""
    room = run.curator.resolve()
    found = []
    for name in names:
        # A run may have been moved since: what it wrote then lies at the same place in its room.
        parts = Path(name).parts
        inside = parts[parts.index(run.curator.name) + 1 :] if run.curator.name in parts else parts
        path = run.curator.joinpath(*inside)
        if path.resolve().is_relative_to(room):
            found.append(path)
    return found


def _pictures(paths: Iterable[Path], what: str) -> Iterable[Picture]:
    for path in dict.fromkeys(path.resolve() for path in paths):
        source = png_file(path)
        if source is not None:
            text = _CAPTIONS.get(path.stem, path.stem.replace("-", " ").replace("_", " "))
            yield Picture(source, f"{what}: {text}", f"{text} (curator/…/{path.name})")


_CAPTIONS = {
    "evaluation": "synthetic images beside real, held-out ones, by class",
    "evaluation-plain": "synthetic images without augmentation beside real ones",
    "audit": "what the attacks saw",
    "copies": "synthetic images beside their nearest private records",
}
