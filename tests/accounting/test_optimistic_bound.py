"""The lower bound against dp-accounting's own, and how far rounding can go."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from dpsynth.accounting import compose, gaussian, optimistic
from dpsynth.accounting.compose import epsilon
from dpsynth.accounting.events import PoissonGaussianEvent
from dpsynth.accounting.merging import Merged, Sampled


def library_bounds(sigma, rate, steps, delta, grid):
    values = []
    for pessimistic in (False, True):
        one = pld.from_gaussian_mechanism(
            sigma,
            sampling_prob=rate,
            value_discretization_interval=grid,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        )
        values.append(one.self_compose(steps).get_epsilon_for_delta(delta))
    return values


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(1.2, 0.02, 500), (0.8, 0.3, 20), (3.0, 0.005, 1000)]
)
def test_it_lies_between_the_librarys_bounds(sigma, rate, steps):
    low, high = library_bounds(sigma, rate, steps, 1e-5, 2e-4)
    bounds = epsilon([PoissonGaussianEvent(sigma, rate, steps)], 1e-5)
    assert low <= bounds.optimistic <= high


@pytest.mark.parametrize("sigma", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("rate", [0.001, 0.2, 1.0])
def test_one_step_is_below_the_exact_delta_at_every_epsilon(sigma, rate):
    grid = 0.05 / sigma
    bound = optimistic.gaussian_lower_bound(sigma, rate, grid)
    for epsilon_ in np.linspace(0, 4 / sigma, 9):
        exact = remove_delta(epsilon_, sigma, rate)
        # True losses are at least k h - shift: the grid's delta is asked at epsilon + shift.
        found = bound.remove.pmf.get_delta_for_epsilon(float(epsilon_ + bound.remove.shift))
        assert found <= exact * (1 + 1e-9) + 1e-15


def remove_delta(epsilon_, sigma, rate):
    from scipy.special import ndtr

    inside = (np.expm1(epsilon_) + rate) / rate
    x = sigma**2 * np.log(inside) + 0.5
    tail, shifted = ndtr(-x / sigma), ndtr(-(x - 1) / sigma)
    return (1 - rate - np.exp(epsilon_)) * tail + rate * shifted


@pytest.mark.parametrize("steps", [1_000, 10_000, 100_000])
def test_rounding_in_the_transforms_stays_below_what_is_set_aside(steps):
    # Nearly unsampled, so that the closed form is the answer; the tail at 4 slack is asked.
    sigma = steps**0.5
    merged = Merged(None, (Sampled(sigma, 1 - 1e-9, steps),), False)
    grid = compose.first_grid(merged) / 4
    delta = max(4e-14 + 8e-16 * steps, 1e-12) * 1.001
    exact = gaussian.epsilon(delta, 1.0)
    assert compose.pessimistic_at(merged, delta, grid) >= exact * (1 - 1e-6)
    assert compose.optimistic_at(merged, delta, grid / 4) <= exact * (1 + 1e-6)
    composed = pld.from_gaussian_mechanism(
        sigma, sampling_prob=1 - 1e-9, value_discretization_interval=grid
    ).self_compose(steps)
    mass = composed._pmf_remove.to_dense_pmf()._probs
    assert -np.cumsum(mass[::-1]).min() <= 1e-14 + 2e-16 * steps
