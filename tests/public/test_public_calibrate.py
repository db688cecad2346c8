import numpy as np
import pytest
import torch

from dpsynth.models.field import AnalyticField
from dpsynth.models.seeding import generator
from dpsynth.public.calibrate import (
    GRID,
    class_gaussians,
    clip_radius,
    empirical_velocity,
    knee,
    plot_tau,
    tau_curve,
    time_weighted,
)


def test_radius_is_a_quantile_of_norms():
    codes = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 2.0]])
    assert clip_radius(codes, 0.5) == pytest.approx(2.0)
    assert clip_radius(codes, 0.999) == pytest.approx(5.0, abs=0.01)


def test_empirical_field_is_the_analytic_one_of_tiny_gaussians():
    """Remark B.5: one component a point, covariance h^2 I, h -> 0."""
    points = torch.randn(30, 4, generator=generator(0), dtype=torch.float64)
    tiny = 1e-10 * torch.eye(4, dtype=torch.float64)
    field = AnalyticField(torch.ones(30), points, tiny[None], dtype=torch.float64)
    x = torch.randn(10, 4, generator=generator(1), dtype=torch.float64)
    for t in (0.05, 0.5, 0.9):
        expected = field.unconditional(x, torch.full((10,), t, dtype=torch.float64))
        torch.testing.assert_close(empirical_velocity(points, x, t), expected)


def test_empirical_field_by_hand():
    """Two points, one dimension, straight from equation 2."""
    points, x, t = torch.tensor([[-1.0], [2.0]]).double(), torch.tensor([[0.3]]).double(), 0.4
    kernel = [np.exp(-((0.3 - t * z) ** 2) / (2 * (1 - t) ** 2)) for z in (-1.0, 2.0)]
    mean = (-kernel[0] + 2.0 * kernel[1]) / sum(kernel)
    assert float(empirical_velocity(points, x, t)) == pytest.approx((mean - 0.3) / (1 - t))


def test_class_gaussians_match_numpy_and_truncate():
    codes = torch.randn(400, 3, generator=generator(2), dtype=torch.float64)
    codes = codes * torch.tensor([2.0, 1.0, 0.3], dtype=torch.float64)
    labels = torch.arange(400) % 2
    weights, means, each = class_gaussians(codes, labels, shared=False, rank=None, floor=1e-6)
    assert weights.tolist() == [0.5, 0.5]
    for y in range(2):
        own = codes[labels == y].numpy()
        np.testing.assert_allclose(means[y].numpy(), own.mean(0), atol=1e-12)
        np.testing.assert_allclose(each[y].numpy(), np.cov(own.T, bias=True), atol=1e-12)
    _, _, shared = class_gaussians(codes, labels, shared=True, rank=None, floor=1e-6)
    torch.testing.assert_close(shared, each.mean(0, keepdim=True))
    _, _, low = class_gaussians(codes, labels, shared=True, rank=1, floor=0.01)
    values = torch.linalg.eigvalsh(low[0])
    torch.testing.assert_close(values[:2], torch.full((2,), 0.01, dtype=torch.float64))


def test_gaussian_data_agree_longer_than_clustered_data():
    """On Gaussian classes the moment model is exact; on classes of two clusters it is not."""
    source = generator(3)
    labels = torch.arange(4_000) % 2
    gaussian = torch.randn(4_000, 2, generator=source) + 2.0 * labels[:, None]
    sides = 4.0 * (torch.arange(4_000) // 2 % 2 * 2 - 1)[:, None] * torch.tensor([1.0, 0.0])
    clusters = 0.3 * torch.randn(4_000, 2, generator=source) + sides
    curves = []
    for codes in (gaussian, clusters):
        fitted = class_gaussians(codes, labels, shared=False, rank=None, floor=1e-3)
        curves.append(tau_curve(codes, labels, AnalyticField(*fitted), seed=0))
    assert min(curves[0].worst[:8]) > 0.99  # t <= 0.4: before the velocity passes through zero
    assert min(curves[1].worst[:8]) < 0.975


def test_knee_of_a_hinge_is_its_bend():
    t = np.array(GRID)
    assert knee(t, np.minimum(1.0, 1.0 - 2.0 * (t - 0.4))) == pytest.approx(0.4)
    assert knee(t, np.ones_like(t)) == GRID[-1]


def test_time_average_against_quadrature():
    t = np.linspace(0.01, 1.0, 100)
    average = time_weighted(t, np.cos(t))
    np.testing.assert_allclose(average, np.sin(t) / t, atol=1e-4)


def test_plot_is_a_png(tmp_path):
    codes = torch.randn(300, 2, generator=generator(4))
    labels = torch.arange(300) % 2
    fitted = class_gaussians(codes, labels, shared=True, rank=None, floor=1e-3)
    curve = tau_curve(codes, labels, AnalyticField(*fitted), seed=0)
    plot_tau(curve, 0.3, tmp_path / "tau.png")
    assert (tmp_path / "tau.png").read_bytes().startswith(b"\x89PNG")
