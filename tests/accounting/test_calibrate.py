"""Calibration: the budget is met, barely, quickly, and rounding is towards privacy."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting import gaussian
from dpsynth.accounting.calibrate import round_up, smallest_scale
from dpsynth.accounting.compose import epsilon
from dpsynth.accounting.events import GaussianEvent, PoissonGaussianEvent, Unaccounted
from dpsynth.errors import BudgetError


def whole_plan(steps):
    return lambda s: [GaussianEvent(4 * s), PoissonGaussianEvent(s, 0.02, steps)]


@pytest.mark.parametrize("steps", [500, 2000])
def test_a_plan_is_calibrated_to_four_digits(steps):
    scale = smallest_scale(whole_plan(steps), 1.0, 1e-5)
    assert epsilon(whole_plan(steps)(scale), 1e-5).pessimistic <= 1.0
    assert epsilon(whole_plan(steps)(scale * (1 - 1e-4)), 1e-5).pessimistic > 1.0
    assert float(f"{scale:.5g}") == scale


@pytest.mark.parametrize(
    ("budget", "delta"), [(1.0, 1e-5), (0.01, 1e-6), (10.0, 1e-9), (1.0, 1.5e-12), (300.0, 1e-5)]
)
def test_one_gaussian_needs_what_the_closed_form_says(budget, delta):
    scale = smallest_scale(lambda s: [GaussianEvent(s)], budget, delta)
    exact = gaussian.sigma(budget, delta)
    assert exact <= scale <= exact * (1 + 2e-4)


def test_a_hard_delta_with_sampling():
    scale = smallest_scale(lambda s: [PoissonGaussianEvent(s, 0.05, 100)], 2.0, 1e-12)
    bounds = epsilon([PoissonGaussianEvent(scale, 0.05, 100)], 1e-12)
    assert 1.99 < bounds.pessimistic <= 2.0


def test_no_scale_that_meets_the_budget_is_an_error_with_a_way_out():
    with pytest.raises(BudgetError, match="no noise scale up to 5") as caught:
        smallest_scale(lambda s: [GaussianEvent(s)], 0.1, 1e-5, high=5.0)
    assert "larger epsilon" in caught.value.hint
    with pytest.raises(BudgetError, match="no noise scale"):
        smallest_scale(lambda s: [GaussianEvent(s), Unaccounted("x")], 1.0, 1e-5)
    with pytest.raises(BudgetError, match="no noise scale"):
        # A fixed release already costs more than the budget, whatever the scale.
        smallest_scale(lambda s: [GaussianEvent(1.0), GaussianEvent(s)], 1.0, 1e-5)


def test_where_any_noise_will_do_the_least_is_taken():
    found = smallest_scale(lambda s: [GaussianEvent(s)], 1e4, 1e-5, low=1.0)
    assert found == pytest.approx(1.0, rel=2e-4)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True])
def test_bad_budgets_are_refused(bad):
    with pytest.raises(ValueError, match="epsilon"):
        smallest_scale(lambda s: [GaussianEvent(s)], bad, 1e-5)


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-6, 1e6))
def test_round_up_never_goes_down_and_is_idempotent(value):
    rounded = round_up(value)
    assert value <= rounded <= value * (1 + 1.1e-4)
    assert round_up(rounded) == rounded


@settings(max_examples=5, deadline=None)
@given(st.floats(0.1, 8), st.floats(0.01, 0.3), st.integers(5, 300))
def test_calibration_inverts_the_accountant(budget, rate, steps):
    events_at = lambda s: [PoissonGaussianEvent(s, rate, steps)]  # noqa: E731
    scale = smallest_scale(events_at, budget, 1e-5)
    assert epsilon(events_at(scale), 1e-5).pessimistic <= budget
    assert epsilon(events_at(scale * 0.99), 1e-5).pessimistic > budget
