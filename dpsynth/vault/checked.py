"""Whether the private records were validated, as they lie now, before the first charge."""

import hashlib
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import canonical_json, read_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import read_state
from dpsynth.errors import DataError, MissingError, UsageError, typed
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.vault import open_private

FORMAT = "dpsynth-check-1"


def report_path(run: RunDir) -> Path:
    """Where `dpsynth check` writes; curator room."""
    return run.curator / "check.json"


def fingerprint(verified: VerifiedPlan) -> str:
    """A cheap hash of what was checked: the declarations, and each file's path, size and time.

    It is made of private paths, so it stays in the curator room.
    """
    private = verified.plan.private
    rows = []
    for source in open_private(verified).sources:
        for path in source.files():
            try:
                state = path.lstat()
            except OSError:
                rows.append([str(path), -1, -1])
            else:
                rows.append([str(path), state.st_size, state.st_mtime_ns])
    declared = _said(private.model_dump(mode="json"))
    if verified.plan.budget.column is not None:
        declared["unit"] = verified.plan.budget.column.model_dump(mode="json")
    return hashlib.sha256(canonical_json({"declared": declared, "files": rows})).hexdigest()


def _said(declared: Any) -> Any:
    """Declarations without captions where there are none: reports of older versions still hold."""
    if not isinstance(declared, dict):
        return declared
    kept = {key: _said(value) for key, value in declared.items()}
    return {key: value for key, value in kept.items() if (key, value) != ("captions", None)}


def require_checked(verified: VerifiedPlan) -> None:
    """Refuse to spend before the records were found to fit the plan.

    After the first charge nothing is asked any more: a bad record then contributes zero, and
    whether a stage runs must not hang on the data.

    Raises:
        UsageError: never checked, or the files changed since.
        DataError: the last check found records that do not fit.
    """
    run = verified.run
    if read_state(run, verified.lock).charged:
        return
    hint = typed("dpsynth", "check", run.root)
    try:
        report = read_json(report_path(run))
    except MissingError:
        raise UsageError("the private records were not checked yet", hint=hint) from None
    if report.get("format") != FORMAT or report.get("fingerprint") != fingerprint(verified):
        raise UsageError("the private files changed since they were checked", hint=hint)
    if report.get("ok") is not True:
        raise DataError(
            "the private records do not fit the plan (names and reasons: curator/check.json)",
            hint=hint,
        )
