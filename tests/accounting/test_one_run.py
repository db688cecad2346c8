"""The one-run bound against fractions, mpmath, linear programs and mechanisms of known epsilon."""

import itertools
import math
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from dpsynth.accounting import gaussian, one_run
from dpsynth.accounting.one_run import best_over_guesses, epsilon_lower_bound, p_value
from dpsynth.errors import UsageError

SEED = 20230515


def slow_p_value(v, r, m, epsilon, delta):
    """Theorem 5.2 term by term, in 60 digits."""
    with mpmath.workdps(60):
        q = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon)))
        mass = [mpmath.binomial(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
        alpha = max((mpmath.fsum(mass[max(v - i, 0) : v]) / i for i in range(1, m + 1)), default=0)
        return mpmath.fsum(mass[v:]) + 2 * m * mpmath.mpf(delta) * alpha


@pytest.mark.parametrize(
    ("v", "r", "m"), [(1, 1, 1), (0, 4, 9), (7, 9, 12), (30, 40, 40), (75, 100, 130)]
)
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.01])
def test_p_values_are_mpmaths_rounded_up(v, r, m, epsilon, delta):
    expected = min(mpmath.mpf(1), slow_p_value(v, r, m, epsilon, delta))
    found = p_value(v, r, m, epsilon, delta)
    assert found >= expected - mpmath.mpf(10) ** -17
    assert found == pytest.approx(float(expected), rel=1e-10)


def test_at_epsilon_zero_it_is_the_fraction_of_coin_tosses():
    for r, v in [(5, 4), (20, 15), (64, 40)]:
        exact = Fraction(sum(math.comb(r, k) for k in range(v, r + 1)), 2**r)
        found = Fraction(p_value(v, r, r, 0.0, 0.0))
        assert exact <= found <= exact * (1 + Fraction(1, 10**10))


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 7.5])
def test_ten_thousand_canaries_stay_within_the_slack(epsilon):
    m = 10_000
    q = 1 / (1 + math.exp(-epsilon))
    for v in (math.ceil(m * q), min(m, math.ceil(m * q + 2.5 * (m * q * (1 - q)) ** 0.5)), m):
        with mpmath.workdps(40):
            p = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon)))
            term = mpmath.binomial(m, v) * p**v * (1 - p) ** (m - v)
            exact = mpmath.mpf(0)
            for k in range(v, m + 1):
                exact += term
                term *= (m - k) / (k + 1) * p / (1 - p)
                if term < exact * mpmath.mpf(10) ** -30:
                    break
        if exact > 1e-300:
            found = p_value(v, m, m, epsilon, 0.0)
            assert exact <= found <= exact * (1 + mpmath.mpf(10) ** -8)


def slow_bound(v, r, m, delta, confidence):
    """The epsilon at which the slow p-value reaches the level."""
    level = 1 - mpmath.mpf(confidence)
    low, high = mpmath.mpf(0), mpmath.mpf(40)
    if slow_p_value(v, r, m, low, delta) >= level:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        below = slow_p_value(v, r, m, middle, delta) < level
        low, high = (middle, high) if below else (low, middle)
    return high


