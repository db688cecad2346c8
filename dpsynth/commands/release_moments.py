"""`dpsynth release-moments`: spend the plan's moments stage."""

from typing import TYPE_CHECKING

from dpsynth.commands import _options as opt
from dpsynth.commands._release import release

if TYPE_CHECKING:
    from dpsynth.commands._release import Release


def release_moments(
    run: opt.Run,
    *,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    offload: opt.Offload = False,
    batch: opt.Batch = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Release noisy class moments of the private images, once; with cells, in rounds.

    Stopped between two rounds it goes on with the next; a round cut off after its charge is spent,
    and needs its spare.

    Example: dpsynth release-moments runs/digits
    """
    opt.use_machine(device, dtype, offload, batch)

    def stage() -> "Release":
        from dpsynth.private.moments import release_moments as library_release

        return library_release

    release(
        stage,
        run,
        private=private,
        threads=threads,
        workers=workers,
        show_curator=show_curator,
        json=json,
    )
