"""Where guided sampling starts: the plateau edge on made-up curves, and a public rehearsal."""

import numpy as np
import pytest
import torch
from public_helpers import small_plan, stand_in, write_public

from dpsynth.artifacts.files import read_json
from dpsynth.errors import BudgetError
from dpsynth.models.field import AnalyticField
from dpsynth.models.seeding import generator
from dpsynth.planning.release import Moments
from dpsynth.public import start as module
from dpsynth.public.pretrain import pretrain
from dpsynth.public.projection import fit_projection
from dpsynth.public.start import (
    GRID,
    Rehearsal,
    StartCurve,
    frechet,
    plateau_edge,
    plot_start,
    public_draws,
    start_curve,
    uses_plateau,
)

GUIDED = {"method": "guide", "steps": 6, "guidance": 1.0}


def edge(*values: float, noise: float = 0.0) -> float:
    return plateau_edge(np.arange(1, len(values) + 1) / 10, np.array(values), noise)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((10, 10, 20, 30), 0.2),  # the paper's: flat, then sharply up
        ((10, 10.4, 10.4, 10.4), 0.4),  # within 5% of the best
        ((10, 9, 8, 7), 0.4),  # never rises
        ((10, 5, 5.2, 5.3, 5.2), 0.3),  # 5% of the best so far, not of the first
        ((10, 20, 10, 10), 0.1),  # what comes back is not of the plateau
        ((5,), 0.1),
        ((0, 0, 1), 0.2),
    ],
)
def test_plateau_edge(values, expected):
    assert edge(*values) == pytest.approx(expected)


def test_a_rise_within_the_noise_is_flat():
    assert edge(10, 11, 12, 20) == pytest.approx(0.1)
    assert edge(10, 11, 12, 20, noise=1.1) == pytest.approx(0.3)


@pytest.mark.parametrize("knee", [0.15, 0.2, 0.45])
def test_the_edge_of_a_ramp_is_found_on_the_grid(knee):
    t = np.array(GRID)
    curve = 30 + 400 * np.maximum(t - knee, 0)
    assert plateau_edge(t, curve) == pytest.approx(knee)


def test_frechet_distance_of_gaussians():
    source, count = generator(0), 100_000
    wide = torch.randn(count, 3, generator=source) * torch.tensor([1.0, 2.0, 0.5])
    narrow = torch.randn(count, 3, generator=source) + 1.0
    expected = 3.0 + (2.0 - 1.0) ** 2 + 0.5**2
    assert frechet(wide, narrow) == pytest.approx(expected, rel=0.03)
    assert frechet(wide, wide) == pytest.approx(0.0, abs=1e-6)
    few = torch.randn(4, 9, generator=source)  # fewer points than numbers
    assert np.isfinite(frechet(few, few + 1.0)) and frechet(few, few + 1.0) == pytest.approx(9.0)


