"""Membership from the velocity residual: how well a flow fits the very codes it was trained on.

StraightDP, section D.4: the attack thresholds |v(t z + (1 - t) xi, t) - (z - xi)| of a candidate
z, the statistic that training most directly minimises. Every candidate is measured with the same
times and the same noise draws, so that differences between models or candidates carry no noise of
the draws (`Draws`); a reference model takes away what is easy about a code by itself.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.errors import UsageError
from dpsynth.models.flow import VelocityField, interpolate
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

TIMES = (0.2, 0.4, 0.6, 0.8, 0.95)
DRAWS = 16
# Points (a code at one time with one draw) that the model sees at once: bounds memory.
_POINTS = 2**15
# Candidates of a class below which its own mean and spread say too little.
_FEW = 5


@dataclass(frozen=True)
class Draws:
    """Times (T,) and flow noise (K, d) shared by all candidates and models."""

    times: Array
    noise: Array

    @classmethod
    def fixed(
        cls, dim: int, *, times: tuple[float, ...] = TIMES, draws: int = DRAWS, seed: int = 0
    ) -> "Draws":
        """K fixed draws of flow noise, in pairs xi and -xi where K is even.

        Raises:
            UsageError: no time, a time outside [0, 1), or no draw.
        """
        if draws < 1 or not times or not all(0.0 <= t < 1.0 for t in times):
            raise UsageError(f"the residual needs times in [0, 1) and draws, got {times}, {draws}")
        half = torch.randn((-(-draws // 2), dim), generator=generator(seed), dtype=torch.float64)
        # Antithetic pairs cancel the part of the residual that is odd in xi.
        noise = torch.cat([half, -half])[:draws].numpy()
        return cls(np.asarray(times, np.float64), noise)


@torch.no_grad()
def residuals(velocity: VelocityField, codes: Array, labels: Labels, draws: Draws) -> Array:
    """|v(x_t, t, y) - (z - xi)|^2 / d averaged over the draws, for each code and time.

    Args:
        velocity: the attacked field; called with flat batches x (B, d), t (B,), y (B,).
        codes: z, float64 (n, d).
        labels: y, int64 (n,).
        draws: shared by all calls whose results are compared.

    Returns:
        Residuals float64 (n, T); a code whose residual is not finite has the largest float, the
        worst fit there is.

    Raises:
        UsageError: codes, labels and draws do not fit together.
    """
    if codes.ndim != 2 or labels.shape != codes.shape[:1] or codes.shape[1:] != (_dim(draws),):
        raise UsageError(
            f"codes {codes.shape}, labels {labels.shape} and draws of {_dim(draws)} numbers do not "
            "fit together"
        )
    found = np.empty((len(codes), len(draws.times)))
    xi = torch.from_numpy(draws.noise).float()
    step = max(1, _POINTS // len(xi))
    with one_thread():
        for start in range(0, len(codes), step):
            z = torch.from_numpy(codes[start : start + step]).float()
            y = torch.from_numpy(labels[start : start + step])
            for column, t in enumerate(draws.times.tolist()):
                found[start : start + step, column] = _at(velocity, z, y, t, xi).numpy()
    return np.nan_to_num(found, nan=np.finfo(np.float64).max, posinf=np.finfo(np.float64).max)


def _at(
    velocity: VelocityField, z: torch.Tensor, y: torch.Tensor, t: float, xi: torch.Tensor
) -> torch.Tensor:
    """Mean residual (B,) at one time: all draws of all codes in one flat batch."""
    count, draws, dim = len(z), len(xi), z.shape[1]
    codes = z[:, None].expand(count, draws, dim).reshape(-1, dim)
    noise = xi[None].expand(count, draws, dim).reshape(-1, dim)
    times = torch.full((count * draws,), t)
    predicted = velocity(interpolate(codes, noise, times), times, y.repeat_interleave(draws))
    apart = (predicted - (codes - noise)).double().square().mean(dim=1)
    return apart.view(count, draws).mean(dim=1)


def residual_scores(target: Array, labels: Labels, reference: Array | None = None) -> Array:
    """Membership scores (n,) of residuals (n, T): higher means rather a member.

    -r, or r_reference - r where there is a reference model that saw none of the candidates; then
    per class and time shifted and scaled to mean 0 and deviation 1 over all candidates, members or
    not, and averaged over the times. The calibration sees no membership, so that it cannot help
    or spoil the guess of a single one.

    Args:
        target: residuals of the attacked model (n, T).
        labels: classes (n,).
        reference: residuals of a reference model with the same draws (n, T).

    Raises:
        UsageError: shapes that do not fit.

    >>> residual_scores(np.array([[1.0], [3.0]]), np.array([0, 0]))
    array([ 1., -1.])
    """
    shapes = (target.shape, target.shape if reference is None else reference.shape)
    if target.ndim != 2 or shapes[0] != shapes[1] or labels.shape != target.shape[:1]:
        raise UsageError(f"residuals {shapes} and labels {labels.shape} do not fit together")
    gain = -target if reference is None else reference - target
    found: Array = by_class(gain, labels).mean(axis=1)
    return found


def by_class(values: Array, labels: Labels) -> Array:
    """Columns of values (n, T) brought to mean 0 and deviation 1 within each class (n,).

    A class of fewer than five candidates takes the mean and deviation of all; a column without
    spread is zero.
    """
    found = _standard(values, values)
    for label in np.unique(labels):
        mine = labels == label
        if mine.sum() >= _FEW:
            found[mine] = _standard(values[mine], values[mine])
    return found


def _standard(values: Array, of: Array) -> Array:
    # In units of the largest value: squares of very large residuals would overflow.
    largest = np.abs(of).max(axis=0, initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)
    scaled = of / unit
    centre, spread = scaled.mean(axis=0), scaled.std(axis=0)
    # Rounding of equal numbers is no spread.
    flat = spread <= 1e-12
    shifted: Array = (values / unit - centre) / np.where(flat, 1.0, spread)
    return np.where(flat, 0.0, shifted)


def _dim(draws: Draws) -> int:
    return int(draws.noise.shape[1])
