"""The released class Gaussians as torch values: draws from them, and their analytic field."""

from pathlib import Path

import torch
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.moments import load_moments
from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.field import AnalyticField
from dpsynth.planning.schema import Plan
from dpsynth.released.estimate import ClassGaussians, estimate


class ReleasedGaussians:
    """N(mu_y, Sigma_y) for each class y, estimated from the released moments alone."""

    def __init__(self, gaussians: ClassGaussians) -> None:
        self.weights = torch.from_numpy(gaussians.weights).float()
        self.means = torch.from_numpy(gaussians.means).float()
        covariances = torch.from_numpy(gaussians.covariances).double()
        self.classes, self.dim = self.means.shape
        self.field = AnalyticField(self.weights, self.means, covariances)
        values, basis = torch.linalg.eigh(covariances)
        roots = (basis * values.clamp(min=0).sqrt()[:, None]).float()  # U_y Lambda_y^(1/2)
        self._roots = roots.expand(self.classes, self.dim, self.dim)

    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """One code for each label (B,): (B, d)."""
        normal = torch.randn(len(labels), self.dim, generator=generator)
        return self.means[labels] + torch.einsum("bde,be->bd", self._roots[labels], normal)


def moments_path(run: RunDir) -> Path:
    """Where the moment release lies."""
    return run.released / "moments.safetensors"


def load_gaussians(run: RunDir, plan: Plan) -> tuple[ReleasedGaussians, str]:
    """The released Gaussians, and the SHA-256 of the release that they come from.

    Raises:
        MissingError: the moments were not released yet.
        UsageError: the plan has no moments stage.
    """
    if plan.stages.moments is None:
        raise UsageError("the plan has no moments stage", hint="declare stages.moments in the plan")
    path = moments_path(run)
    if not path.exists():
        raise MissingError("no moments were released yet", hint="dpsynth release-moments RUN")
    return ReleasedGaussians(estimate(load_moments(path), plan.stages.moments)), sha256_file(path)