def two_rings(count: int = 2_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Two thin rings far apart, of unit size."""
    source = generator(3)
    angle = 6.2832 * torch.rand(count, generator=source)
    labels = torch.arange(count) % 2
    ring = torch.stack([angle.cos(), angle.sin()], dim=1)
    side = (labels * 2.0 - 1.0)[:, None] * torch.tensor([2.0, 0.0])
    return ring + 0.05 * torch.randn(count, 2, generator=source) + side, labels


def test_a_start_that_misleads_is_seen_late_and_not_early():
    """The prior is right: the flow of a mixture along the rings. The Gaussians lie upwards."""
    codes, labels = two_rings()
    settings = Moments(covariance="class", floor=1e-3)
    drawn, asked = public_draws(codes, labels, settings, None, generator(0))
    drawn[:, 1] += 5.0
    some = slice(0, 60)
    narrow = 0.02 * torch.eye(2)[None].double()
    field = AnalyticField(torch.ones(60), codes[some], narrow, owners=labels[some])
    curve = start_curve(Rehearsal(codes, labels, drawn, asked, field, 2, 20, 1.0), seed=1)
    assert curve.t == GRID and curve.noise > 0
    assert min(curve.accuracy) > 0.9
    assert curve.frechet[-1] > 2 * min(curve.frechet)
    t0 = plateau_edge(np.array(curve.t), np.array(curve.frechet), curve.noise)
    assert 0.1 <= t0 <= 0.35


def test_the_same_seed_gives_the_same_curve(monkeypatch):
    monkeypatch.setattr(module, "GRID", (0.1, 0.4))
    codes, labels = two_rings(300)
    drawn, asked = public_draws(codes, labels, Moments(), None, generator(0))
    field = AnalyticField(torch.ones(2), torch.zeros(2, 2), torch.eye(2)[None].double())
    given = Rehearsal(codes, labels, drawn, asked, field, 2, 3, 1.5)
    assert start_curve(given, seed=1) == start_curve(given, seed=1)


def test_draws_are_of_the_public_gaussians_of_the_labels_there_are():
    codes, labels = two_rings()
    settings = Moments(covariance="class", floor=1e-3)
    drawn, asked = public_draws(codes, labels * 3, settings, None, generator(0))
    assert asked.unique().tolist() == [0, 3]
    assert drawn.shape == (module.DRAWS, 2) and drawn.dtype == torch.float32
    for label in (0, 1):
        own, real = drawn[asked == 3 * label].double(), codes[labels == label].double()
        torch.testing.assert_close(own.mean(0), real.mean(0), rtol=0, atol=0.25)
        torch.testing.assert_close(own.T.cov(), real.T.cov(), rtol=0, atol=0.25)


def test_draws_of_a_projection_are_lifted():
    source = generator(0)
    codes = torch.randn(500, 6, generator=source) * torch.tensor([3.0, 2.0, 1.0, 0.3, 0.3, 0.3])
    projection = fit_projection(codes, 2)
    settings = Moments(covariance="shared")
    drawn, _ = public_draws(codes, torch.arange(500) % 5, settings, projection, generator(1))
    assert drawn.shape == (module.DRAWS, 6)
    off = drawn.double() - projection.lift(projection.project(drawn))
    assert float(off.square().sum(1).mean()) == pytest.approx(4 * projection.residual, rel=0.15)


def test_a_guided_plan_has_its_start_in_the_calibration(tmp_path):
    path = write_public(tmp_path / "public.npz")
    plan = small_plan("pca", path=path, sampling=GUIDED)
    assert uses_plateau(plan)
    verified = stand_in(plan, tmp_path / "run")
    facts = pretrain(verified)
    start = read_json(verified.run.calibration)["start"]
    assert start == facts["start"]
    curve = start["curve"]
    assert curve["t"] == list(GRID) and {len(curve[k]) for k in ("accuracy", "frechet")} == {12}
    values = np.array(curve["frechet"])
    assert start["t0"] == plateau_edge(np.array(GRID), values, curve["noise"])
    assert (verified.run.public / "start.png").read_bytes().startswith(b"\x89PNG")
    assert pretrain(verified) == facts
    verified.run.transcript.write_text("{}\n")
    other = small_plan("pca", path=path, sampling={**GUIDED, "steps": 7})
    with pytest.raises(BudgetError, match="would change"):
        pretrain(stand_in(other, verified.run.root))


@pytest.mark.parametrize("sampling", [{"method": "flow"}, {"method": "guide", "start": 0.2}])
def test_no_other_plan_measures_it(tmp_path, sampling):
    plan = small_plan("pca", path=write_public(tmp_path / "public.npz"), sampling=sampling)
    assert not uses_plateau(plan)
    verified = stand_in(plan, tmp_path / "run")
    assert "start" not in pretrain(verified)
    assert not (verified.run.public / "start.png").exists()


def test_more_conditions_than_public_classes(tmp_path):
    """Labels modulo conditions: conditions without public codes are not asked for."""
    private = small_plan().private.model_dump()
    names = [f"c{n}" for n in range(7)]
    plan = small_plan(
        "pca",
        path=write_public(tmp_path / "public.npz"),
        sampling=GUIDED,
        private={**private, "classes": names},
    )
    facts = pretrain(stand_in(plan, tmp_path / "run"))
    assert 0 < facts["start"]["t0"] <= GRID[-1]


def test_plot(tmp_path):
    flat = (1.0,) * len(GRID)
    plot_start(StartCurve(GRID, flat, flat, flat, 0.1), 0.2, tmp_path / "start.png")
    assert (tmp_path / "start.png").stat().st_size > 5_000
