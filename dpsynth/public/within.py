"""How public codes spread: a shape for what a release of private codes leaves unsaid.

Inside their own classes, which private cells may lean towards; and, for a release of means alone,
about the mean of all as well.
"""

from dataclasses import dataclass
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
_WITHIN, _TOTAL = "covariance", "total"
# Numbers of codes taken at once: bounds memory.
_NUMBERS = 2**23


@dataclass(frozen=True)
class Spread:
    """Covariances (d, d) of public codes.

    `within`: pooled, about each class's own mean; `total`: about the mean of all, of plans whose
    covariance is public.
    """

    within: NDArray[np.float64]
    total: NDArray[np.float64] | None = None


def uses_within(plan: Plan) -> bool:
    """Whether the plan's moments have cells, or means alone: only then is the file made."""
    moments = plan.stages.moments
    return moments is not None and (moments.cells is not None or uses_total(plan))


def uses_total(plan: Plan) -> bool:
    """Whether the plan's covariance is that of public codes."""
    return plan.stages.moments is not None and plan.stages.moments.covariance == "public"


def spread_of(plan: Plan, codes: Tensor, labels: Tensor) -> Spread:
    """What the plan needs of how public codes (n, d) with labels (n,) spread."""
    total = within_covariance(codes, torch.zeros_like(labels)) if uses_total(plan) else None
    return Spread(within_covariance(codes, labels), total)


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


def save_within(
    path: Path,
    covariance: NDArray[np.float64],
    recipe: str,
    total: NDArray[np.float64] | None = None,
) -> None:
    """Write the covariances (d, d) of a `Spread` atomically, stamped public, with their recipe."""
    metadata = {"format": FORMAT, "room": "public", "recipe": recipe}
    beside = {} if total is None else {_TOTAL: total}
    save_tensors(path, {_WITHIN: covariance, **beside}, metadata)


def load_within(run: RunDir, plan: Plan) -> NDArray[np.float64] | None:
    """The run's covariance (d, d) of public codes inside their classes; see `load_spread`."""
    found = load_spread(run, plan)
    return None if found is None else found.within


def load_spread(run: RunDir, plan: Plan) -> Spread | None:
    """The run's covariances of public codes; None where the plan has neither cells nor needs them.

    None too where the calibration of a plan with cells names no such file.

    Raises:
        MissingError: there is no calibration, or the file is gone.
        UsageError: the file is not the one that the calibration names, or does not fit the plan.
    """
    if not uses_within(plan):
        return None
    wanted = read_json(run.calibration).get("within_sha256")
    if wanted is None and not uses_total(plan):
        return None
    path = run.public / WITHIN
    if not path.is_file():
        raise MissingError(
            f"{WITHIN} is missing from {run.public.name}/",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    arrays, metadata = load_tensors(path)
    names, dim = [_WITHIN, *([_TOTAL] if uses_total(plan) else [])], released_dim(plan)
    known = sha256_file(path) == wanted and metadata.get("format") == FORMAT
    if not known or not all(name in arrays for name in names):
        raise _other("is not the file that the calibration names", run)
    found = [arrays[name].astype(np.float64) for name in names]
    if not all(one.shape == (dim, dim) and np.isfinite(one).all() for one in found):
        raise _other(f"holds no covariance of codes of {dim} numbers", run)
    return Spread(*found)


def _other(why: str, run: RunDir) -> UsageError:
    return UsageError(f"{WITHIN} {why}", hint=typed("dpsynth", "pretrain", run.root))
