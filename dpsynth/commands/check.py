"""`dpsynth check`: look at every private record before anything is charged."""

from dpsynth.commands import _options as opt
from dpsynth.console import result


def check(
    run: opt.Run,
    private: opt.PrivatePath = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Validate every private record against the plan; spends nothing.

    Bad records: exit 5. What was found is in the run's curator room.

    Example: dpsynth check runs/digits
    """
    opt.use_workers(workers)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run, private)

    from dpsynth.assess.check import check as library_check

    shown = opt.may_show(verified, show_curator)
    found = opt.findings(library_check(verified), verified.run.curator / "check.json", shown)
    result(found, json)
    opt.say_next(verified)
