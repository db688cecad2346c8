"""`dpsynth release-central`: spend the plan's central stage."""

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result


def release_central(
    run: opt.Run,
    *,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Release noisy means of random subsets of the private images, by class, once.

    `dpsynth train` learns them before DP-SGD begins. Needs `stages.central` in the plan.

    Example: dpsynth release-central runs/mnist-central
    """
    opt.use_workers(workers)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run, private)  # over budget: the data is never opened

        from dpsynth.assess.check import ensure_checked

        ranks.lead(lambda: ensure_checked(verified))
        from dpsynth.private.central_stage import release_central_images

        shown = opt.may_show(verified, show_curator)
        found = release_central_images(verified, ranks)
        if ranks.is_main:
            result(opt.visible(found, shown), json)
            opt.say_next(verified)
