"""The analytic velocity field of a mixture of Gaussians, one Gaussian a class.

StraightDP Proposition 3.1 and appendix B.2, widened to a covariance of its own for each class;
`docs/maths/field.md` derives what changes.
"""

import torch
from torch import Tensor

from dpsynth.errors import UsageError


class AnalyticField:
    """v(x, t | y) = E[z - xi | x_t = x, y] for x_t = (1 - t) xi + t z, z | y ~ N(mu_y, Sigma_y).

    With A_{t,y} = (1 - t)^2 I + t^2 Sigma_y, equations 2 and 3 together are

        v(x, t | y) = mu_y + (t Sigma_y - (1 - t) I) A_{t,y}^{-1} (x - t mu_y),

    without a division by 1 - t, so that the field is finite on all of [0, 1]. Equation 4 weighs
    the classes by pi_y N(x; t mu_y, A_{t,y}), where the log-determinants no longer cancel.

    Each Sigma_y is diagonalised once, in float64; an evaluation costs O(B Y d^2).
    """

    def __init__(
        self,
        weights: Tensor,
        means: Tensor,
        covariances: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take class weights (Y,), means (Y, d), covariances (Y, d, d) or a shared (1, d, d).

        Raises:
            UsageError: shapes do not fit, a weight is negative or all are zero, a value is not
                finite, or a covariance is not positive definite.
        """
        classes, dim = _check_shapes(weights, means, covariances)
        eigenvalues, basis = torch.linalg.eigh(covariances.double())
        if not bool((eigenvalues > 0).all()):
            raise UsageError(
                "a covariance of the analytic field is not positive definite",
                hint="raise stages.moments.floor in the plan",
            )
        self.classes, self.dim, self.dtype = classes, dim, dtype
        self._log_weights = (weights.double() / weights.double().sum()).log().to(dtype)
        self._means = means.to(dtype)
        self._spectrum = eigenvalues.expand(classes, dim).to(dtype)  # (Y, d)
        self._basis = basis.expand(classes, dim, dim).to(dtype)  # (Y, d, d), columns
        turned = torch.einsum("yd,yde->ye", means.double(), basis.expand(classes, dim, dim))
        self._turned_means = turned.to(dtype)  # (Y, d): U_y^T mu_y

    def conditional(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Velocity (B, d) at points x (B, d), times t (B,), classes y (B,) (equations 2, 3)."""
        x, t = self._cast(x, t)
        basis, spectrum = self._basis[y], self._spectrum[y]  # (B, d, d), (B, d)
        residual = torch.einsum("bd,bde->be", x, basis) - t[:, None] * self._turned_means[y]
        gained = _gain(spectrum, t[:, None]) * residual
        return self._means[y] + torch.einsum("be,bde->bd", gained, basis)

    def unconditional(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity (B, d) of the whole mixture at x (B, d), t (B,) (equations 2, 4)."""
        x, t = self._cast(x, t)
        residual = self._residuals(x, t)
        weights = self._responsibilities(residual, t)  # (B, Y)
        gained = _gain(self._spectrum, t[:, None, None]) * residual * weights[..., None]
        return weights @ self._means + torch.einsum("bye,yde->bd", gained, self._basis)

    def responsibilities(self, x: Tensor, t: Tensor) -> Tensor:
        """Class posteriors w_y(x, t), (B, Y), at x (B, d), t (B,) (equation 4)."""
        x, t = self._cast(x, t)
        return self._responsibilities(self._residuals(x, t), t)

    def __call__(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Velocity (B, d), as a velocity model gives it: label `classes` is the null label."""
        null = y == self.classes
        if bool(null.all()):
            return self.unconditional(x, t)
        velocity = self.conditional(x, t, torch.where(null, torch.zeros_like(y), y))
        if bool(null.any()):
            velocity[null] = self.unconditional(x[null], t[null])
        return velocity

    def _cast(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(self.dtype), t.to(self.dtype)

    def _residuals(self, x: Tensor, t: Tensor) -> Tensor:
        """U_y^T (x - t mu_y) for every class: (B, Y, d)."""
        turned = torch.einsum("bd,yde->bye", x, self._basis)
        return turned - t[:, None, None] * self._turned_means

    def _responsibilities(self, residual: Tensor, t: Tensor) -> Tensor:
        variance = _variance(self._spectrum, t[:, None, None])  # (B, Y, d)
        log_density = -0.5 * (residual.square() / variance + variance.log()).sum(-1)
        return torch.softmax(self._log_weights + log_density, dim=-1)


def _variance(spectrum: Tensor, t: Tensor) -> Tensor:
    """Eigenvalues of A_{t,y}."""
    return (1 - t).square() + t.square() * spectrum


def _gain(spectrum: Tensor, t: Tensor) -> Tensor:
    """Eigenvalues of (t Sigma_y - (1 - t) I) A_{t,y}^{-1}."""
    return (t * spectrum - (1 - t)) / _variance(spectrum, t)


def _check_shapes(weights: Tensor, means: Tensor, covariances: Tensor) -> tuple[int, int]:
    if means.ndim != 2 or weights.shape != means.shape[:1]:
        raise UsageError(
            f"the analytic field got weights {tuple(weights.shape)} and means "
            f"{tuple(means.shape)}; expected (Y,) and (Y, d)"
        )
    classes, dim = means.shape
    if covariances.shape not in ((classes, dim, dim), (1, dim, dim)):
        raise UsageError(
            f"the analytic field got covariances {tuple(covariances.shape)}; expected "
            f"({classes}, {dim}, {dim}) or (1, {dim}, {dim})"
        )
    if not all(bool(value.isfinite().all()) for value in (weights, means, covariances)):
        raise UsageError("the analytic field got a value that is not finite")
    if bool((weights < 0).any()) or not bool(weights.sum() > 0):
        raise UsageError("the analytic field needs class weights >= 0 that are not all zero")
    return classes, dim
