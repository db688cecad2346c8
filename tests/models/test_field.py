"""The analytic field against a dense inverse, a regression, its limits, and finite differences."""

import pytest
import torch
from field_checks import assert_regression
from torch import Tensor

from dpsynth.errors import UsageError
from dpsynth.models.field import AnalyticField
from dpsynth.models.flow import euler
from dpsynth.models.seeding import generator

CLASSES, DIM = 3, 4
TIMES = [0.0, 1e-6, 0.25, 0.5, 0.9, 1 - 1e-3, 1.0]


def gaussians(shared: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    source = generator(5)
    root = torch.randn(1 if shared else CLASSES, DIM, DIM, generator=source, dtype=torch.float64)
    covariances = root @ root.mT / DIM + 0.05 * torch.eye(DIM, dtype=torch.float64)
    means = torch.randn(CLASSES, DIM, generator=source, dtype=torch.float64)
    return torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), means, covariances


def dense(x: Tensor, t: float, y: int, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Equations 2 and 3 as printed, by a dense inverse."""
    _, means, covariances = parts
    sigma = covariances[y if len(covariances) > 1 else 0]
    variance = (1 - t) ** 2 * torch.eye(DIM, dtype=torch.float64) + t**2 * sigma
    expected = means[y] + t * sigma @ torch.linalg.inv(variance) @ (x - t * means[y])
    return (expected - x) / (1 - t)


def dense_mixture(x: Tensor, t: float, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Equation 4 with the density of each class as torch has it."""
    weights, means, covariances = parts
    eye = torch.eye(DIM, dtype=torch.float64)
    sigmas = covariances.expand(CLASSES, DIM, DIM)
    density = torch.distributions.MultivariateNormal(
        t * means, (1 - t) ** 2 * eye + t**2 * sigmas
    ).log_prob(x)
    shares = torch.softmax(weights.log() + density, 0)
    return sum(shares[y] * dense(x, t, y, parts) for y in range(CLASSES))  # type: ignore[return-value]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("t", TIMES[:-1])
def test_field_is_the_dense_one(t: float, shared: bool) -> None:
    parts = gaussians(shared)
    field = AnalyticField(*parts, dtype=torch.float64)
    x = 2 * torch.randn(9, DIM, generator=generator(1), dtype=torch.float64)
    times = torch.full((9,), t, dtype=torch.float64)
    labels = torch.arange(9) % CLASSES
    expected = torch.stack([dense(x[i], t, int(labels[i]), parts) for i in range(9)])
    torch.testing.assert_close(field.conditional(x, times, labels), expected, rtol=1e-8, atol=1e-8)
    mixture = torch.stack([dense_mixture(x[i], t, parts) for i in range(9)])
    torch.testing.assert_close(field.unconditional(x, times), mixture, rtol=1e-8, atol=1e-8)


def test_field_solves_the_regression_of_equation_1() -> None:
    """E[z - xi | x_t] is the least-squares fit: its residual is uncorrelated with any f(x_t)."""
    weights, means, covariances = gaussians()
    field = AnalyticField(weights, means, covariances, dtype=torch.float64)
    source, count, t = generator(2), 400_000, 0.6
    labels = torch.multinomial(weights, count, replacement=True, generator=source)
    normal = torch.randn(count, DIM, generator=source, dtype=torch.float64)
    roots = torch.linalg.cholesky(covariances)
    codes = means[labels] + torch.einsum("bde,be->bd", roots[labels], normal)
    assert_regression(field, codes, labels, t, source)


def test_noise_end_limits() -> None:
    """Proposition 3.1: mu_y - x for a class, sum_y pi_y mu_y - x for the null branch."""
    weights, means, covariances = gaussians()
    field = AnalyticField(weights, means, covariances, dtype=torch.float64)
    x = torch.randn(CLASSES, DIM, generator=generator(3), dtype=torch.float64)
    zero, labels = torch.zeros(CLASSES, dtype=torch.float64), torch.arange(CLASSES)
    torch.testing.assert_close(field.conditional(x, zero, labels), means - x)
    torch.testing.assert_close(field.unconditional(x, zero), weights @ means - x)
    torch.testing.assert_close(field.responsibilities(x, zero), weights.expand(CLASSES, -1))


def test_first_order_of_corollary_3_2() -> None:
    weights, means, covariances = gaussians()
    field = AnalyticField(weights, means, covariances, dtype=torch.float64)
    x = torch.randn(CLASSES, DIM, generator=generator(3), dtype=torch.float64)
    labels, step = torch.arange(CLASSES), 1e-4
    at = field.conditional(x, torch.full((CLASSES,), step, dtype=torch.float64), labels)
    slope = (at - (means - x)) / step
    expected = means - x + torch.einsum("yde,ye->yd", covariances, x)
    torch.testing.assert_close(slope, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", TIMES)
def test_finite_everywhere_and_null_label(t: float, dtype: torch.dtype) -> None:
    parts = gaussians()
    field, exact = AnalyticField(*parts, dtype=dtype), AnalyticField(*parts, dtype=torch.float64)
    x = 3 * torch.randn(8, DIM, generator=generator(4), dtype=torch.float64)
    times = torch.full((8,), t, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 3, 0, 1, 3])
    got = field(x, times, labels)
    assert got.dtype == dtype
    assert got.isfinite().all()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(
        got.double(), exact(x, times, labels), rtol=tolerance, atol=tolerance
    )
    null = labels == CLASSES
    torch.testing.assert_close(got[null], field.unconditional(x[null], times[null]))
    torch.testing.assert_close(got[~null], field.conditional(x[~null], times[~null], labels[~null]))


def test_shared_covariance_is_class_covariances_that_are_equal() -> None:
    weights, means, covariances = gaussians(shared=True)
    shared = AnalyticField(weights, means, covariances)
    repeated = AnalyticField(weights, means, covariances.expand(CLASSES, DIM, DIM))
    x, t = torch.randn(5, DIM, generator=generator(1)), torch.full((5,), 0.7)
    labels = torch.arange(5) % (CLASSES + 1)
    torch.testing.assert_close(shared(x, t, labels), repeated(x, t, labels))


def test_flow_of_the_field_ends_at_the_released_gaussian() -> None:
    weights, means, covariances = gaussians()
    field = AnalyticField(weights, means, covariances)
    start = torch.randn(40_000, DIM, generator=generator(6))
    labels = torch.ones(40_000, dtype=torch.long)
    codes = euler(field, start, labels, null=CLASSES, steps=200).double()
    torch.testing.assert_close(codes.mean(0), means[1], rtol=0, atol=0.05)
    torch.testing.assert_close(codes.T.cov(), covariances[1], rtol=0, atol=0.06)


def test_an_absent_class_gets_no_weight() -> None:
    _, means, covariances = gaussians()
    field = AnalyticField(torch.tensor([1.0, 0.0, 1.0]), means, covariances)
    shares = field.responsibilities(means.float(), torch.ones(CLASSES))
    assert shares.isfinite().all()
    assert (shares[:, 1] == 0).all()


@pytest.mark.parametrize(
    ("weights", "covariances", "what"),
    [
        (torch.ones(2), torch.eye(DIM).expand(CLASSES, DIM, DIM), "weights"),
        (torch.ones(CLASSES), torch.eye(DIM).expand(2, DIM, DIM), "covariances"),
        (torch.zeros(CLASSES), torch.eye(DIM)[None], "weights"),
        (-torch.ones(CLASSES), torch.eye(DIM)[None], "weights"),
        (torch.ones(CLASSES), torch.zeros(1, DIM, DIM), "positive definite"),
        (torch.ones(CLASSES), torch.full((1, DIM, DIM), torch.nan), "not finite"),
    ],
)
def test_refuses_what_is_no_mixture(weights: Tensor, covariances: Tensor, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        AnalyticField(weights, torch.zeros(CLASSES, DIM), covariances)
