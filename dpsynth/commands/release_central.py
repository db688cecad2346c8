"""`dpsynth release-central`: spend the plan's central stage."""

from typing import TYPE_CHECKING

from dpsynth.commands import _options as opt
from dpsynth.commands._release import release

if TYPE_CHECKING:
    from dpsynth.commands._release import Release


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

    def stage() -> "Release":
        from dpsynth.private.central_stage import release_central_images

        return release_central_images

    release(
        stage,
        run,
        private=private,
        threads=threads,
        workers=workers,
        show_curator=show_curator,
        json=json,
    )
