"""`dpsynth check`: every private record against the plan, before anything is charged."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dpsynth.artifacts.files import read_json, write_json
from dpsynth.console import counted, note, progress
from dpsynth.errors import DataError, UsageError, typed
from dpsynth.planning.schema import HashHeldOut
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.vault import BadRecord, UnreadableSourceError, open_private
from dpsynth.vault.checked import FORMAT, fingerprint, report_path, require_checked

__all__ = ["BadRecordsError", "bad_records", "check", "ensure_checked", "require_checked"]

SIDES = ("train", "held_out")
EVERY = 256


class BadRecordsError(DataError):
    """Records do not fit the plan, or the source cannot be read; the report is written."""


@dataclass
class _Findings:
    """What one pass over the records found. All of it is for the curator room.

    `images`: usable records of each unit by its name, where a column names units.
    """

    classes: dict[str, Counter[int]] = field(default_factory=lambda: {s: Counter() for s in SIDES})
    bad: list[dict[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    images: dict[str, Counter[str]] = field(default_factory=lambda: {s: Counter() for s in SIDES})

    def count(self, side: str) -> int:
        return self.classes[side].total()


def check(verified: VerifiedPlan) -> dict[str, Any]:
    """Validate every record, training and held-out; write `curator/check.json`.

    Returns `findings` (0) and `ignored`, the numbers that a terminal may show, and what only the
    curator may see: `counts` and `classes` of each side of the split, and `notes`; `units` of
    each side too, where a column names them.

    Raises:
        BadRecordsError: records do not fit the plan; how many is told, which and why is in the
            report (`bad_records`).
    """
    verified.run.make_rooms()
    mark = ""
    try:
        # Taken before the pass: a file that changes meanwhile makes the report stale.
        mark = fingerprint(verified)
        findings = _read_all(verified)
    except UnreadableSourceError as error:
        _write(verified, mark, _Findings(bad=[{"name": "(source)", "reason": error.detail}]))
        raise BadRecordsError(
            f"{error.message}; the reason is in curator/check.json",
            hint="mend the files, or the plan's path and shape, then: "
            + typed("dpsynth", "check", verified.run.root),
        ) from None
    report = _write(verified, mark, findings)
    if findings.ignored:
        was = "was" if len(findings.ignored) == 1 else "were"
        note(
            f"{counted(len(findings.ignored), 'hidden or foreign file')} {was} ignored "
            "(names: curator/check.json)"
        )
    if not report["ok"]:
        do = "does" if len(findings.bad) == 1 else "do"
        raise BadRecordsError(
            f"{counted(len(findings.bad), 'record')} {do} not fit the plan "
            "(names and reasons: curator/check.json)",
            hint=_hint(verified),
        )
    keys = ("counts", "classes", "units", "notes")
    return {
        "findings": 0,
        "ignored": len(findings.ignored),
        **{key: report[key] for key in keys if key in report},
    }


def bad_records(verified: VerifiedPlan) -> list[dict[str, str]]:
    """What the last check found wrong, `name` and `reason` of each: for the curator alone."""
    found: list[dict[str, str]] = read_json(report_path(verified.run))["bad"]
    return found


def ensure_checked(verified: VerifiedPlan) -> None:
    """Run `check` unless its last report holds for the files as they are.

    Raises:
        DataError: records do not fit the plan.
    """
    try:
        require_checked(verified)
    except UsageError:
        check(verified)


def _read_all(verified: VerifiedPlan) -> _Findings:
    data, private = open_private(verified), verified.plan.private
    findings = _Findings()
    for source in data.sources:
        findings.ignored += source.ignored()
    # A bar by record would show the true record count: only a public source has one.
    with progress("checking records", private.capacity if private.public else None) as bar:
        for number, (side, item) in enumerate(data.items(), start=1):
            if isinstance(item, BadRecord):
                findings.bad.append({"name": item.name, "reason": item.reason})
            else:
                findings.classes[side][item.label] += 1
                if item.unit:
                    findings.images[side][item.unit] += 1
            if private.public and number % EVERY == 0:
                bar.advance(EVERY)
    if not findings.count("train") and not findings.bad:
        findings.bad.append({"name": "(source)", "reason": "there is no training record"})
    return findings


def _write(verified: VerifiedPlan, mark: str, findings: _Findings) -> dict[str, Any]:
    private = verified.plan.private
    report = {
        "format": FORMAT,
        "room": "curator",
        "ok": not findings.bad,
        "fingerprint": mark,
        "counts": {side: findings.count(side) for side in SIDES},
        "classes": {
            side: {name: findings.classes[side][i] for i, name in enumerate(private.classes)}
            for side in SIDES
        },
        **_units(verified, findings),
        "notes": _notes(verified, findings),
        "bad": findings.bad,
        "ignored": findings.ignored,
    }
    write_json(report_path(verified.run), report, mode=0o600)
    return report


def _units(verified: VerifiedPlan, findings: _Findings) -> dict[str, Any]:
    """How many units each side has, and how many of them more images than count.

    Held-out records of a source of their own are no units: nothing is released of them.
    """
    column = verified.plan.budget.column
    by_hash = isinstance(verified.plan.private.held_out, HashHeldOut)
    if column is None:
        return {}
    return {
        "units": {
            side: {
                "count": len(images),
                "over": sum(number > column.most for number in images.values()),
                "most_images": max(images.values(), default=0),
            }
            for side, images in findings.images.items()
            if by_hash or side == "train"
        }
    }


def _notes(verified: VerifiedPlan, findings: _Findings) -> list[str]:
    """More than the declared N, or than a unit's most images, is a note and nothing else."""
    capacity, column = verified.plan.private.capacity, verified.plan.budget.column
    train, kind = findings.count("train"), "record"
    notes = []
    if column is not None:
        train, kind = len(findings.images["train"]), "unit"
        over = _units(verified, findings)["units"]["train"]["over"]
        if over:
            have = "has" if over == 1 else "have"
            notes.append(
                f"{counted(over, 'training unit')} {have} more than "
                f"{counted(column.most, 'image')}: of each, so many count, those whose content "
                "hashes are smallest"
            )
    if train > capacity:
        notes.append(
            f"{counted(train, f'training {kind}')}, more than the declared capacity {capacity}"
        )
    return notes


def _hint(verified: VerifiedPlan) -> str:
    return "mend or remove them, then: " + typed("dpsynth", "check", verified.run.root)
