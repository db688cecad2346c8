"""Attacks on noisy gradients: Dirac canaries under Poisson sampling, with known answers."""

import numpy as np
import pytest
from scipy import special, stats

from dpsynth.accounting.one_run import best_over_guesses
from dpsynth.assess.audit import roc
from dpsynth.assess.audit.gradients import dirac_scores, repeat_scores, seen_noise
from dpsynth.assess.audit.worlds import WhiteBox
from dpsynth.errors import UsageError


def _seen(
    seed, *, steps=50, count=400, rate=0.2, std=2.0, clips=(1.0,), fresh=None, noise=1.0, size=1.0
):
    """A world of Dirac canaries, its bits and its coins; `fresh`: steps until noise repeats."""
    rng = np.random.default_rng(seed)
    included = rng.random(count) < 0.5
    coins = rng.random((steps, count)) < rate
    clip = np.resize(np.asarray(clips), steps)
    drawn = rng.normal(size=(fresh or steps, count)) * std * noise
    sums = coins * included * (clip * size)[:, None] + drawn[np.arange(steps) % len(drawn)]
    return WhiteBox(sums, clip, std, rate), included, coins


def test_scores_are_the_ratio_of_the_subsampled_gaussians_densities():
    seen, _, _ = _seen(0, clips=(0.5, 1.5), steps=6, count=4000)
    scores = dirac_scores(seen)
    expected = np.zeros(4000)
    for x, clip in zip(seen.sums, seen.clips, strict=True):
        without = stats.norm(0, 2.0).pdf(x)
        expected += np.log((0.8 * without + 0.2 * stats.norm(clip, 2.0).pdf(x)) / without)
    # The deviation is taken from the numbers themselves.
    assert np.corrcoef(scores, expected)[0, 1] > 0.999
    assert np.abs(scores - expected).max() < 0.2


def test_full_batches_give_the_auc_of_the_composed_gaussian():
    """T steps of the plain Gaussian mechanism: mu = sqrt(T) C / sigma."""
    scores, bits = [], []
    for seed in range(10):
        seen, included, _ = _seen(seed, rate=1.0, steps=25, std=5.0)
        scores.append(dirac_scores(seen))
        bits.append(included)
    low, high = roc.auc_interval(np.concatenate(scores), np.concatenate(bits), 0.999)
    assert low <= special.ndtr(1 / np.sqrt(2)) <= high


def test_subsampled_steps_give_the_auc_of_the_optimal_test():
    """Against a simulation of the exact ratio, by densities and with the true deviation."""
    rng = np.random.default_rng(11)
    n, steps, rate, std = 40_000, 20, 0.2, 0.7
    inside = rng.random(n) < 0.5
    x = (rng.random((steps, n)) < rate) * inside + std * rng.normal(size=(steps, n))
    exact = np.log(1 - rate + rate * np.exp((x - 0.5) / std**2)).sum(axis=0)
    found, bits = [], []
    for seed in range(20):
        seen, included, _ = _seen(seed, steps=steps, rate=rate, std=std)
        found.append(dirac_scores(seen))
        bits.append(included)
    low, high = roc.auc_interval(np.concatenate(found), np.concatenate(bits), 0.999)
    assert low - 0.005 <= roc.auc(exact, inside) <= high + 0.005


def test_known_coins_say_more_than_unknown_ones():
    seen, included, coins = _seen(1, steps=40, rate=0.1, std=1.5, count=4000)
    blind, sighted = dirac_scores(seen), dirac_scores(seen, coins)
    assert roc.auc(sighted, included) > roc.auc(blind, included) + 0.05
    ratio = (coins * (seen.sums - 0.5) / 1.5**2).sum(axis=0)
    assert np.corrcoef(sighted, ratio)[0, 1] > 0.999
    with pytest.raises(UsageError, match="coins are"):
        dirac_scores(seen, coins[:2])


def test_steps_without_noise_show_every_canary_that_took_part():
    seen, included, coins = _seen(2, noise=0.0, rate=0.1, std=30.0, count=200)
    assert coins[:, included].any(axis=0).mean() > 0.98
    assert roc.auc(dirac_scores(seen), included) > 0.99
    bound = best_over_guesses(dirac_scores(seen), included, 1e-5, 0.95)
    assert bound.epsilon > 1.0


def test_gradients_that_nothing_clipped_show():
    seen, included, _ = _seen(3, std=4.0, rate=0.1, size=100.0, count=200)
    assert roc.auc(dirac_scores(seen), included) > 0.99
    assert np.isfinite(dirac_scores(seen)).all()


@pytest.mark.parametrize("fresh", [1, 10])
def test_noise_that_repeats_falls_out_of_differences(fresh):
    """The same noise in every step, or again from the start of every tenth one."""
    seen, included, _ = _seen(4, fresh=fresh, rate=0.1, std=30.0, count=200, clips=(0.5, 2.0))
    assert roc.auc(repeat_scores(seen), included) > 0.98
    assert best_over_guesses(repeat_scores(seen), included, 1e-5, 0.95).epsilon > 1.0
    # Step by step such noise hides the canaries as it should.
    assert roc.auc(dirac_scores(seen), included) < 0.7


def test_fresh_noise_leaves_differences_next_to_nothing():
    seen, included, _ = _seen(5, rate=0.1, std=30.0)
    low, high = roc.auc_interval(repeat_scores(seen), included, 0.999)
    assert low <= 0.5 <= high


@pytest.mark.parametrize(("steps", "rate"), [(1, 0.5), (20, 1.0)])
def test_no_difference_is_no_guess(steps, rate):
    seen, included, _ = _seen(6, steps=steps, rate=rate)
    scores = repeat_scores(seen)
    assert (scores == 0).all()
    assert roc.auc(scores, included) == 0.5


def test_honest_steps_never_show_more_than_they_spend():
    """One full step of noise C: epsilon about 4.4 at 1e-5; the bound stays below it."""
    for seed in range(5):
        seen, included, _ = _seen(seed, steps=1, rate=1.0, std=1.0, count=500)
        assert best_over_guesses(dirac_scores(seen), included, 1e-5, 0.95).epsilon < 4.4


def test_noise_is_measured_and_too_little_of_it_is_noticed():
    ratios = []
    for seed in range(200):
        seen, _, _ = _seen(seed, steps=10, count=100, std=50.0)
        noise = seen_noise(seen)
        assert not noise.short
        ratios.append(noise.variance)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.02)
    assert np.std(ratios) == pytest.approx(noise.deviation, rel=0.2)
    assert seen_noise(_seen(0, std=50.0, noise=0.7)[0]).short
    assert seen_noise(_seen(0, std=50.0, noise=0.0)[0]).variance < 0.01
