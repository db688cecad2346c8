"""The analytic velocity field of a mixture of Gaussians whose components belong to classes.

StraightDP Proposition 3.1 and appendix B.2, widened to a covariance of its own for each component
and to several components a class; `docs/maths/field.md` derives what changes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dpsynth.errors import UsageError

BLOCK = 2**18
"""Numbers in a temporary (rows, M, d): beyond, it leaves the cache and costs three times more."""


class AnalyticField:
    """v(x, t | y) = E[z - xi | x_t = x, y] for x_t = (1 - t) xi + t z, z | y a Gaussian mixture.

    With A_{t,m} = (1 - t)^2 I + t^2 Sigma_m, equations 2 and 3 together are, for a component m,

        v_m(x, t) = mu_m + (t Sigma_m - (1 - t) I) A_{t,m}^{-1} (x - t mu_m),

    without a division by 1 - t, so that the field is finite on all of [0, 1]. Equation 4 weighs
    components by pi_m N(x; t mu_m, A_{t,m}), where the log-determinants no longer cancel: those of
    class y alone give v(x, t | y), all of them v(x, t).

    A component of weight zero has no share and costs nothing. Only a class without any weight
    keeps its components, equally, so that v(x, t | y) is defined; v(x, t) leaves it out.

    Each Sigma_m is diagonalised once, in float64. An evaluation costs O(B M d^2) over all M
    components, O(B K d^2) over the K of a class.
    """

    def __init__(
        self,
        weights: Tensor,
        means: Tensor,
        covariances: Tensor,
        *,
        owners: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take weights (M,), means (M, d), covariances (M, d, d) or (1, d, d), and owners (M,).

        `owners` holds each component's class, 0 to Y - 1 in any order, int64; None is one
        component a class. The weight of a class is the sum of its components' weights.

        Raises:
            UsageError: shapes do not fit, a weight is negative or all are zero, a value is not
                finite, a covariance is not positive definite, or a class owns no component.
        """
        self.dim, self.dtype = _check_shapes(weights, means, covariances), dtype
        eigenvalues, basis = torch.linalg.eigh(covariances.double())
        if not bool((eigenvalues > 0).all()):
            raise UsageError(
                "a covariance of the analytic field is not positive definite",
                hint="raise stages.moments.floor in the plan",
            )
        normalised = weights.double() / weights.double().sum()
        every = _Components.of(normalised, means, eigenvalues, basis, dtype)
        self._owners = torch.arange(len(weights))
        if owners is not None:
            _check_owners(owners, len(weights))
            order = _live_by_class(normalised, owners)
            every, self._owners = every.at(order), owners[order]
        self._every = every
        self.classes = int(self._owners.max()) + 1
        self._single = len(self._owners) == self.classes
        self._own = _split(every, self._owners)

    def conditional(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Velocity (B, d) at points x (B, d), times t (B,), classes y (B,) (equations 2 to 4)."""
        x, t = self._cast(x, t)
        # By class, since a class's bases then enter one product, not a copy for each record.
        velocity = torch.empty_like(x)
        for label in set(y.tolist()):
            rows = (y == label).nonzero()[:, 0]
            velocity[rows] = self._own[label].velocity(x[rows], t[rows])
        return velocity

    def unconditional(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity (B, d) of the whole mixture at x (B, d), t (B,) (equations 2, 4)."""
        return self._every.velocity(*self._cast(x, t))

    def responsibilities(self, x: Tensor, t: Tensor) -> Tensor:
        """Class posteriors w_y(x, t), (B, Y), at x (B, d), t (B,) (equation 4)."""
        x, t = self._cast(x, t)
        shares = self._every.shares(self._every.residuals(x, t), t)
        if self._single:
            return shares
        return shares.new_zeros(len(x), self.classes).index_add(1, self._owners, shares)

    def __call__(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Velocity (B, d), as a velocity model gives it: label `classes` is the null label."""
        null = y == self.classes
        if bool(null.all()):
            return self.unconditional(x, t)
        if not bool(null.any()):
            return self.conditional(x, t, y)
        velocity = torch.empty_like(x, dtype=self.dtype)
        velocity[null] = self.unconditional(x[null], t[null])
        velocity[~null] = self.conditional(x[~null], t[~null], y[~null])
        return velocity

    def _cast(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(self.dtype), t.to(self.dtype)


class _Components(NamedTuple):
    """Gaussians in their eigenbases: one row of each tensor a component."""

    log_weights: Tensor  # (M,)
    means: Tensor  # (M, d)
    turned_means: Tensor  # (M, d): U_m^T mu_m
    spectrum: Tensor  # (M, d)
    basis: Tensor  # (M, d, d), eigenvectors as columns

    @classmethod
    def of(
        cls, weights: Tensor, means: Tensor, spectrum: Tensor, basis: Tensor, dtype: torch.dtype
    ) -> "_Components":
        """Of weights (M,), means (M, d), and eigenvalues and bases for each or for all."""
        shape = (*means.shape, means.shape[-1])
        turned = torch.einsum("md,mde->me", means.double(), basis.expand(shape))
        return cls(
            weights.log().to(dtype),
            means.to(dtype),
            turned.to(dtype),
            spectrum.expand(means.shape).to(dtype),
            basis.expand(shape).to(dtype),
        )

    def at(self, index: Tensor | slice) -> "_Components":
        """Some of them, in the order of `index`."""
        return _Components(*(value[index] for value in self))

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity (B, d) of their mixture at x (B, d), t (B,) (equations 2, 4)."""
        rows = max(1, BLOCK // self.means.numel())
        firsts = range(0, max(1, len(x)), rows)
        return torch.cat([self._velocity(x[i : i + rows], t[i : i + rows]) for i in firsts])

    def _velocity(self, x: Tensor, t: Tensor) -> Tensor:
        residual = self.residuals(x, t)
        shares = self.shares(residual, t)
        gained = _gain(self.spectrum, t[:, None, None]) * residual * shares[..., None]
        return shares @ self.means + torch.einsum("bme,mde->bd", gained, self.basis)

    def residuals(self, x: Tensor, t: Tensor) -> Tensor:
        """U_m^T (x - t mu_m) for each of them: (B, M, d)."""
        turned = torch.einsum("bd,mde->bme", x, self.basis)
        return turned - t[:, None, None] * self.turned_means

    def shares(self, residual: Tensor, t: Tensor) -> Tensor:
        """Posteriors (B, M), which sum to one over them, from residuals (B, M, d)."""
        variance = _variance(self.spectrum, t[:, None, None])  # (B, M, d)
        log_density = -0.5 * (residual.square() / variance + variance.log()).sum(-1)
        return torch.softmax(self.log_weights + log_density, dim=-1)


def _variance(spectrum: Tensor, t: Tensor) -> Tensor:
    """Eigenvalues of A_{t,m}."""
    return (1 - t).square() + t.square() * spectrum


def _gain(spectrum: Tensor, t: Tensor) -> Tensor:
    """Eigenvalues of (t Sigma_m - (1 - t) I) A_{t,m}^{-1}."""
    return (t * spectrum - (1 - t)) / _variance(spectrum, t)


def _live_by_class(weights: Tensor, owners: Tensor) -> Tensor:
    """Components (L,) with weight, or of a class without any, ordered by class."""
    totals = weights.new_zeros(int(owners.max()) + 1).index_add(0, owners, weights)
    live = ((weights > 0) | (totals[owners] == 0)).nonzero()[:, 0]
    return live[owners[live].argsort(stable=True)]


def _split(every: _Components, owners: Tensor) -> tuple[_Components, ...]:
    """Each class's components, as views: `owners` is sorted."""
    ends = owners.bincount().cumsum(0).tolist()
    parts = [every.at(slice(a, b)) for a, b in zip([0, *ends], ends, strict=False)]
    # A class without weight has log-weights of -inf alone: its components share it equally.
    return tuple(
        part._replace(log_weights=part.log_weights.nan_to_num(neginf=0.0)) for part in parts
    )


def _check_shapes(weights: Tensor, means: Tensor, covariances: Tensor) -> int:
    """The code size d, once everything fits."""
    if means.ndim != 2 or weights.shape != means.shape[:1]:
        raise UsageError(
            f"the analytic field got weights {tuple(weights.shape)} and means "
            f"{tuple(means.shape)}; expected (M,) and (M, d)"
        )
    count, dim = means.shape
    if covariances.shape not in ((count, dim, dim), (1, dim, dim)):
        raise UsageError(
            f"the analytic field got covariances {tuple(covariances.shape)}; expected "
            f"({count}, {dim}, {dim}) or (1, {dim}, {dim})"
        )
    if not all(bool(value.isfinite().all()) for value in (weights, means, covariances)):
        raise UsageError("the analytic field got a value that is not finite")
    if bool((weights < 0).any()) or not bool(weights.sum() > 0):
        raise UsageError("the analytic field needs weights >= 0 that are not all zero")
    return dim


def _check_owners(owners: Tensor, count: int) -> None:
    if owners.shape != (count,) or owners.dtype != torch.int64 or bool((owners < 0).any()):
        raise UsageError(
            f"the analytic field got owners {tuple(owners.shape)} of {owners.dtype}; expected "
            f"({count},) classes from 0 up, int64"
        )
    if not bool((owners.bincount() > 0).all()):
        missing = int((owners.bincount() == 0).nonzero()[0, 0])
        raise UsageError(f"class {missing} owns no component of the analytic field")
