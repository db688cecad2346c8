"""`dpsynth release-moments`: spend the plan's moments stage."""

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result


def release_moments(
    run: opt.Run,
    *,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Release noisy class moments of the private images, once; with cells, in rounds.

    Stopped between two rounds it goes on with the next; a round cut off after its charge is spent,
    and needs its spare.

    Example: dpsynth release-moments runs/digits
    """
    opt.use_workers(workers)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run, private)  # over budget: the data is never opened

        from dpsynth.assess.check import ensure_checked

        ranks.lead(lambda: ensure_checked(verified))
        from dpsynth.private.moments import release_moments as library_release

        shown = opt.may_show(verified, show_curator)
        found = library_release(verified, ranks)
        if ranks.is_main:
            result(opt.visible(found, shown), json)
            opt.say_next(verified)
