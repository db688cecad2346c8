"""What the commands that release something have in common, in one process or several."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result

if TYPE_CHECKING:
    from dpsynth.distributed.ranks import Ranks
    from dpsynth.planning.verify import VerifiedPlan

    Release = Callable[[VerifiedPlan, Ranks], dict[str, Any]]


def release(
    stage: "Callable[[], Release]",
    run: Path,
    *,
    private: Path | None,
    threads: int | None,
    workers: int | None,
    show_curator: bool,
    json: bool,
) -> None:
    """Verify the run, check the records, spend a stage, and say what was released.

    stage: gives the library's function; asked once torch may be loaded.
    """
    opt.use_workers(workers)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run, private)  # over budget: the data is never opened

        from dpsynth.assess.check import ensure_checked

        ranks.lead(lambda: ensure_checked(verified))
        shown = opt.may_show(verified, show_curator)
        found = stage()(verified, ranks)
        if ranks.is_main:
            result(opt.visible(found, shown), json)
            opt.say_next(verified)
