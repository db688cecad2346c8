"""Where a frozen model runs: settings of the machine, which say nothing of the result's privacy.

Read from the environment, so that every command and every process of a run has the same.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

import torch
from torch import nn

from dpsynth.errors import UsageError
from dpsynth.models.threads import one_thread

DEVICE, DTYPE, OFFLOAD, BATCH = (
    f"DPSYNTH_{name}" for name in ("DEVICE", "DTYPE", "OFFLOAD", "BATCH")
)
"""Names in the environment, which the options of the commands set."""
DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Machine:
    """How a frozen model is run on this machine.

    device: as torch names it (cpu, cuda, cuda:1, mps). dtype: of transformer and text encoders;
    the VAE is always float32. offload: at most one part of the pipeline lies on the device at a
    time. batch: images that the transformer sees at once where no gradient is taken.
    """

    device: str = "cpu"
    dtype: DtypeName = "float32"
    offload: bool = False
    batch: int = 8

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises UsageError where this machine has none of that name."""
        return _usable(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the weights."""
        return DTYPES[self.dtype]


@cache
def _usable(name: str) -> torch.device:
    """The device of that name, tried once: a charge that comes later must not meet its fault."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"--device {name}: expected cpu, cuda, cuda:1 or mps", hint="--device cpu"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU on this machine", hint="--device cpu")
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError):
        raise UsageError(
            f"--device {name}: this machine has none that computes", hint="--device cpu"
        ) from None
    return device


def machine() -> Machine:
    """The settings of this process. Raises UsageError for values that mean nothing."""
    dtype = os.environ.get(DTYPE) or "float32"
    if dtype not in get_args(DtypeName):
        raise UsageError(f"{DTYPE} is {dtype!r}, expected {', '.join(DTYPES)}")
    batch = os.environ.get(BATCH) or "8"
    if not batch.isdecimal() or int(batch) < 1:
        raise UsageError(f"{BATCH} is {batch!r}, expected a whole number above 0")
    return Machine(
        os.environ.get(DEVICE) or "cpu",
        cast(DtypeName, dtype),
        os.environ.get(OFFLOAD, "").lower() not in {"", "0", "false", "no", "off"},
        int(batch),
    )


class _Resident:
    """The part that lies on the device, where parts are offloaded."""

    part: nn.Module | None = None


def on_device(part: nn.Module) -> torch.device:
    """Bring a part of a pipeline to the device; with `offload` the one before it leaves."""
    settings = machine()
    device = settings.torch_device
    if settings.offload and _Resident.part is not None and _Resident.part is not part:
        _Resident.part.to("cpu")
    _Resident.part = part if settings.offload else None
    first = next(part.parameters(), None)
    if first is not None and not is_there(first.device, device):
        part.to(device)
    return device


def is_there(place: torch.device, wanted: torch.device) -> bool:
    """Whether a tensor's place is the device: of `cuda` any of its GPUs, which torch numbers."""
    return place.type == wanted.type and wanted.index in (None, place.index)


@contextmanager
def exact_kernels() -> Iterator[None]:
    """The same bits for an image in any company: one CPU thread, fixed kernels in full float32."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = (
        True, False, False, False,
    )  # fmt: skip
    try:
        with one_thread():
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
