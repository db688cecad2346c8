"""How the engine computes: speed and memory, never what is private."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from dpsynth.errors import UsageError

_MOST_BYTES = 2**30
_MOST_EXAMPLES = 4096


@dataclass(frozen=True)
class EngineSettings:
    """Speed settings. None of them changes what is clipped, sampled, charged or noised.

    physical: examples worked through at once; None chooses by memory.
    precision: "bfloat16" runs the model under autocast; norms and sums stay in float32.
    exact_sums: materialise each example's gradient and add in float64, which is slow and proves
        the bound of docs/maths/dpsgd.md (D2) without a model of rounding.
    """

    physical: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    exact_sums: bool = False

    def __post_init__(self) -> None:
        """Refuse what means nothing (UsageError)."""
        if self.physical is not None and self.physical < 1:
            raise UsageError(f"a physical batch holds at least 1 example, got {self.physical}")
        if self.precision not in ("float32", "bfloat16"):
            raise UsageError(
                f"the engine knows no precision {self.precision}", hint="float32 or bfloat16"
            )


DEFAULT = EngineSettings()


def affordable(bytes_an_example: int, device: torch.device) -> int:
    """Examples that fit in half of the free memory, or in 1 GiB if that is less; 1 to 4096."""
    room = min(_MOST_BYTES, _free(device) // 2)
    return max(1, min(_MOST_EXAMPLES, room // max(1, bytes_an_example)))


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system tells
        return 2 * _MOST_BYTES