@settings(max_examples=25, deadline=None)
@given(
    st.data(),
    st.integers(1, 40),
    st.sampled_from([0.0, 1e-6, 1e-3]),
    st.sampled_from([0.9, 0.95, 0.999]),
)
def test_bounds_are_the_slow_ones_rounded_down(data, m, delta, confidence):
    r = data.draw(st.integers(1, m))
    v = data.draw(st.integers(r // 2, r))
    found = epsilon_lower_bound(v, r, m, delta, confidence)
    exact = slow_bound(v, r, m, delta, confidence)
    assert found <= exact
    assert found == pytest.approx(float(exact), abs=1e-9)


def worst_mechanism(m, r, v, epsilon, delta):
    """Largest P[v right guesses] of any (epsilon, delta)-private guesser, by linear programming."""
    inputs = list(itertools.product((-1, 1), repeat=m))
    outputs = [t for t in itertools.product((-1, 0, 1), repeat=m) if sum(map(abs, t)) == r]
    pairs = [
        (i, j)
        for i, s in enumerate(inputs)
        for j, other in enumerate(inputs)
        if sum(a != b for a, b in zip(s, other, strict=True)) == 1
    ]
    n, size = len(outputs), len(inputs) * len(outputs)
    rows, sums = [], []
    for k, (i, j) in enumerate(pairs):  # excess_t >= p(t | i) - e^eps p(t | j), in all <= delta
        for t in range(n):
            rows.append({i * n + t: 1.0, j * n + t: -math.exp(epsilon), size + k * n + t: -1.0})
        rows.append({size + k * n + t: 1.0 for t in range(n)})
        sums += [0.0] * n + [delta]
    limits = lil_matrix((len(rows), size + len(pairs) * n))
    for place, row in enumerate(rows):
        for column, value in row.items():
            limits[place, column] = value
    whole = lil_matrix((len(inputs), size + len(pairs) * n))
    gain = np.zeros(size + len(pairs) * n)
    for i, s in enumerate(inputs):
        whole[i, i * n : (i + 1) * n] = 1.0
        for t, guess in enumerate(outputs):
            if sum(a == b for a, b in zip(s, guess, strict=True)) >= v:
                gain[i * n + t] = 1 / len(inputs)
    found = linprog(-gain, limits.tocsr(), sums, whole.tocsr(), np.ones(len(inputs)), bounds=(0, 1))
    assert found.success
    return -found.fun


def worst_by_formula(m, r, v, epsilon, delta):
    """The right side of R3: P[W >= v] + m delta P[W >= v] P[W < v] / (v P[W = v])."""
    q = 1 / (1 + math.exp(-epsilon))
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    return sum(mass[v:]) * (1 + m * delta * sum(mass[:v]) / (v * mass[v]))


@pytest.mark.parametrize(
    ("m", "r", "v"), [(1, 1, 1), (2, 1, 1), (3, 3, 2), (3, 2, 2), (4, 4, 4), (4, 4, 3)]
)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.01), (0.7, 0.0), (1.5, 0.02)])
def test_no_private_mechanism_beats_it(m, r, v, epsilon, delta):
    worst = worst_mechanism(m, r, v, epsilon, delta)
    assert worst <= p_value(v, r, m, epsilon, delta) + 1e-9
    # The proof in docs/maths/audit.md is of a bound that the worst mechanism attains.
    assert worst == pytest.approx(worst_by_formula(m, r, v, epsilon, delta), abs=1e-7)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.floats(0, 8), st.data())
