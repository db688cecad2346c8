"""Likelihood ratios behind the attacks on moments, against theory, densities and brute force."""

import itertools

import numpy as np
import pytest
from scipy import special, stats

from dpsynth.assess.audit import roc
from dpsynth.assess.audit.detector import Sighting, bit_scores, known_rest, noise_level
from dpsynth.errors import UsageError


def _world(seed, *, count=40, size=600, length=1.0, noise=1.0, extra=1.0):
    """C' (m, k) of rows of about `length`, bits, and r with `noise` and contributions * `extra`."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(count, size)) * length / np.sqrt(size)
    bits = rng.random(count) < 0.5
    seen = extra * (parts.T @ bits) + noise * rng.normal(size=size)
    return parts, bits, seen


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
def test_the_ratio_of_one_record_is_that_of_the_gaussian_mechanism(mu):
    rng = np.random.default_rng(1)
    n = 20_000
    direction = rng.normal(size=(n, 3))
    parts = mu * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    inside = rng.random(n) < 0.5
    seen = inside[:, None] * parts + rng.normal(size=(n, 3))
    scores = known_rest(parts, seen)
    density = stats.multivariate_normal(np.zeros(3)).logpdf
    assert np.allclose(scores, density(seen - parts) - density(seen))
    # N(+-mu^2 / 2, mu^2): a test against the whole distribution, and the AUC that follows.
    for side, mean in ((inside, mu**2 / 2), (~inside, -(mu**2) / 2)):
        assert stats.kstest(scores[side], "norm", (mean, mu)).pvalue > 1e-3
    predicted = special.ndtr(mu / np.sqrt(2))
    low, high = roc.auc_interval(scores, inside, 0.999)
    assert low <= predicted <= high
    for fpr in (0.01, 0.1):  # the mechanism's own trade-off curve G_mu
        found = roc.tpr_at_fpr(scores, inside, fpr, 0.999)
        below, above = found.tpr_interval
        assert below - 0.02 <= special.ndtr(special.ndtri(fpr) + mu) <= above + 0.02


def test_scores_are_the_gaussian_ratio_with_the_other_bits_as_noise():
    parts, _, seen = _world(2, count=7, size=11, length=1.7)
    scores = bit_scores(Sighting.of(parts, seen), level=1.0)
    for i in range(7):
        others = np.delete(parts, i, axis=0)
        covariance = np.eye(11) + others.T @ others / 4
        mean = others.sum(axis=0) / 2
        with_it = stats.multivariate_normal(mean + parts[i], covariance).logpdf(seen)
        without = stats.multivariate_normal(mean, covariance).logpdf(seen)
        assert scores[i] == pytest.approx(with_it - without, rel=1e-9, abs=1e-9)


def test_orthogonal_canaries_have_the_exact_ratio():
    rng = np.random.default_rng(3)
    parts = np.linalg.qr(rng.normal(size=(30, 30)))[0][:12] * rng.uniform(0.2, 3, (12, 1))
    seen = parts.T @ (rng.random(12) < 0.5) + rng.normal(size=30)
    scores = bit_scores(Sighting.of(parts, seen), level=1.0)
    assert np.allclose(scores, known_rest(parts, np.tile(seen, (12, 1))))


def test_scores_follow_the_exact_posterior_of_each_bit():
    """All 2^m settings of the bits, weighed by their density: nothing can be better than this."""
    own, exact, truth = [], [], []
    bits = np.array(list(itertools.product([0, 1], repeat=8)), np.float64)
    for seed in range(150):
        parts, inside, seen = _world(seed, count=8, size=6, length=1.0)
        likely = -0.5 * np.square(seen - bits @ parts).sum(axis=1)
        one = [special.logsumexp(likely[bits[:, i] == 1]) for i in range(8)]
        none = [special.logsumexp(likely[bits[:, i] == 0]) for i in range(8)]
        exact.append(np.subtract(one, none))
        own.append(bit_scores(Sighting.of(parts, seen), level=1.0))
        truth.append(inside)
    own, exact, truth = (np.concatenate(part) for part in (own, exact, truth))
    assert np.corrcoef(own, exact)[0, 1] > 0.99
    assert abs(roc.auc(own, truth) - roc.auc(exact, truth)) < 0.01


@pytest.mark.parametrize("mu", [0.4, 1.0])
def test_an_honest_world_gives_the_auc_that_theory_predicts(mu):
    found, inside = [], []
    for seed in range(25):
        parts, bits, seen = _world(seed, count=60, size=2000, length=mu)
        found.append(bit_scores(Sighting.of(parts, seen)))
        inside.append(bits)
    scores, bits = np.concatenate(found), np.concatenate(inside)
    low, high = roc.auc_interval(scores, bits, 0.999)
    # Canaries are nearly orthogonal: little is lost to the others.
    assert low - 0.01 <= special.ndtr(mu / np.sqrt(2)) <= high + 0.01


def test_absent_noise_shows_every_bit_however_weak_the_canaries_are():
    parts, bits, seen = _world(5, count=80, size=300, length=0.05, noise=0.0)
    sighting = Sighting.of(parts, seen)
    assert roc.auc(bit_scores(sighting), bits) == 1.0
    assert noise_level(sighting).variance < 1e-6
    assert noise_level(sighting).short
    # With noise as promised the same canaries are hidden.
    parts, bits, seen = _world(5, count=80, size=300, length=0.05)
    assert abs(roc.auc(bit_scores(Sighting.of(parts, seen)), bits) - 0.5) < 0.2


@pytest.mark.parametrize("extra", [3.0, 8.0, 100.0])
def test_contributions_that_are_too_long_show_though_others_overlap(extra):
    rng = np.random.default_rng(6)
    shared = rng.normal(size=400)
    parts = (rng.normal(size=(60, 400)) + 0.5 * shared) / 20
    bits = rng.random(60) < 0.5
    seen = extra * (parts.T @ bits) + rng.normal(size=400)
    scores = bit_scores(Sighting.of(parts, seen))
    assert roc.auc(scores, bits) >= (0.95 if extra < 5 else 1.0)


def test_honest_noise_is_never_taken_for_too_little_or_for_long_contributions():
    for seed in range(40):
        parts, _, seen = _world(seed, count=30, size=500, length=0.5)
        noise = noise_level(Sighting.of(parts, seen))
        assert abs(noise.variance - 1) < 5 * noise.deviation
        assert not noise.short
    parts, _, seen = _world(0, count=30, size=4000, length=0.5, noise=0.7)
    short = noise_level(Sighting.of(parts, seen))
    assert short.variance == pytest.approx(0.49, abs=0.06)
    assert short.short


def test_sightings_add_up_to_one_of_all_numbers():
    parts, _, seen = _world(7)
    halves = Sighting.of(parts[:, :250], seen[:250]) + Sighting.of(parts[:, 250:], seen[250:])
    whole = Sighting.of(parts, seen)
    assert np.allclose(bit_scores(halves), bit_scores(whole), atol=1e-6)
    assert halves.size == whole.size == 600


def test_canaries_that_add_nothing_or_the_same_leave_the_scores_finite():
    parts, _, seen = _world(8, count=6, size=50)
    parts[1], parts[2] = 0.0, parts[0]
    for part in (seen, parts.T @ np.array([1.0, 0, 1, 0, 1, 0])):
        scores = bit_scores(Sighting.of(parts, part))
        assert np.isfinite(scores).all()
        assert scores[1] == pytest.approx(0, abs=1e-9)
        assert scores[0] == pytest.approx(scores[2], rel=1e-6)


def test_nothing_planted_gives_zeros_and_shapes_are_checked():
    scores = bit_scores(Sighting.of(np.zeros((4, 9)), np.ones(9)))
    assert scores.tolist() == [0.0] * 4
    with pytest.raises(UsageError, match="Gram matrix"):
        Sighting(np.eye(3), np.ones(2), 1.0, 5)
