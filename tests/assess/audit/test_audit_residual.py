"""Velocity residual and likelihood ratios: exact fields, and a model that learnt its records."""

import math

import numpy as np
import pytest
import torch
from scipy import special

from dpsynth.assess.audit import roc
from dpsynth.assess.audit.reference import References, offline_scores, online_scores
from dpsynth.assess.audit.residual import Draws, by_class, residual_scores, residuals
from dpsynth.errors import UsageError
from dpsynth.models.flow import flow_loss
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import MlpVelocity


def _zero(x, t, y):
    return torch.zeros_like(x)


def test_residuals_of_a_field_that_is_zero_are_the_targets_own_length():
    draws = Draws.fixed(3, times=(0.1, 0.7), draws=6)
    codes = np.random.default_rng(0).normal(size=(5, 3))
    found = residuals(_zero, codes, np.zeros(5, np.int64), draws)
    expected = np.square(codes[:, None] - draws.noise[None]).mean(axis=(1, 2))
    assert np.allclose(found, expected[:, None], rtol=1e-5)


def test_residuals_are_those_of_single_calls_whatever_the_blocks(monkeypatch):
    with seeded_initialisation(1):
        model = MlpVelocity(4, 3, 16, 1).eval()
        torch.nn.init.normal_(model.leave.weight)
    draws = Draws.fixed(4, draws=3)
    codes = np.random.default_rng(1).normal(size=(7, 4))
    labels = np.arange(7) % 3
    found = residuals(model, codes, labels, draws)
    xi = torch.from_numpy(draws.noise).float()
    for i in range(7):
        for j, t in enumerate(draws.times.tolist()):
            z = torch.from_numpy(codes[i]).float()
            x = (1 - t) * xi + t * z
            with torch.no_grad():
                v = model(x, torch.full((3,), t), torch.full((3,), int(labels[i])))
            assert found[i, j] == pytest.approx(float((v - (z - xi)).square().mean()), rel=1e-4)
    monkeypatch.setattr("dpsynth.assess.audit.residual._POINTS", 6)
    assert np.allclose(found, residuals(model, codes, labels, draws), rtol=1e-5)


def test_draws_are_fixed_and_come_in_pairs():
    first, second = Draws.fixed(5), Draws.fixed(5)
    assert (first.noise == second.noise).all()
    assert np.allclose(first.noise.sum(axis=0), 0)
    for wrong in ({"draws": 0}, {"times": ()}, {"times": (1.0,)}):
        with pytest.raises(UsageError, match="residual needs times"):
            Draws.fixed(5, **wrong)


@pytest.fixture(scope="module")
def overfitted():
    """A model that saw 24 of 48 random codes again and again, without any privacy."""
    rng = np.random.default_rng(2)
    codes, labels = rng.normal(size=(48, 6)), np.arange(48) % 2
    with seeded_initialisation(2):
        model = MlpVelocity(6, 2, 48, 2)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    source = generator(2)
    z, y = (
        torch.from_numpy(codes[:24]).float().repeat(4, 1),
        torch.from_numpy(labels[:24]).repeat(4),
    )
    for _ in range(200):
        optimiser.zero_grad()
        flow_loss(model, z, y, generator=source).backward()
        optimiser.step()
    return model.eval(), codes, labels, np.arange(48) < 24


def test_a_model_that_learnt_its_records_by_heart_is_seen(overfitted):
    model, codes, labels, member = overfitted
    found = residuals(model, codes, labels, Draws.fixed(6))
    assert roc.auc(residual_scores(found, labels), member) > 0.9
    with seeded_initialisation(3):
        fresh = MlpVelocity(6, 2, 48, 2).eval()
    usual = residuals(fresh, codes, labels, Draws.fixed(6))
    low, high = roc.auc_interval(residual_scores(usual, labels), member, 0.999)
    assert low <= 0.5 <= high
    better = roc.auc(residual_scores(found, labels, usual), member)
    assert better >= roc.auc(residual_scores(found, labels), member) - 0.02
    assert better > 0.95


def test_a_field_that_knows_nothing_of_any_code_gives_no_guess():
    codes = np.random.default_rng(4).normal(size=(30, 4))
    found = residuals(_zero, codes, np.zeros(30, np.int64), Draws.fixed(4))
    # The same field as its own reference: nothing is left.
    scores = residual_scores(found, np.zeros(30, np.int64), found)
    assert (scores == 0).all()
    assert roc.auc(scores, np.arange(30) < 10) == 0.5


def test_a_residual_that_is_not_finite_is_the_worst_fit():
    def broken(x, t, y):
        return torch.where(y[:, None] == 1, torch.nan, 0.0).expand_as(x)

    labels = np.array([0] * 6 + [1])
    found = residuals(broken, np.ones((7, 2)), labels, Draws.fixed(2))
    scores = residual_scores(found, labels)
    assert np.isfinite(scores).all()
    assert scores[6] == scores.min() < scores[0]


