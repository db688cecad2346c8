"""The analytic field of codes that are Gaussian in a few directions and isotropic in the others.

For components of mean mu_m = c + P^T nu_m and covariance Sigma_m = P^T L_m P + s^2 (I - P^T P),
with P (p, d) of orthonormal rows, the same P and s^2 for all of them.
"""

import math

import torch
from torch import Tensor

from dpsynth.errors import UsageError
from dpsynth.models.field import AnalyticField


class LiftedField:
    """The field of `AnalyticField` for these components, exactly, in O(B d p + B M p^2).

    Split x = t c + P^T u + w with u = P (x - t c) and w off the basis. Then A_{t,m} acts on both
    parts by themselves, as P^T ((1 - t)^2 I + t^2 L_m) P and as a = (1 - t)^2 + t^2 s^2, so that

        v_m(x, t) = c + P^T v_m^f(u, t) + (t s^2 - (1 - t)) / a  w,

    where v_m^f is the field of N(nu_m, L_m) in p numbers (equations 2 and 3). The density of w is
    the same for all components: posteriors (equation 4) are those of u alone, and sums over
    components pass through P^T. docs/maths/field.md derives it.
    """

    def __init__(self, inner: AnalyticField, basis: Tensor, centre: Tensor, residual: float):
        """Take the field of nu_m, L_m in p numbers, P (p, d), c (d,) and s^2.

        Raises:
            UsageError: shapes do not fit, the rows of P are not orthonormal, or s^2 is not
                finite and above 0.
        """
        rows, self.dim = basis.shape
        if inner.dim != rows or centre.shape != (self.dim,):
            raise UsageError(
                f"a field in {inner.dim} numbers was given a basis {tuple(basis.shape)} and a "
                f"centre {tuple(centre.shape)}"
            )
        apart = basis.double() @ basis.double().T - torch.eye(rows, dtype=torch.float64)
        if float(apart.abs().max()) > 1e-6:
            raise UsageError("the rows of a lifting basis are not orthonormal")
        if not 0 < residual < math.inf:
            raise UsageError(f"a lifted field got the residual variance {residual!r}")
        self.inner, self.residual = inner, residual
        self.dtype, self.classes = inner.dtype, inner.classes
        self._basis, self._centre = basis.to(self.dtype), centre.to(self.dtype)

    def conditional(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Velocity (B, d) at points x (B, d), times t (B,), classes y (B,) (equations 2 to 4)."""
        x, t, inside = self._split(x, t)
        return self._joined(x, t, inside, self.inner.conditional(inside, t, y))

    def unconditional(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity (B, d) of the whole mixture at x (B, d), t (B,) (equations 2, 4)."""
        x, t, inside = self._split(x, t)
        return self._joined(x, t, inside, self.inner.unconditional(inside, t))

    def responsibilities(self, x: Tensor, t: Tensor) -> Tensor:
        """Class posteriors w_y(x, t), (B, Y), at x (B, d), t (B,) (equation 4)."""
        _, t, inside = self._split(x, t)
        return self.inner.responsibilities(inside, t)

    def __call__(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Velocity (B, d), as a velocity model gives it: label `classes` is the null label."""
        x, t, inside = self._split(x, t)
        return self._joined(x, t, inside, self.inner(inside, t, y))

    def _split(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give x - t c (B, d), t (B,), and u = P (x - t c) (B, p)."""
        t = t.to(self.dtype)
        moved = x.to(self.dtype) - t[:, None] * self._centre
        return moved, t, moved @ self._basis.T

    def _joined(self, moved: Tensor, t: Tensor, inside: Tensor, velocity: Tensor) -> Tensor:
        """Give c + P^T (v_f - g u) + g (x - t c), where g w = g (x - t c) - g P^T u."""
        late = (1 - t)[:, None]
        spread = self.residual * t[:, None]
        gain = (spread - late) / (late.square() + spread * t[:, None])
        return self._centre + (velocity - gain * inside) @ self._basis + gain * moved