def test_the_published_bound_holds_what_is_proved(r, epsilon, data):
    v = data.draw(st.integers(max(1, r // 2), r))
    q = 1 / (1 + math.exp(-epsilon))
    mass = one_run_mass(r, q)
    tail = mass[v:].sum()
    if tail <= 0.5 and mass[v] > 1e-250:  # R3 asks no more than half of what is charged
        delta = 1e-3
        proved = tail + r * delta * tail * mass[:v].sum() / (v * mass[v])
        assert min(1.0, proved) <= p_value(v, r, r, epsilon, delta)


def one_run_mass(r, q):
    from scipy.stats import binom

    return binom.pmf(np.arange(r + 1), r, q)


@cache
def bound_of(v, r, m, delta, confidence):
    return epsilon_lower_bound(v, r, m, delta, confidence)


def bounds_of(scores, coins, r, delta, confidence):
    m = scores.shape[1]
    right = one_run.correct_guesses(scores, coins, [r])[:, 0].tolist()
    return np.array([bound_of(v, r, m, delta, confidence) for v in right])


def allowed(rate, runs):
    """`rate` and four standard deviations of a share of `runs`."""
    return rate + 4 * (rate * (1 - rate) / runs) ** 0.5


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomised_response_is_seldom_held_to_be_less_private(epsilon):
    rng, runs, m = np.random.default_rng(SEED), 4000, 200
    coins = rng.random((runs, m)) < 0.5
    kept = rng.random((runs, m)) < 1 / (1 + math.exp(-epsilon))
    scores = np.where(kept, coins, ~coins) + 0.5 * rng.random((runs, m))
    for r in (50, 100, 200):
        found = bounds_of(scores, coins, r, 0.0, 0.95)
        assert (found > epsilon).mean() <= allowed(0.05, runs)
    assert np.median(found) > 0.4 * epsilon  # all guesses: the bound is of some use


@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_the_gaussian_mechanism_too(sigma):
    rng, runs, m, delta = np.random.default_rng(SEED), 3000, 200, 1e-3
    coins = rng.random((runs, m)) < 0.5
    scores = coins + sigma * rng.normal(size=(runs, m))
    truth = gaussian.epsilon(delta, sigma)
    for r in (20, 100):
        assert (bounds_of(scores, coins, r, delta, 0.95) > truth).mean() <= allowed(0.05, runs)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_null_scores_give_zero_at_the_confidence(confidence):
    rng, runs, m = np.random.default_rng(SEED), 3000, 200
    coins, scores = rng.random((runs, m)) < 0.5, rng.normal(size=(runs, m))
    tried = one_run.default_guesses(m)
    error = 1 - confidence
    for r in tried:
        assert (bounds_of(scores, coins, r, 1e-5, confidence) > 0).mean() <= allowed(error, runs)
    paid = [bounds_of(scores, coins, r, 1e-5, 1 - error / len(tried)) for r in tried]
    assert (np.max(paid, axis=0) > 0).mean() <= allowed(error, runs)
    # The same maximum without its price is wrong more often: this test could fail.
    unpaid = [bounds_of(scores, coins, r, 1e-5, confidence) for r in tried]
    assert (np.max(unpaid, axis=0) > 0).mean() > allowed(error, runs)


def test_the_best_of_several_is_the_best_at_a_shared_level():
    rng = np.random.default_rng(SEED)
    coins = rng.random(200) < 0.5
    scores = coins + 0.8 * rng.normal(size=200)
    found = best_over_guesses(scores, coins, 1e-5, 0.95, (20, 100, 200))
    each = [one_run.bound_at_guesses(scores, coins, r, 1e-5, 1 - 0.05 / 3) for r in (20, 100, 200)]
    assert found.epsilon == pytest.approx(max(one.epsilon for one in each), abs=1e-12)
    assert found.epsilon > 0.5
    alone = one_run.bound_at_guesses(scores, coins, found.guesses, 1e-5, 0.95)
    assert alone.epsilon > found.epsilon  # the union bound has a price
    assert alone.tried == (found.guesses,)


def test_one_side_alone_is_for_attacks_that_say_nothing_of_the_absent():
    coins = np.arange(100) < 50
    scores = np.where(np.arange(100) < 20, 1.0, 0.0)  # twenty copies found, nothing else known
    right = one_run.correct_guesses(scores, coins, [20], sides="included")
    assert right.tolist() == [20]
    assert one_run.bound_at_guesses(scores, coins, 20, 0.0, 0.95, sides="included").epsilon > 1.8


def test_tied_scores_show_nothing_even_when_the_canaries_are_sorted_by_their_coins():
    for m in (50, 200, 1000):
        coins = np.arange(m) < m // 2
        for order in (coins, ~coins):
            assert best_over_guesses(np.zeros(m), order, 1e-5, 0.95).epsilon == 0.0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.data())
def test_guesses_are_counted_as_a_slow_count_does(m, data):
    # Distinct scores, so that the order among ties does not enter.
    scores = np.array(data.draw(st.permutations(list(range(m)))), dtype=float)
    coins = np.array(data.draw(st.lists(st.booleans(), min_size=m, max_size=m)), dtype=bool)
    r = data.draw(st.integers(0, m))
    order = sorted(range(m), key=lambda i: scores[i])
    low, high = order[: r // 2], order[m - (r - r // 2) :]
    slow = sum(not coins[i] for i in low) + sum(bool(coins[i]) for i in high)
    assert one_run.correct_guesses(scores, coins, [r]).tolist() == [slow]


def test_more_right_guesses_or_less_confidence_never_lower_the_bound():
    by_right = [epsilon_lower_bound(v, 100, 200, 1e-5, 0.95) for v in range(101)]
    assert by_right == sorted(by_right)
    by_level = [epsilon_lower_bound(80, 100, 200, 1e-5, c) for c in (0.999, 0.99, 0.95, 0.9)]
    assert by_level == sorted(by_level)
    by_delta = [epsilon_lower_bound(80, 100, 200, d, 0.95) for d in (1e-2, 1e-3, 1e-5, 0)]
    assert by_delta == sorted(by_delta)


@pytest.mark.parametrize(
    "bad",
    [
        {"correct": 5, "guesses": 4},
        {"guesses": 11, "canaries": 10},
        {"canaries": 0},
        {"correct": 2.5},
        {"correct": True},
        {"delta": 1.0},
        {"delta": -1e-9},
        {"delta": math.nan},
        {"confidence": 1.0},
        {"confidence": math.nan},
    ],
)
def test_bad_numbers_are_refused(bad):
    good = {"correct": 2, "guesses": 4, "canaries": 10, "delta": 1e-5, "confidence": 0.95}
    with pytest.raises(UsageError, match="expected"):
        epsilon_lower_bound(**(good | bad))


def test_scores_that_are_no_scores_are_refused():
    coins = np.array([True, False])
    with pytest.raises(UsageError, match="NaN"):
        best_over_guesses([math.nan, 1.0], coins, 1e-5, 0.95)
    with pytest.raises(UsageError, match="one shape"):
        best_over_guesses([1.0], coins, 1e-5, 0.95)
    with pytest.raises(UsageError, match="booleans"):
        best_over_guesses([1.0, 2.0], [1, 0], 1e-5, 0.95)
    with pytest.raises(UsageError, match="guesses"):
        best_over_guesses([1.0, 2.0], coins, 1e-5, 0.95, [3])
    with pytest.raises(UsageError, match="epsilon"):
        p_value(1, 2, 3, math.inf, 0.0)