def test_calibration_by_class_takes_away_what_a_class_has_in_common():
    rng = np.random.default_rng(5)
    labels = np.repeat([0, 1, 2], [50, 50, 2])
    values = rng.normal(size=(102, 2)) * np.array([1.0, 9.0, 1.0])[labels, None] + 5.0 * labels[
        :, None
    ] * np.array([1.0, -1.0])
    found = by_class(values, labels)
    for label in (0, 1):
        assert np.allclose(found[labels == label].mean(axis=0), 0)
        assert np.allclose(found[labels == label].std(axis=0), 1)
    # Two of a class say nothing of it: they are measured against all.
    assert np.allclose(found[100:], ((values - values.mean(0)) / values.std(0))[100:])
    assert (by_class(np.full((9, 2), 1e300), np.zeros(9, np.int64)) == 0).all()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="do not fit"):
        residuals(_zero, np.ones((3, 4)), np.zeros(3, np.int64), Draws.fixed(5))
    with pytest.raises(UsageError, match="do not fit"):
        residual_scores(np.ones((3, 2)), np.zeros(4, np.int64))
    with pytest.raises(UsageError, match="do not fit"):
        residual_scores(np.ones((3, 2)), np.zeros(3, np.int64), np.ones((3, 5)))


def _models(seed, *, models=16, m=4000, q=1, shift=1.0, hard=3.0, noise=1.0):
    """Statistics N(own level + shift if inside, noise^2) of reference models and of a target."""
    rng = np.random.default_rng(seed)
    level = hard * rng.normal(size=(m, q))
    inside = rng.random((models + 1, m)) < 0.5
    values = level + shift * inside[..., None] + noise * rng.normal(size=(models + 1, m, q))
    return values[0], inside[0], References(values[1:], inside[1:])


@pytest.mark.parametrize("q", [1, 4])
def test_ratios_reach_the_auc_that_theory_predicts(q):
    """With levels known, a shift of sqrt(q) deviations: AUC = Phi(sqrt(q / 2) shift)."""
    target, inside, references = _models(0, models=80, q=q, shift=1.0)
    predicted = special.ndtr(math.sqrt(q / 2))
    for scores in (
        online_scores(target, references, "shared"),
        offline_scores(target, references, "shared"),
    ):
        # Levels are known up to the mean of 80 models.
        assert roc.auc(scores, inside) == pytest.approx(predicted, abs=0.02)
    assert roc.auc(target.sum(axis=1), inside) < predicted - 0.1  # without references


def test_ratios_are_those_of_the_densities():
    from scipy import stats

    target, _, references = _models(1, models=70, m=50, q=2)
    scores = online_scores(target, references)  # many models: a variance of each one's own
    for i in range(50):
        expected = 0.0
        for j in range(2):
            values, mine = references.statistics[:, i, j], references.inside[:, i]
            for sign, side in ((1, mine), (-1, ~mine)):
                own = stats.norm(values[side].mean(), values[side].std(ddof=1))
                expected += sign * own.logpdf(target[i, j])
        assert scores[i] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_few_models_still_help_and_a_missing_side_is_filled():
    target, inside, references = _models(2, models=4)
    count = references.inside.sum(axis=0)
    assert (count == 0).any()
    assert (count == 4).any()
    for scores in (online_scores(target, references), offline_scores(target, references)):
        assert np.isfinite(scores).all()
        assert roc.auc(scores, inside) > roc.auc(target[:, 0], inside) + 0.1
        # Candidates without one side are no worse off than a coin.
        lonely = (count == 0) | (count == 4)
        assert roc.auc(scores[lonely], inside[lonely]) > 0.6


def test_references_that_saw_nothing_of_use_give_chance():
    target, inside, references = _models(3, shift=0.0)
    for scores in (online_scores(target, references), offline_scores(target, references)):
        low, high = roc.auc_interval(scores, inside, 0.999)
        assert low <= 0.5 <= high


def test_models_that_all_say_the_same_give_no_guess():
    target = np.ones((6, 1))
    inside = np.array([[True, False] * 3] * 2 + [[False, True] * 3] * 2)
    references = References(np.ones((4, 6, 1)), inside)
    assert len(set(online_scores(target, references).tolist())) == 1
    assert len(set(offline_scores(target, references).tolist())) == 1


def test_too_few_or_foreign_references_are_refused():
    target, _, references = _models(4, m=10)
    with pytest.raises(UsageError, match="expected finite numbers"):
        online_scores(target[:5], references)
    with pytest.raises(UsageError, match="both kinds"):
        online_scores(target, References(references.statistics, np.ones((16, 10), bool)))
    one = References(references.statistics[:2], np.array([[True] * 10, [False] * 10]))
    assert np.isfinite(online_scores(target, one)).all()
    with pytest.raises(UsageError, match="two reference models"):
        online_scores(target, one, "own")
    with pytest.raises(UsageError, match="do not fit"):
        References(references.statistics, references.inside[:, :3])
    with pytest.raises(UsageError, match="not finite"):
        References(np.full((2, 3, 1), np.nan), np.ones((2, 3), bool))
