"""The space in which moments are released: the code space, or a public PCA of it.

StraightDP section 3.1 (iii): "the release takes place in a public PCA basis P in R^(p x d) with a
feature clip". With `stages.moments.projection: p` a private record's statistic is made of

    f = P (z - m),    P (p, d) with orthonormal rows, m (d,) the mean, both of public codes z,

clipped to the ball of Rfeat, a quantile of public |f|. The noise of a second moment of p numbers
replaces that of d. What is released is lifted back by public numbers alone (post-processing):

    mu = m + P^T mu_f,    Sigma = P^T Sigma_f P + s^2 (I - P^T P),

where s^2 is the mean variance of public codes off the basis.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import MissingError, PlanError, UsageError, typed
from dpsynth.models.field import AnalyticField
from dpsynth.models.lifted import LiftedField
from dpsynth.planning.schema import Plan
from dpsynth.public.representation import CALIBRATION, Representation, load_representation

Array = NDArray[np.float64]

PROJECTION = "projection.safetensors"
FORMAT = "dpsynth-projection-1"
HASH_KEY, RADIUS_KEY = "projection_sha256", "release_radius"
"""What the calibration calls the projection's hash, and the clip radius Rfeat."""
LEAST_RESIDUAL = 1e-4
"""Least variance off the basis: a Gaussian field needs some, and public codes may have none."""
_CODE_BITS = 24  # of a coordinate of z - m below its bound; the basis has what float64 leaves
_NUMBERS = 2**22  # worked on at once: bounds memory, and changes no bit of any feature


