"""The released mixture: as drawn, as a field, as distilled, and as one Gaussian a class."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from dpsynth.errors import MissingError
from dpsynth.models.field import AnalyticField
from dpsynth.models.flow import euler
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.release import Cells
from dpsynth.planning.training import Distillation
from dpsynth.planning.velocity import Velocity
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released import distill as module
from dpsynth.released.estimate import ClassGaussians, ClassMixtures, as_mixtures
from dpsynth.released.gaussians import ReleasedMixture, load_mixture

CLASSES, CELLS, DIM = 2, 3, 2


def mixtures() -> ClassMixtures:
    """Cells that do not touch; the first class has no use for its second cell, which is far off."""
    means = np.array([[[3, 0], [50, 50], [-3, 0]], [[0, 3], [0, -3], [3, 3]]], dtype=float)
    spread = np.array([[0.04, 0.02], [0.02, 0.02]])
    scales = np.array([[1.0, 1.0, 2.0], [0.5, 1.0, 1.5]])
    shares = np.array([[0.7, 0.0, 0.3], [0.5, 0.4, 0.1]])
    return ClassMixtures(np.array([0.4, 0.6]), shares, means, scales[..., None, None] * spread)


def gaussians() -> ClassGaussians:
    """One Gaussian a class, of the moments of `mixtures`."""
    made = mixtures()
    means = np.einsum("yk,ykd->yd", made.shares, made.means)
    offsets = made.means - means[:, None]
    within = np.einsum("yk,ykde->yde", made.shares, made.covariances)
    between = np.einsum("yk,ykd,yke->yde", made.shares, offsets, offsets)
    return ClassGaussians(made.weights, means, within + between)


def cells_of(codes: torch.Tensor) -> torch.Tensor:
    """The nearest of all class-cells y * K + k."""
    means = torch.from_numpy(mixtures().means).flatten(0, 1)
    return torch.cdist(codes.double(), means).argmin(1)


def test_draws_have_the_shares_and_moments_of_their_class() -> None:
    made, count = mixtures(), 60_000
    labels = torch.arange(count) % CLASSES
    codes = ReleasedMixture(made).draw(labels, generator(0)).double()
    cells = cells_of(codes)
    for y in range(CLASSES):
        shares = cells[labels == y].bincount(minlength=CLASSES * CELLS) / (count / CLASSES)
        expected = np.zeros((CLASSES, CELLS))
        expected[y] = made.shares[y]
        # Six standard deviations of a share. Cells of other classes and unused ones: never.
        np.testing.assert_allclose(shares.numpy(), expected.flatten(), atol=0.018)
        assert (shares.numpy()[expected.flatten() == 0] == 0).all()
        for k in np.flatnonzero(made.shares[y]).tolist():
            own = codes[(labels == y) & (cells == y * CELLS + k)]
            np.testing.assert_allclose(own.mean(0), made.means[y, k], atol=0.02)
            np.testing.assert_allclose(own.T.cov(), made.covariances[y, k], rtol=0.1, atol=0.003)


def test_draws_have_the_moments_of_the_whole_class() -> None:
    whole = gaussians()
    for y in range(CLASSES):
        codes = ReleasedMixture(mixtures()).draw(torch.full((50_000,), y), generator(y)).double()
        np.testing.assert_allclose(codes.mean(0), whole.means[y], atol=0.08)
        np.testing.assert_allclose(codes.T.cov(), whole.covariances[y], rtol=0.03, atol=0.08)


@pytest.mark.parametrize("shares", [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)])
def test_one_live_cell_is_always_drawn(shares: tuple[float, ...]) -> None:
    made = dataclasses.replace(mixtures(), shares=np.array([shares, shares]))
    mixture, labels = ReleasedMixture(made), torch.arange(2000) % CLASSES
    components = mixture._components(labels, generator(1))
    assert (components == labels * CELLS + shares.index(1.0)).all()
    codes = mixture.draw(labels, generator(1))
    assert codes.isfinite().all()
    for t in (0.0, 0.5, 1.0):
        assert mixture.field(codes, torch.full((2000,), t), labels).isfinite().all()


def test_one_gaussian_a_class_is_what_it_was_to_the_bit() -> None:
    """Draws take no extra coin, and the field is that of plain class Gaussians."""
    plain, labels = gaussians(), torch.arange(500) % CLASSES
    mixture = ReleasedMixture(as_mixtures(plain))
    means, covariances = torch.from_numpy(plain.means), torch.from_numpy(plain.covariances)
    values, basis = torch.linalg.eigh(covariances)
    roots = (basis * values.sqrt()[:, None]).float()
    normal = torch.randn(500, DIM, generator=generator(3))
    expected = means.float()[labels] + torch.einsum("bde,be->bd", roots[labels], normal)
    codes = mixture.draw(labels, generator(3))
    assert torch.equal(codes, expected)
    field = AnalyticField(torch.from_numpy(plain.weights).float(), means.float(), covariances)
    at = codes, torch.linspace(0, 1, 500), torch.arange(500) % (CLASSES + 1)
    assert torch.equal(mixture.field(*at), field(*at))
    assert (mixture.classes, mixture.dim) == (CLASSES, DIM)
    assert torch.equal(mixture.weights, torch.from_numpy(plain.weights).float())


def test_flow_of_the_field_ends_where_draws_do() -> None:
    made, count = mixtures(), 20_000
    mixture, labels = ReleasedMixture(made), torch.arange(count) % CLASSES
    start = torch.randn(count, DIM, generator=generator(2))
    codes = euler(mixture.field, start, labels, null=CLASSES, steps=200)
    drawn = mixture.draw(labels, generator(4))
    for y in range(CLASSES):
        found, expected = (
            cells_of(some[labels == y]).bincount(minlength=CLASSES * CELLS) / (count / CLASSES)
            for some in (codes, drawn)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0.025)


def test_student_learns_the_cells() -> None:
    """Distilled towards the mixture it beats what one Gaussian a class could ever teach."""
    mixture, single = ReleasedMixture(mixtures()), ReleasedMixture(as_mixtures(gaussians()))
    settings = Distillation(steps=300, batch=256, horizon=1.0, learning_rate=3e-3)
    with seeded_initialisation(0):
        student = build_velocity(Velocity(width=64, depth=2), DIM, CLASSES)
    taught = module.teach(
        student, nn.Identity(), mixture, settings, horizon=1.0, source=generator(1)
    )
    at = module._inputs(mixture, 4000, generator(9))
    for null in (False, True):
        rows = (at[2] == CLASSES) == null
        some = at[0][rows], at[1][rows], at[2][rows]
        with torch.no_grad():
            exact = mixture.field(*some)
            error = (taught(*some) - exact).square().mean()
            floor = (single.field(*some) - exact).square().mean()
        assert error < 0.1 * floor


def test_a_plan_with_cells_is_not_served_from_class_moments(tiny: VerifiedPlan) -> None:
    stages = tiny.plan.stages
    assert stages.moments is not None
    moments = stages.moments.model_copy(update={"cells": Cells()})
    plan = tiny.plan.model_copy(update={"stages": stages.model_copy(update={"moments": moments})})
    with pytest.raises(MissingError, match="not every round"):
        load_mixture(tiny.run, plan)
