"""`dpsynth evolve`: spend the plan's votes stage."""

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result


def evolve(
    run: opt.Run,
    *,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Let the private records vote, with noise, for populations of a public generator.

    Each round is charged once, and the next population follows from its noisy votes. Stopped
    between two rounds it goes on with the next; a round cut off after its charge is spent, and
    needs its spare. Needs `stages.votes` in the plan.

    Example: dpsynth evolve runs/mnist-evolution
    """
    opt.use_workers(workers)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run, private)  # over budget: the data is never opened

        from dpsynth.assess.check import ensure_checked

        ranks.lead(lambda: ensure_checked(verified))
        from dpsynth.private.voting import evolve as library_evolve

        shown = opt.may_show(verified, show_curator)
        found = library_evolve(verified, ranks)
        if ranks.is_main:
            result(opt.visible(found, shown), json)
            opt.say_next(verified)
