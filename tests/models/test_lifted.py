"""The low-rank-plus-isotropic field against the dense one."""

import pytest
import torch

from dpsynth.errors import UsageError
from dpsynth.models.field import AnalyticField
from dpsynth.models.flow import euler
from dpsynth.models.lifted import LiftedField
from dpsynth.models.seeding import generator

DIM, P, CLASSES, CELLS = 9, 3, 4, 2
RESIDUAL = 0.3


def both(
    dtype: torch.dtype = torch.float64, owners: torch.Tensor | None = None
) -> tuple[LiftedField, AnalyticField]:
    """One mixture, as lifted from p numbers and as dense d x d covariances."""
    source, count = generator(0), CLASSES * CELLS
    basis = torch.linalg.qr(torch.randn(DIM, P, generator=source).double())[0].T
    centre = torch.randn(DIM, generator=source).double()
    means = 2 * torch.randn(count, P, generator=source).double()
    root = torch.randn(count, P, P, generator=source).double()
    covariances = root @ root.mT + 0.05 * torch.eye(P).double()
    weights = torch.rand(count, generator=source).double() + 0.1
    weights[1] = 0.0
    owners = torch.arange(count) // CELLS if owners is None else owners
    inner = AnalyticField(weights, means, covariances, owners=owners, dtype=dtype)
    off = torch.eye(DIM).double() - basis.T @ basis
    dense = basis.T @ covariances @ basis + RESIDUAL * off
    whole = AnalyticField(weights, means @ basis + centre, dense, owners=owners, dtype=dtype)
    return LiftedField(inner, basis, centre, RESIDUAL), whole


def points(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source, count = generator(1), 300
    x = 2 * torch.randn(count, DIM, generator=source).to(dtype)
    return x, torch.linspace(0, 1, count).to(dtype), torch.arange(count) % (CLASSES + 1)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_equal_to_the_dense_field(dtype, error):
    lifted, dense = both(dtype)
    x, t, y = points(dtype)
    assert (lifted.dim, lifted.classes, lifted.dtype) == (DIM, CLASSES, dtype)
    own = y % CLASSES
    for found, expected in (
        (lifted(x, t, y), dense(x, t, y)),
        (lifted.conditional(x, t, own), dense.conditional(x, t, own)),
        (lifted.unconditional(x, t), dense.unconditional(x, t)),
        (lifted.responsibilities(x, t), dense.responsibilities(x, t)),
    ):
        torch.testing.assert_close(found, expected, rtol=error, atol=error)


def test_finite_at_both_ends():
    lifted, _ = both(torch.float32)
    x, _, y = points(torch.float32)
    for t in (0.0, 1.0):
        assert lifted(x, torch.full((len(x),), t), y).isfinite().all()


def test_the_flow_ends_at_the_lifted_gaussian():
    basis = torch.eye(DIM)[:P].double()
    inner = AnalyticField(torch.ones(1), torch.full((1, P), 1.5), 0.5 * torch.eye(P)[None])
    field = LiftedField(inner, basis, torch.zeros(DIM).double(), RESIDUAL)
    start = torch.randn(20_000, DIM, generator=generator(2))
    labels = torch.zeros(20_000, dtype=torch.int64)
    ended = euler(field, start, labels, null=1, steps=100)
    expected = torch.tensor([0.5] * P + [RESIDUAL] * (DIM - P))
    torch.testing.assert_close(ended.mean(0)[:P], torch.full((P,), 1.5), rtol=0, atol=0.03)
    torch.testing.assert_close(ended.var(0), expected, rtol=0.05, atol=0)


def test_what_does_not_fit_is_refused():
    inner = AnalyticField(torch.ones(1), torch.zeros(1, P), torch.eye(P)[None])
    basis, centre = torch.eye(DIM)[:P], torch.zeros(DIM)
    for wrong in ((basis[:2], centre, 1.0), (basis, centre[1:], 1.0)):
        with pytest.raises(UsageError, match="was given a basis"):
            LiftedField(inner, *wrong)
    with pytest.raises(UsageError, match="orthonormal"):
        LiftedField(inner, 2 * basis, centre, 1.0)
    for residual in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="residual variance"):
            LiftedField(inner, basis, centre, residual)
