"""The released Gaussian mixtures as torch values: draws from them, and their analytic field."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpsynth.artifacts.cells import NAME as CELLS_NAME
from dpsynth.artifacts.cells import load_cells
from dpsynth.artifacts.cross import NAME as CROSS_NAME
from dpsynth.artifacts.cross import load_cross
from dpsynth.artifacts.files import canonical_json, sha256_bytes, sha256_file
from dpsynth.artifacts.moments import ReleasedMoments, load_moments
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import require_calibration, require_settled
from dpsynth.console import progress
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.field import AnalyticField
from dpsynth.planning.release import Moments
from dpsynth.planning.schema import Plan
from dpsynth.public.captions import drawn_captions
from dpsynth.public.features import load_features
from dpsynth.public.projection import Projection, load_release_space
from dpsynth.public.representation import GEOMETRY
from dpsynth.public.within import WITHIN, load_spread, load_within
from dpsynth.released.cells import estimate_cells
from dpsynth.released.estimate import (
    ClassGaussians,
    ClassMixtures,
    as_mixtures,
    estimate,
    estimate_means,
)
from dpsynth.released.mixtures_file import MIXTURE, load_mixtures, save_mixtures
from dpsynth.released.regression import conditions_of, declared_count, estimate_conditions
from dpsynth.released.template import Templates

# Raise it when the same release is estimated otherwise.
_VERSION = 1
# Numbers of roots gathered at once, one a draw: beyond, draws go component by component.
_GATHERED = 2**26


class ReleasedMixture:
    """sum_k s_yk N(mu_yk, Sigma_yk) for each class y, estimated from what was released alone.

    `weights` (Y,) are the classes'; `field` is the velocity field of all of them together. With a
    projection the mixtures are of features f in p numbers, and everything here is of codes in
    d >= p: mu = m + P^T mu_f, Sigma = P^T Sigma_f P + s^2 (I - P^T P), exactly and without a
    (d, d) matrix.
    """

    def __init__(self, mixtures: ClassMixtures, projection: Projection | None = None) -> None:
        means = torch.from_numpy(mixtures.means).float()
        self.classes, self._cells, self._inner = means.shape
        self._projection = projection
        self.dim = self._inner if projection is None else len(projection.centre)
        self._means = means.flatten(0, 1)  # component y K + k of class y
        self.weights = torch.from_numpy(mixtures.weights).float()
        joint = torch.from_numpy(mixtures.weights[:, None] * mixtures.shares).flatten()
        covariances = torch.from_numpy(mixtures.covariances).double().flatten(0, 1)
        owners = torch.arange(self.classes).repeat_interleave(self._cells)
        field = AnalyticField(
            joint.float(), self._means, covariances, owners=None if self._cells == 1 else owners
        )
        self.field = field if projection is None else projection.lifted(field)
        values, basis = torch.linalg.eigh(covariances)
        self._roots = (basis * values.clamp(min=0).sqrt()[:, None]).float()  # U Lambda^(1/2)
        reached = torch.from_numpy(mixtures.shares).double().cumsum(1)
        self._reached = reached / reached[:, -1:]  # (Y, K): shares up to each cell, ending at 1
        own = np.einsum("yk,ykd->yd", mixtures.shares, mixtures.means)
        self.class_means = self._lifted(torch.from_numpy(own)).float()  # (Y, d): mu_y

    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """One code for each label (B,): (B, d)."""
        components = self._components(labels, generator)
        normal = torch.randn(len(labels), self._inner, generator=generator)
        drawn = self._means[components] + _rooted(self._roots, components, normal)
        if self._projection is None:
            return drawn
        rest = torch.randn(len(labels), self.dim, generator=generator)
        return self._projection.lift(drawn) + self._projection.fill(rest)

    def _lifted(self, features: Tensor) -> Tensor:
        return features if self._projection is None else self._projection.lift(features)

    def _components(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """One of each label's own components (B,), by their shares; never one without a share."""
        if self._cells == 1:  # no coin: a draw of one Gaussian a class stays what it was
            return labels
        coins = torch.rand(len(labels), 1, generator=generator, dtype=torch.float64)
        # The first cell whose cumulative share exceeds the coin: an empty one adds nothing to it.
        cells: Tensor = torch.searchsorted(self._reached[labels], coins, right=True)[:, 0]
        return labels * self._cells + cells


