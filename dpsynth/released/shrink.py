"""Covariances from noisy ones: fitted targets, a fitted spread, and shrinkage that stays positive.

A released second moment carries symmetric noise of known variance: `noise` on the diagonal, half
of it elsewhere, in every orthonormal basis. True covariances differ from a target T by

    Sigma = T^(1/2) (I + S/4)^4 T^(1/2),   S symmetric, entries N(0, k) (k / 2 off the diagonal),

nearly T^(1/2) exp(S) T^(1/2) and much cheaper: an even power is never negative. The one number k
of all of them is fitted to the released values: shrinkage has no setting, and its result is
positive by construction (docs/maths/cells.md, C7 to C9).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import nnls

Array = NDArray[np.float64]

FLOOR = 1e-4
"""Least eigenvalue of a target, in code units whose public variance is 1."""
LEAST_SPREAD = 1e-4
_STEPS, _RATE = 60, 0.06


def fitted_targets(
    data: Array, noise: Array, scales: Array, spread: float, targets: list[Array]
) -> Array:
    """Non-negative coefficients (t,) of `targets`, each (m, d, d), that fit `data` (m, d, d) best.

    Weighted least squares over all entries of all matrices: a few numbers from very many, so that
    noise hardly enters. `noise` (m,), `scales` (d, d): an entry's variance is
    (spread * scales + noise), halved off the diagonal.
    """
    weights = 1.0 / (_halves(data.shape[-1]) * (spread * scales + noise[:, None, None]))
    gram = np.array([[float((weights * a * b).sum()) for b in targets] for a in targets])
    right = np.array([float((weights * a * data).sum()) for a in targets])
    size = np.sqrt(np.maximum(np.diag(gram), np.finfo(float).tiny))
    gram = gram / np.outer(size, size) + 1e-9 * np.eye(len(targets))
    upper = cholesky(gram)
    coefficients, _ = nnls(upper, solve_triangular(upper.T, right / size, lower=True))
    found: Array = coefficients / size
    return found


def fitted_spread(difference: Array, noise: Array, scales: Array, spread: float) -> float:
    """The k that gives differences (m, d, d) variance k * scales + noise, half off the diagonal.

    A weighted method of moments: entries count by the inverse square of their variance at the
    present guess `spread`. Never below `LEAST_SPREAD`.
    """
    halves, noise = _halves(difference.shape[-1]), noise[:, None, None]
    weights = scales / np.square(spread * scales + noise)
    explained = float((weights * (np.square(difference) - halves * noise)).sum())
    expected = float((weights * scales * halves).sum())
    return max(explained / expected, LEAST_SPREAD) if expected > 0 else LEAST_SPREAD


def shrunk(data: Array, noise: Array, targets: Array, spread: float) -> Array:
    """Positive definite estimates (m, d, d): the most likely Sigma given noisy `data` (m, d, d).

    Minimises |Sigma - data|_F^2 / (2 noise) + |S|_F^2 / (2 spread) over S by gradient descent; at
    S = 0 the answer is the target itself.
    """
    root = torch.from_numpy(_root(targets))
    observed = torch.from_numpy(_symmetrised(data))
    precision = torch.from_numpy(1.0 / np.maximum(noise, np.finfo(float).tiny))[:, None, None]
    free = torch.zeros_like(observed, requires_grad=True)
    optimiser = torch.optim.Adam([free], lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, _STEPS)
    # One size for all, so that no precision overflows: the minimum stays where it is.
    size = float(precision.max()) + 1.0 / spread
    for _ in range(_STEPS):
        optimiser.zero_grad()
        symmetric = (free + free.mT) / 2
        misfit = (_moved(root, symmetric) - observed).square()
        loss = (misfit * (precision / size)).sum() + symmetric.square().sum() / (spread * size)
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        return _symmetrised(_moved(root, (free + free.mT) / 2).numpy())


def _moved(root: torch.Tensor, symmetric: torch.Tensor) -> torch.Tensor:
    """T^(1/2) (I + S/4)^4 T^(1/2) of roots and S (m, d, d)."""
    quarter = torch.eye(root.shape[-1], dtype=root.dtype) + symmetric / 4
    half = quarter @ quarter @ root
    moved: torch.Tensor = half.mT @ half
    return moved


def positive(matrices: Array, floor: float = FLOOR) -> Array:
    """The nearest matrices (..., d, d) with eigenvalues of at least `floor`."""
    values, vectors = np.linalg.eigh(_symmetrised(matrices))
    return _rebuilt(np.maximum(values, floor), vectors)


def _root(matrices: Array) -> Array:
    values, vectors = np.linalg.eigh(_symmetrised(matrices))
    return _rebuilt(np.sqrt(np.maximum(values, FLOOR)), vectors)


def _rebuilt(values: Array, vectors: Array) -> Array:
    return _symmetrised((vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2))


def _symmetrised(matrices: Array) -> Array:
    both: Array = (matrices + np.swapaxes(matrices, -1, -2)) / 2
    return both


def _halves(dim: int) -> Array:
    """Relative variance of a symmetric matrix's entries: 1 on the diagonal, 1/2 elsewhere."""
    return 0.5 + 0.5 * np.eye(dim)
