"""`dpsynth check`: look at every private record before anything is charged."""

from typing import TYPE_CHECKING

from dpsynth.commands import _options as opt
from dpsynth.console import failure, hint_for, result

if TYPE_CHECKING:
    from dpsynth.errors import DpsynthError
    from dpsynth.planning.verify import VerifiedPlan


def check(
    run: opt.Run,
    private: opt.PrivatePath = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Validate every private record against the plan; spends nothing.

    Bad records: exit 5. Which they are and why is in the run's curator room; --show-curator
    prints it.

    Example: dpsynth check runs/digits
    """
    opt.use_workers(workers)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run, private)

    from dpsynth.assess.check import BadRecordsError
    from dpsynth.assess.check import check as library_check

    shown = opt.may_show(verified, show_curator)
    try:
        checked = library_check(verified)
    except BadRecordsError as error:
        if shown:
            _print_bad(verified, error, json)
        raise
    found = opt.findings(checked, verified.run.curator / "check.json", shown)
    result(found, json)
    opt.say_next(verified)


def _print_bad(verified: "VerifiedPlan", error: "DpsynthError", json: bool) -> None:
    """Print each bad record with its reason, as JSON beside the error."""
    from dpsynth.assess.check import bad_records

    bad = bad_records(verified)
    said = failure(error.message, hint_for(error.hint, opt.Typed.run), error.exit_code)
    where = str(verified.run.curator / "check.json")
    lines = [f"{record['name']}: {record['reason']}" for record in bad]
    result({**said, "findings": len(bad), "where": where, "bad": bad}, json, "\n".join(lines))
