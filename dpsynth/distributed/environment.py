"""What torchrun says in the environment: which process this is, and where the others meet.

No torch here: commands that never leave one process read it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dpsynth.errors import UsageError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HOW = "torchrun --nproc-per-node N -m dpsynth ..."


@dataclass(frozen=True)
class Place:
    """One process among `world`: `rank` from 0, of which `local_world` run on this machine."""

    rank: int
    world: int
    address: str
    port: int
    local_rank: int = 0
    local_world: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that spends, writes and speaks."""
        return self.rank == 0


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun gives a process, or None for a process on its own.

    >>> place_in({}) is None
    True
    >>> given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    >>> place_in(given).is_main
    False

    Raises:
        UsageError: only some of the four variables are set, or one holds no possible value.
    """
    present = [name for name in NAMES if environment.get(name)]
    if not present:
        return None
    missing = [name for name in NAMES if name not in present]
    if missing:
        raise UsageError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}: "
            "expected all four, or none",
            hint=f"{HOW}   or, for one process: unset {' '.join(present)}",
        )
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE", least=1)
    local_rank = _number(environment, "LOCAL_RANK", default=0)
    local_world = _number(environment, "LOCAL_WORLD_SIZE", default=1, least=1)
    port = _number(environment, "MASTER_PORT", least=1)
    if rank >= world or local_rank >= local_world or local_world > world or port >= 2**16:
        raise UsageError(
            f"the environment names process {rank} of {world} (on this machine {local_rank} of "
            f"{local_world}) and port {port}: expected ranks from 0 below their number, and a "
            "port below 65536",
            hint=HOW,
        )
    return Place(rank, world, environment["MASTER_ADDR"], port, local_rank, local_world)


def _number(
    environment: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0
) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise UsageError(
            f"the environment sets {name}={text}, expected a whole number from {least}", hint=HOW
        )
    return int(text)


def threads_for(environment: Mapping[str, str], cores: int) -> int | None:
    """CPU threads of this process where nothing else says so: its share of the machine's cores.

    None leaves the libraries' own choice: for a process on its own, or where OMP_NUM_THREADS is
    set (torchrun itself sets it to 1 for several processes unless it is set before).

    >>> threads_for({"LOCAL_WORLD_SIZE": "4"}, cores=10)
    2
    """
    if environment.get("OMP_NUM_THREADS"):
        return None
    local_world = _number(environment, "LOCAL_WORLD_SIZE", default=1, least=1)
    return None if local_world == 1 else max(1, cores // local_world)
