"""The noisy mean: one draw on the whole sum, the declared divisor, no low bits."""

import math

import numpy as np
import pytest
import torch

from dpsynth.private.engine import ClippedSum
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import NOISE_GRID, noisy_mean


def found(**gradients):
    return ClippedSum(gradients, torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize("std", [1e-9, 0.7, 1.0, 3e5])
def test_it_is_the_sum_and_the_noise_over_the_divisor_on_a_grid(std):
    sums = {"a": torch.randn(30, 20).double() * 5 * std, "b": torch.randn(7).double() * std}
    means = noisy_mean(found(**sums), std, 12.5, NoiseSource.unsafe(3))
    noise = NoiseSource.unsafe(3).gaussian_like({"a": (30, 20), "b": (7,)}, std)
    grid = 2.0 ** math.floor(math.log2(std * NOISE_GRID))
    assert std * NOISE_GRID / 2 <= grid <= std * NOISE_GRID
    for name, mean in means.items():
        assert mean.dtype == torch.float64
        exact = (sums[name] + noise[name]) / 12.5
        assert float((mean - exact).abs().max()) <= 0.51 * grid / 12.5
        steps = mean * 12.5 / grid
        assert float((steps - steps.round()).abs().max()) < 1e-4  # a multiple, up to the division


def test_the_sum_itself_is_left_as_it_was():
    total = torch.randn(50).double()
    before = total.clone()
    noisy_mean(found(a=total), 1.0, 2.0, NoiseSource())
    assert torch.equal(total, before)


@pytest.mark.parametrize("divisor", [1.0, 600.0])
def test_the_noise_of_the_mean_has_the_declared_variance_whatever_the_sum(divisor):
    big = torch.full((200, 50), 1e4, dtype=torch.float64)
    mean = noisy_mean(found(a=big, b=torch.zeros(200, 50).double()), 2.0, divisor, NoiseSource())
    draws = [(mean["a"] - 1e4 / divisor).numpy().ravel(), mean["b"].numpy().ravel()]
    for draw in draws:
        ratio = (draw**2).mean() / (2 / divisor) ** 2
        assert abs(ratio - 1) < 6 * math.sqrt(2 / len(draw))
    assert abs(np.corrcoef(draws)[0, 1]) < 6 / math.sqrt(10_000)
