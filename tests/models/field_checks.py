"""What any analytic field must satisfy, asked of one component a class and of many."""

import torch
from torch import Tensor

from dpsynth.models.field import AnalyticField
from dpsynth.models.flow import interpolate


def assert_regression(
    field: AnalyticField, codes: Tensor, labels: Tensor, t: float, source: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """E[z - xi | x_t] is the least-squares fit: its residual is uncorrelated with any f(x_t).

    Returns the noise, the times and the points x_t that were asked.
    """
    noise = torch.randn(codes.shape, generator=source, dtype=torch.float64)
    times = torch.full((len(codes),), t, dtype=torch.float64)
    x = interpolate(codes, noise, times)
    for predicted in (field.conditional(x, times, labels), field.unconditional(x, times)):
        residual = codes - noise - predicted
        for feature in (torch.ones_like(x), x, x.square(), x.sin()):
            correlation = (residual[:, :, None] * feature[:, None, :]).mean(0)
            assert correlation.abs().max() < 0.03
    return noise, times, x
