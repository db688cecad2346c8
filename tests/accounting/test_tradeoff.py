"""The trade-off bounds against closed forms, likelihood-ratio tests and each other."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpsynth.accounting import gaussian, tradeoff
from dpsynth.accounting.compose import epsilon
from dpsynth.accounting.events import GaussianEvent, PoissonGaussianEvent, Unaccounted
from dpsynth.errors import UsageError

RATES = np.array([0.0, 1e-6, 1e-3, 0.01, 0.1, 0.4, 0.5, 0.9, 0.999, 1.0])


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 3.0, 8.0])
def test_a_gaussian_is_mu_gdp_rounded_up(mu):
    made = tradeoff.curve([GaussianEvent(1 / mu)])
    exact = norm.cdf(norm.ppf(RATES) + mu)  # Dong, Roth and Su 2022, equation 6
    for claim in ("present", "absent"):
        found = tradeoff.tprs(made, RATES, claim)
        assert (found >= exact).all()
        assert found == pytest.approx(exact, rel=2e-5, abs=1e-9)
    found, exact = tradeoff.advantage(made), 2 * norm.cdf(mu / 2) - 1
    assert exact <= found <= exact + 1e-9


def test_many_gaussians_are_one():
    parts = tradeoff.curve([GaussianEvent(4.0)] * 9 + [PoissonGaussianEvent(4.0, 1.0, 7)])
    exact = norm.cdf(norm.ppf(0.01) + 1.0)
    assert exact <= tradeoff.tpr(parts, 0.01) <= exact * (1 + 2e-5)


def sampled_test(sigma, rate, steps, bins=900):
    """ROC of the likelihood-ratio test of sampled Gaussians, by brute force on a grid of outcomes.

    Outcomes are cut into bins first, which can only weaken the test.
    """
    edges = np.linspace(-8 * sigma, 1 + 8 * sigma, bins + 1)
    edges[0], edges[-1] = -np.inf, np.inf
    out = np.diff(norm.cdf(edges / sigma))
    there = (1 - rate) * out + rate * np.diff(norm.cdf((edges - 1) / sigma))
    p, q = there, out
    for _ in range(steps - 1):
        p, q = np.multiply.outer(p, there).ravel(), np.multiply.outer(q, out).ravel()
    order = np.argsort(q / p)
    return np.append(0, np.cumsum(q[order])), np.append(0, np.cumsum(p[order]))


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.3, 1), (0.8, 0.05, 1), (1.0, 0.3, 2)])
def test_sampled_steps_are_what_the_best_test_attains(sigma, rate, steps):
    made = tradeoff.curve([PoissonGaussianEvent(sigma, rate, steps)])
    fpr, tpr = sampled_test(sigma, rate, steps)
    asked = np.array([0.001, 0.01, 0.1, 0.5])
    exact = np.interp(asked, fpr, tpr)
    found = tradeoff.tprs(made, asked)
    assert (found >= exact - 1e-12).all()
    assert found == pytest.approx(exact, rel=2e-3)
    # The claim "absent": the same test with the two errors' parts exchanged.
    exact = np.interp(asked, (1 - tpr)[::-1], (1 - fpr)[::-1])
    found = tradeoff.tprs(made, asked, "absent")
    assert (found >= exact - 1e-12).all()
    assert found == pytest.approx(exact, rel=2e-3)
    gap = (tpr - fpr).max()
    assert gap <= tradeoff.advantage(made) <= gap + 1e-3


def test_of_sampled_steps_presence_shows_more_than_absence_at_small_rates():
    made = tradeoff.curve([PoissonGaussianEvent(0.7, 0.01, 20)])
    there, away = tradeoff.tpr(made, 0.001), tradeoff.tpr(made, 0.001, "absent")
    assert there > 1.5 * away
    assert tradeoff.odds(made, [0.001])[0].tpr == there


def test_simulated_attacks_on_many_steps_stay_below():
    sigma, rate, steps, runs = 0.9, 0.1, 40, 40_000
    made = tradeoff.curve([PoissonGaussianEvent(sigma, rate, steps)])
    rng = np.random.default_rng(7)

    def losses(there):
        total = np.zeros(runs)
        for _ in range(steps):
            x = sigma * rng.normal(size=runs) + there * (rng.random(runs) < rate)
            total += np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2)))
        return total

    inside, outside = losses(True), losses(False)
    for fpr in (0.01, 0.1, 0.5):
        seen = (inside > np.quantile(outside, 1 - fpr)).mean()
        bound = tradeoff.tpr(made, fpr)
        assert seen <= bound + 4 * (0.25 / runs) ** 0.5 + 0.01 * bound
        assert seen >= 0.93 * bound  # the optimal test attains it


def test_it_lies_below_what_epsilon_and_delta_promise():
    events = [PoissonGaussianEvent(1.2, 0.02, 500), GaussianEvent(4.0)]
    made, delta = tradeoff.curve(events), 1e-5
    alone = tradeoff.stated(epsilon(events, delta).pessimistic, delta)
    rates = np.linspace(0, 1, 41)
    for claim in ("present", "absent"):
        assert (
            tradeoff.tprs(made, rates, claim) <= tradeoff.tprs(alone, rates, claim) + 1e-9
        ).all()
    assert tradeoff.advantage(made) < tradeoff.advantage(alone)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 6), st.floats(0, 0.3), st.floats(1e-4, 0.999))
def test_epsilon_alone_is_the_two_inequalities(eps, delta, fpr):
    made = tradeoff.stated(eps, delta)
    slow = min(1.0, math.exp(eps) * fpr + delta, 1 - math.exp(-eps) * (1 - fpr - delta))
    assert tradeoff.tpr(made, fpr) == pytest.approx(slow, abs=1e-9)
    most = (math.expm1(eps) + 2 * delta) / (math.exp(eps) + 1)
    assert tradeoff.advantage(made) == pytest.approx(most, abs=1e-9)
    grid = np.linspace(0, 1, 5001)
    gap = (tradeoff.tprs(made, grid) - grid).max()
    assert gap <= tradeoff.advantage(made) + 1e-9


def test_curves_are_concave_and_the_two_claims_are_inverse():
    made = tradeoff.curve([PoissonGaussianEvent(1.0, 0.1, 100)])
    rates = np.linspace(0, 1, 201)
    there = tradeoff.tprs(made, rates)
    assert (np.diff(there) >= 0).all()
    assert (np.diff(there, 2) <= 1e-10).all()
    # FPR a and TPR b of "present" are FPR 1 - b and TPR 1 - a of "absent".
    back = tradeoff.tprs(made, 1 - there, "absent")
    assert back == pytest.approx(1 - rates, abs=2e-5)


def test_nothing_private_promises_all_and_nothing_accounted_promises_nothing():
    none = tradeoff.curve([])
    assert tradeoff.tpr(none, 0.01) == pytest.approx(0.01, abs=1e-9)
    assert tradeoff.advantage(none) == pytest.approx(0.0, abs=1e-9)
    for events in ([GaussianEvent(3.0), Unaccounted("a look")], [GaussianEvent(1e-4)]):
        made = tradeoff.curve(events)
        assert tradeoff.tpr(made, 0.001) == tradeoff.advantage(made) == 1.0
    assert tradeoff.tpr(tradeoff.stated(math.inf, 1e-5), 0.5) == 1.0


def test_the_distance_of_discrete_noise_is_added():
    plain, moved = tradeoff.curve([GaussianEvent(1.0)]), tradeoff.curve([GaussianEvent(1.0)], 0.01)
    expected = tradeoff.tpr(plain, 0.05 + 0.01) + 0.01
    assert tradeoff.tpr(moved, 0.05) == pytest.approx(expected, abs=1e-12)
    assert tradeoff.advantage(moved) == pytest.approx(tradeoff.advantage(plain) + 0.02, abs=1e-9)


def test_odds_are_bayes_rule_on_made_up_people():
    made = tradeoff.curve([GaussianEvent(0.8)])
    row = tradeoff.odds(made, [0.01])[0]
    exact = norm.cdf(norm.ppf(0.01) + 1.25)
    people = 1_000_000  # one in a hundred is in the data
    alarms = people * 0.01 * exact, people * 0.99 * 0.01
    assert row.posteriors[1] == pytest.approx(alarms[0] / sum(alarms), rel=1e-4)
    assert row.posteriors[0] == pytest.approx(exact / (exact + 0.01), rel=1e-4)
    assert [one.fpr for one in tradeoff.odds(made)] == [0.001, 0.01, 0.1]


def test_percentages_round_up():
    assert [tradeoff.percent_up(x) for x in (0.1, 0.1001, 0.10000000001, 0.0, 0.99999)] == [
        "10%",
        "10.1%",
        "10%",
        "0%",
        "100%",
    ]
    assert tradeoff.percent_up(0.00011, 2) == "0.02%"


def test_the_total_variation_is_the_closed_forms():
    made = tradeoff.curve([GaussianEvent(1.3)])
    assert tradeoff.advantage(made) == pytest.approx(gaussian.delta(0.0, 1.3), abs=1e-9)


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_rates_outside_zero_to_one_are_refused(bad):
    made = tradeoff.stated(1.0, 0.0)
    with pytest.raises(UsageError, match="outside"):
        tradeoff.tpr(made, bad)
    with pytest.raises(UsageError, match="expected"):
        tradeoff.odds(made, [bad])
    with pytest.raises(UsageError, match="expected"):
        tradeoff.posterior(bad, 0.5, 0.5)
