"""Commands that several processes may carry out together, started by torchrun."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dpsynth.commands import _options as opt

if TYPE_CHECKING:
    from dpsynth.distributed.ranks import Ranks
    from dpsynth.planning.verify import VerifiedPlan


@contextmanager
def ranks_of(threads: int | None) -> Iterator["Ranks"]:
    """The processes of this command line; inside, the main one alone speaks."""
    opt.use_threads(threads)
    from dpsynth.distributed.joining import joined

    with joined() as ranks:
        yield ranks


def verified_on(ranks: "Ranks", run: Path, private: Path | None = None) -> "VerifiedPlan":
    """The verified plan in every process; all must see the same run folder.

    One lock may lie in several folders (copied, on machines that share no disk): each could be
    spent by another main process. So the transcripts and public calibrations must agree as well.
    The main process is first: what there is to list in the ledger is then listed already.

    Raises:
        RankError: the processes see different folders; nothing is charged.
    """
    from dpsynth.artifacts.files import sha256_file
    from dpsynth.artifacts.spending import read_state
    from dpsynth.planning.verify import load_verified

    verified = ranks.main_first(lambda: load_verified(run, private))
    ranks.require_same("the run's lock", verified.lock.lock_hash)
    if ranks.world > 1:
        head = read_state(verified.run, verified.lock).head
        ranks.require_same("the run's transcript", head)
        path = verified.run.calibration
        ranks.require_same("the public calibration", sha256_file(path) if path.is_file() else "")
    return verified