def _rooted(roots: Tensor, components: Tensor, normal: Tensor) -> Tensor:
    """U_m Lambda_m^(1/2) g (B, d) of roots (M, d, d), components (B,) and normal draws (B, d)."""
    if len(normal) * roots[0].numel() <= _GATHERED:
        return torch.einsum("bde,be->bd", roots[components], normal)
    turned = torch.empty_like(normal)
    for component in set(components.tolist()):
        rows = (components == component).nonzero()[:, 0]
        turned[rows] = normal[rows] @ roots[component].T
    return turned


def moments_path(run: RunDir) -> Path:
    """Where the moment release lies."""
    return run.released / "moments.safetensors"


def load_mixture(run: RunDir, plan: Plan) -> tuple[ReleasedMixture, str]:
    """The released mixtures, and the SHA-256 of the release that they come from.

    Of each class; of a caption release, of each caption that the plan draws images for. With cells
    the hash is one of the first and the last round's hashes: the estimate reads both.

    Raises:
        MissingError: the moments, or a later round, were not released yet.
        ReplayError: a file is not what the run's transcript settled.
        UsageError: the plan has no moments stage.
    """
    settings = plan.stages.moments
    if settings is None:
        raise UsageError("the plan has no moments stage", hint="declare stages.moments in the plan")
    mixtures, digest = _estimated(run, plan, settings)
    projection = load_release_space(run, plan).projection if settings.projection else None
    return ReleasedMixture(mixtures, projection), digest


def _estimated(run: RunDir, plan: Plan, settings: Moments) -> tuple[ClassMixtures, str]:
    """The mixtures in the space of the release, and what `load_mixture` says of it."""
    files = [moments_path(run)] + ([run.released / CELLS_NAME] if settings.cells else [])
    if settings.captions is not None:
        files = [run.released / CROSS_NAME]
    if not all(path.exists() for path in files):
        raise MissingError(
            "no moments were released yet, or not every round of them",
            hint="dpsynth release-moments RUN",
        )
    require_settled(run, [path.name for path in files])
    require_calibration(run)
    if settings.captions is not None:
        return _of_captions(run, plan, settings), sha256_file(files[0])
    moments = load_moments(files[0])
    if settings.cells is None:
        return as_mixtures(estimated(run, plan, settings, moments)), sha256_file(files[0])
    digest = sha256_bytes(canonical_json([sha256_file(path) for path in files]))
    return _of_cells(run, plan, settings, moments, digest), digest


def estimated(
    run: RunDir, plan: Plan, settings: Moments, moments: ReleasedMoments
) -> ClassGaussians:
    """One Gaussian for each class, in the space of the release; of a plan without cells.

    Raises MissingError or UsageError where the public covariance that it takes is not there.
    """
    if moments.covariance != "public":
        return estimate(moments, settings)
    spread = load_spread(run, plan)
    if spread is None:
        raise UsageError("a release of means alone, and the plan's covariance is not public")
    return estimate_means(moments, settings, spread, plan.private.conditions)


def _of_captions(run: RunDir, plan: Plan, settings: Moments) -> ClassMixtures:
    """One Gaussian for each caption that images are drawn for, in the space of the release."""
    moments, captions = load_cross(run.released / CROSS_NAME), drawn_captions(plan)
    features = load_features(run, plan).of(captions)
    conditions = conditions_of(plan, features, moments)
    return as_mixtures(estimate_conditions(moments, conditions, settings, declared_count(plan)))


def _of_cells(
    run: RunDir, plan: Plan, settings: Moments, moments: ReleasedMoments, digest: str
) -> ClassMixtures:
    """The mixtures of a plan with cells: estimated once, then kept in `mixture.safetensors`."""
    path = run.released / MIXTURE
    recipe = _recipe(run, plan, digest)
    kept = load_mixtures(path, recipe)
    if kept is not None:
        return kept
    templates = None
    if settings.cells is not None and settings.cells.template:
        templates = Templates(load_release_space(run, plan).representation, plan.public_seed + 5)
    cells = load_cells(run.released / CELLS_NAME)
    with progress("estimating the cells' mixture"):
        made = estimate_cells(moments, cells, settings, templates, load_within(run, plan))
    save_mixtures(path, made, recipe)
    return made


def _recipe(run: RunDir, plan: Plan, digest: str) -> str:
    """Hash of all that the estimate follows from; `digest` is that of its release."""
    files = (run.calibration, run.public / GEOMETRY, run.public / WITHIN)
    public = [sha256_file(p) for p in files if p.exists()]
    # As the plan's hash sees it: a later key at its default leaves older recipes as they are.
    facts = plan.facts()["stages"]["moments"]
    parts = [_VERSION, digest, public, facts, plan.public_seed]
    return sha256_bytes(canonical_json({"mixture": parts}))
