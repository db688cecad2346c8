"""`dpsynth release-embedding`: spend the plan's embedding stage."""

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result


def release_embedding(
    run: opt.Run,
    *,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Release a noisy mean embedding of the private images by class, once.

    Of plans with method merf, hermite or ntk. Cut off after its charge it is spent, and needs its
    spare.

    Example: dpsynth release-embedding runs/digits-merf
    """
    opt.use_workers(workers)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run, private)  # over budget: the data is never opened

        from dpsynth.assess.check import ensure_checked

        ranks.lead(lambda: ensure_checked(verified))
        from dpsynth.private.embedded import spend_embedding

        shown = opt.may_show(verified, show_curator)
        found = spend_embedding(verified, ranks)
        if ranks.is_main:
            result(opt.visible(found, shown), json)
            opt.say_next(verified)