@dataclass(frozen=True, eq=False)
class Projection:
    """f = P (z - m) and back; all of it from public codes.

    basis: P (p, d), orthonormal rows; centre: m (d,); residual: s^2, the variance off the basis;
    bound: a power of two above every coordinate of public z - m, eight times over. A coordinate
    beyond it is cut there, so that sums have a known size.
    """

    basis: Array
    centre: Array
    residual: float
    bound: float

    @property
    def dim(self) -> int:
        """Numbers in a feature, p."""
        return len(self.basis)

    def project_rows(self, codes: Array) -> Array:
        """Features (n, p) float64 of codes (n, d), each the same bits in any company.

        Coordinates of z - m are rounded to whole multiples of bound / 2^24 and the basis to its
        own grid: the products' sums are exact in float64, in any order, and the BLAS may take
        any. A code that is not finite gives a feature that is not a number.
        """
        basis, worth = self._whole_basis
        features = np.empty((len(codes), self.dim))
        step = max(1, _NUMBERS // len(self.centre))
        for start in range(0, len(codes), step):
            part = codes[start : start + step] - self.centre
            finite = np.isfinite(part).all(axis=1)
            part[~finite] = 0.0
            np.clip(part, -self.bound, self.bound, out=part)
            part *= 2.0**_CODE_BITS / self.bound  # a power of two: exact
            features[start : start + step] = np.rint(part, out=part) @ basis
            features[start : start + step][~finite] = np.nan
        features *= worth
        features += 0.0  # no -0.0, whose sign the order of a sum may decide
        return features

    @cached_property
    def _whole_basis(self) -> tuple[Array, float]:
        """P^T (d, p) in whole multiples of a power of two, and what a product of ones is worth.

        As fine as keeps 2^24 times the sum of a row's sizes below 2^53.
        """
        most = 2.0 ** (53 - _CODE_BITS) - self.basis.shape[1]
        longest = float(np.abs(self.basis).sum(axis=1).max())
        places = math.floor(math.log2(most / longest))
        whole = np.rint(np.ldexp(self.basis, places))
        worth = math.ldexp(self.bound, -places - _CODE_BITS)
        return np.ascontiguousarray(whole.T), worth

    def project(self, codes: Tensor) -> Tensor:
        """Features (n, p) float64 of public or synthetic codes (n, d), part by part."""
        parts = [part.double() - self._centre for part in torch.split(codes, self._step)]
        return torch.cat([part @ self._basis.T for part in parts])

    def lift(self, features: Tensor) -> Tensor:
        """Codes m + P^T f (..., d) of features (..., p), in their precision."""
        kind = features.dtype
        return features @ self._basis.to(kind) + self._centre.to(kind)

    def fill(self, normal: Tensor) -> Tensor:
        """What a draw has off the basis: s (I - P^T P) g of standard normal g (..., d)."""
        basis = self._basis.to(normal.dtype)
        return math.sqrt(self.residual) * (normal - (normal @ basis.T) @ basis)

    def lifted(self, field: AnalyticField) -> LiftedField:
        """The field of codes whose features have the field `field`, exactly."""
        return LiftedField(field, self._basis, self._centre, self.residual)

    @cached_property
    def _basis(self) -> Tensor:
        return torch.from_numpy(self.basis)

    @cached_property
    def _centre(self) -> Tensor:
        return torch.from_numpy(self.centre)

    @property
    def _step(self) -> int:
        return max(1, _NUMBERS // len(self.centre))


@dataclass(frozen=True, eq=False)
class ProjectedCodec:
    """A representation's codes, projected: raw codes are features already, centred and scaled."""

    inner: Representation
    projection: Projection
    elementwise: ClassVar[bool] = False

    def encode_rows(self, images: NDArray[np.uint8]) -> Array:
        """Features (n, p) of images (n, H, W, C), each the same bits in any company."""
        features, step = np.empty((len(images), self.projection.dim)), self._step
        for at in range(0, len(images), step):
            codes = self.inner.encode_exact_many(images[at : at + step])
            features[at : at + step] = self.projection.project_rows(codes)
        return features

    def encode_many(self, images: NDArray[np.uint8]) -> Tensor:
        """Features (n, p) float64 of public or synthetic images (n, H, W, C)."""
        return self.projection.project(self.inner.encode(images))

    def decode(self, codes: Tensor) -> Tensor:
        """Pixels (n, H, W, C) in [0, 1] of features (n, p), by way of the code m + P^T f."""
        return self.inner.decode_pixels(self.projection.lift(codes.double())).permute(0, 2, 3, 1)

    @property
    def _step(self) -> int:
        """Codes, which may be far longer than features, that are held at once."""
        return max(1, _NUMBERS // self.inner.dim)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What the projection's file keeps of it."""
        return {"basis": self.projection.basis, "centre": self.projection.centre}


@dataclass(frozen=True, eq=False)
class ReleaseSpace:
    """Where moments are released. `representation` encodes records to f, clipped at its radius."""

    representation: Representation
    projection: Projection | None = None

    @property
    def dim(self) -> int:
        """Numbers in what is released of a record: p, or d without a projection."""
        return self.representation.dim

    @property
    def radius(self) -> float:
        """The clip radius in this space: Rfeat, or R without a projection."""
        return self.representation.radius

    def lift_means(self, means: Array) -> Array:
        """Means m + P^T mu_f (..., d) of means (..., p)."""
        if self.projection is None:
            return means
        lifted: Array = means @ self.projection.basis + self.projection.centre
        return lifted

    def lift_covariance(self, covariance: Array) -> Array:
        """P^T Sigma_f P + s^2 (I - P^T P) of covariances (..., p, p): dense (..., d, d)."""
        if self.projection is None:
            return covariance
        basis, residual = self.projection.basis, self.projection.residual
        inside = covariance - residual * np.eye(self.dim)
        lifted: Array = basis.T @ inside @ basis + residual * np.eye(basis.shape[1])
        return lifted


def projected(inner: Representation, projection: Projection, radius: float) -> ReleaseSpace:
    """The release space of codes of `inner`; `radius` is Rfeat."""
    codec = ProjectedCodec(inner, projection)
    space = Representation(codec, inner.shape, np.zeros(projection.dim), 1.0, radius)
    return ReleaseSpace(space, projection)


def fit_projection(codes: Tensor, dim: int) -> Projection:
    """PCA of public codes (n, d): the leading `dim` directions; min(n, d)^2 numbers are held.

    The sign of each direction is fixed by its largest entry, so that equal codes give an equal
    basis.

    Raises:
        PlanError: more directions are asked for than the codes span, less one.
    """
    most = min(codes.shape[1] - 1, len(codes) - 1)
    if dim > most:
        raise PlanError(
            f"stages.moments.projection is {dim}, but these public codes allow at most {most}",
            hint="lower stages.moments.projection in the plan, or declare more public images",
        )
    few = len(codes) < codes.shape[1]
    centre, basis, off = (_from_products if few else _from_scatter)(codes, dim)
    largest = np.abs(basis).argmax(axis=1)
    signs = np.sign(basis[np.arange(dim), largest])
    residual = max(off, LEAST_RESIDUAL)
    reach = max(float((part - centre).abs().max()) for part in _parts(codes))
    bound = 2.0 ** math.ceil(math.log2(max(8.0 * reach, 1.0)))
    return Projection(np.ascontiguousarray(basis * signs[:, None]), centre.numpy(), residual, bound)


def _from_scatter(codes: Tensor, dim: int) -> tuple[Tensor, Array, float]:
    """Mean (d,), leading directions (dim, d), and the mean variance off them, by (d, d) numbers."""
    centre, scatter = _moments(codes)
    values, vectors = np.linalg.eigh(scatter)  # ascending
    return centre, vectors[:, ::-1][:, :dim].T, float(values[: len(values) - dim].mean())


def _from_products(codes: Tensor, dim: int) -> tuple[Tensor, Array, float]:
    """As `_from_scatter`, of fewer codes than coordinates: by the (n, n) products between codes.

    Of centred codes X, X^T X and X X^T have the same eigenvalues, and X^T u / |X^T u| is a
    direction of the first for each u of the second. Coordinates are taken part by part.
    """
    count, width = codes.shape
    step = max(1, _NUMBERS // count)
    parts = [slice(at, at + step) for at in range(0, width, step)]
    centre, products = torch.zeros(width, dtype=torch.float64), np.zeros((count, count))
    for part in parts:
        own = codes[:, part].double()
        centre[part] = own.mean(0)
        centred = (own - centre[part]).numpy()
        products += centred @ centred.T
    values, vectors = np.linalg.eigh(products / count)  # ascending
    basis = np.empty((dim, width))
    for part in parts:
        centred = (codes[:, part].double() - centre[part]).numpy()
        basis[:, part] = vectors[:, ::-1][:, :dim].T @ centred
    # Rounding leaves directions of little variance askew: made orthonormal in their order.
    turned = np.linalg.qr(basis.T)[0].T
    off = float(values[: count - dim].clip(min=0.0).sum()) / (width - dim)
    return centre, turned, off


def _moments(codes: Tensor) -> tuple[Tensor, Array]:
    """Mean (d,) and covariance (d, d) of codes (n, d), in two passes over parts, float64."""
    total = torch.zeros(codes.shape[1], dtype=torch.float64)
    for part in _parts(codes):
        total += part.sum(0)
    centre = total / len(codes)
    scatter = torch.zeros(len(total), len(total), dtype=torch.float64)
    for part in _parts(codes):
        scatter += (part - centre).T @ (part - centre)
    return centre, (scatter / len(codes)).numpy()


def _parts(codes: Tensor) -> Iterator[Tensor]:
    for part in torch.split(codes, max(1, _NUMBERS // codes.shape[1])):
        yield part.double()


def save_projection(path: Path, projection: Projection, recipe: str) -> None:
    """Write basis, centre, residual variance and bound atomically, stamped public."""
    arrays = {
        "basis": projection.basis,
        "centre": projection.centre,
        "numbers": np.array([projection.residual, projection.bound]),
    }
    save_tensors(path, arrays, {"format": FORMAT, "room": "public", "recipe": recipe})


def read_projection(path: Path, plan: Plan) -> Projection:
    """Read a projection's file.

    Raises:
        MissingError: no such file.
        UsageError: damaged, or it does not fit the plan.
    """
    arrays, metadata = load_tensors(path)
    moments = plan.stages.moments
    wanted = (moments.projection if moments else None, plan.representation.code)
    try:
        basis, centre = (arrays[name].astype(np.float64) for name in ("basis", "centre"))
        residual, bound = map(float, arrays["numbers"])
        sizes = basis.shape == wanted and centre.shape == wanted[1:]
        finite = np.isfinite(basis).all() and np.isfinite(centre).all()
        if metadata.get("format") != FORMAT or not (sizes and finite):
            raise ValueError
        if not (0 < residual < math.inf and 0 < bound < math.inf and math.frexp(bound)[0] == 0.5):
            raise ValueError
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{path.name} does not fit the plan's projection",
            hint="start a new run folder with --run, then: dpsynth pretrain RUN",
        ) from error
    return Projection(basis, centre, residual, bound)


def projection_of(plan: Plan) -> int | None:
    """The p of a plan that releases moments in p numbers; None where it does not project."""
    return plan.stages.moments.projection if plan.stages.moments else None


def load_release_space(run: RunDir, plan: Plan) -> ReleaseSpace:
    """The space in which this run's moments are released, its radius from the calibration.

    Raises:
        MissingError: `dpsynth pretrain` has not finished, or a file of its own is gone.
        UsageError: a file is not the one that the calibration names.
    """
    inner = load_representation(run, plan)
    if projection_of(plan) is None:
        return ReleaseSpace(inner)
    path, facts = run.public / PROJECTION, read_json(run.public / CALIBRATION)
    again = typed("dpsynth", "pretrain", run.root)
    if not path.is_file() or RADIUS_KEY not in facts:
        raise MissingError(f"{PROJECTION} is missing from {run.public.name}/", hint=again)
    if sha256_file(path) != facts.get(HASH_KEY):
        raise UsageError(f"{PROJECTION} is not the file that {CALIBRATION} names", hint=again)
    return projected(inner, read_projection(path, plan), float(facts[RADIUS_KEY]))
