"""`dpsynth evolve`: spend the plan's votes stage."""

from typing import TYPE_CHECKING

from dpsynth.commands import _options as opt
from dpsynth.commands._release import release

if TYPE_CHECKING:
    from dpsynth.commands._release import Release


def evolve(
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
    """Let the private records vote, with noise, for populations of a public generator.

    Each round is charged once, and the next population follows from its noisy votes. Stopped
    between two rounds it goes on with the next; a round cut off after its charge is spent, and
    needs its spare. Needs `stages.votes` in the plan.

    Example: dpsynth evolve runs/mnist-evolution
    """
    opt.use_machine(device, dtype, offload, batch)

    def stage() -> "Release":
        from dpsynth.private.voting import evolve as library_evolve

        return library_evolve

    release(
        stage,
        run,
        private=private,
        threads=threads,
        workers=workers,
        show_curator=show_curator,
        json=json,
    )
