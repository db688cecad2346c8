"""`dpsynth release-embedding`: spend the plan's embedding stage."""

from typing import TYPE_CHECKING

from dpsynth.commands import _options as opt
from dpsynth.commands._release import release

if TYPE_CHECKING:
    from dpsynth.commands._release import Release


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

    def stage() -> "Release":
        from dpsynth.private.embedded import spend_embedding

        return spend_embedding

    release(
        stage,
        run,
        private=private,
        threads=threads,
        workers=workers,
        show_curator=show_curator,
        json=json,
    )
