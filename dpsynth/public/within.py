"""How public codes spread inside their own classes: a shape that private cells may lean towards."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.planning.schema import Plan
from dpsynth.planning.workload import released_dim

WITHIN = "within.safetensors"
FORMAT = "dpsynth-within-1"
# Numbers of codes taken at once: bounds memory.
_NUMBERS = 2**23


def uses_within(plan: Plan) -> bool:
    """Whether the plan's moments have cells: only then is the file made."""
    return plan.stages.moments is not None and plan.stages.moments.cells is not None


def within_covariance(codes: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """Pooled within-class covariance (d, d) of public codes (n, d) with labels (n,).

    S = sum over classes of the scatter about the class's own mean, over n - Y (n above Y; else
    over 1). Labels count from 0; each public source has classes of its own.
    """
    step, dim = max(1, _NUMBERS // codes.shape[1]), codes.shape[1]
    counts = torch.bincount(labels).double()
    sums = torch.zeros(len(counts), dim, dtype=torch.float64)
    for part, own in zip(torch.split(codes, step), torch.split(labels, step), strict=True):
        sums.index_add_(0, own, part.double())
    means, scatter = sums / counts.clamp_min(1.0)[:, None], torch.zeros(dim, dim).double()
    for part, own in zip(torch.split(codes, step), torch.split(labels, step), strict=True):
        residuals = part.double() - means[own]
        scatter += residuals.T @ residuals
    divisor = max(1, len(codes) - int((counts > 0).sum()))
    covariance = scatter.numpy() / divisor
    symmetric: NDArray[np.float64] = (covariance + covariance.T) / 2.0
    return symmetric


def save_within(path: Path, covariance: NDArray[np.float64], recipe: str) -> None:
    """Write the covariance (d, d) atomically, stamped public and with its recipe."""
    metadata = {"format": FORMAT, "room": "public", "recipe": recipe}
    save_tensors(path, {"covariance": covariance}, metadata)


def load_within(run: RunDir, plan: Plan) -> NDArray[np.float64] | None:
    """The run's covariance (d, d) of public codes; None where the plan has no cells.

    None too where the calibration names no such file.

    Raises:
        MissingError: there is no calibration, or the file is gone.
        UsageError: the file is not the one that the calibration names, or does not fit the plan.
    """
    if not uses_within(plan):
        return None
    wanted = read_json(run.calibration).get("within_sha256")
    if wanted is None:
        return None
    path = run.public / WITHIN
    if not path.is_file():
        raise MissingError(
            f"{WITHIN} is missing from {run.public.name}/",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    arrays, metadata = load_tensors(path)
    covariance = arrays.get("covariance")
    dim = released_dim(plan)
    if sha256_file(path) != wanted or metadata.get("format") != FORMAT or covariance is None:
        raise _other("is not the file that the calibration names", run)
    if covariance.shape != (dim, dim) or not np.isfinite(covariance).all():
        raise _other(f"holds no covariance of codes of {dim} numbers", run)
    found: NDArray[np.float64] = covariance.astype(np.float64)
    return found


def _other(why: str, run: RunDir) -> UsageError:
    return UsageError(f"{WITHIN} {why}", hint=typed("dpsynth", "pretrain", run.root))
