"""Norms and clipped sums of every layer kind against torch.func, and Opacus where it runs."""

import copy
import math

import pytest
import torch
from enginekit import KINDS, WIDTH, build, by_func, draw, flat, losses
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.grad_sample import GradSampleModule
from torch import nn

from dpsynth.private.engine import GRID, MARGIN, EngineSettings, PerExampleClipper

SUMS = [EngineSettings(), EngineSettings(exact_sums=True), EngineSettings(physical=2)]


def check(module, x, clip, speed, rtol):
    expected = by_func(copy.deepcopy(module), x)
    norms = expected.norm(dim=1)
    bound = clip * (1 - MARGIN)
    total = (expected * (bound / norms.clamp(min=bound))[:, None]).sum(0)
    with PerExampleClipper(module, losses, clip, settings=speed) as clipper:
        found = clipper.clipped_sum(x)
    torch.testing.assert_close(found.norms, norms, rtol=rtol, atol=1e-12)
    # A ghost norm is clipped by its upper bound, a little above it.
    slack = 10 * rtol * min(clip * len(x), float(norms.sum()))
    assert float((flat(found.gradients) - total).norm()) <= slack + clip * GRID * math.sqrt(
        len(total)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speed", SUMS, ids=["fast", "exact", "physical"])
@pytest.mark.parametrize("clip", [1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_agrees_with_torch_func(kind, speed, clip, dtype):
    rtol = 2e-4 if dtype == torch.float32 else 1e-9
    check(build(kind, dtype), draw(5, 3, dtype), clip, speed, rtol)


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=4, deadline=None)
def test_any_batch_and_multiplicity(kind, size, draws, seed):
    x = draw(size, draws, torch.float64, seed)
    check(build(kind, torch.float64, seed), x, 0.5, EngineSettings(), 1e-9)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.sampled_from([(2, 3, 1), (4, 2, 2), (3, 6, 3), (2, 40, 1)]),
)
@settings(max_examples=25, deadline=None)
def test_any_convolution(kernel, stride, padding, dilation, channels):
    inputs, outputs, groups = channels
    module = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups).double()
    x = torch.randn(
        4, inputs, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    for speed in (EngineSettings(), EngineSettings(exact_sums=True)):
        check(module, x, 0.1, speed, 1e-9)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("sizes", [(2, 3), (64, 48), (48, 64)])
def test_ghost_and_materialised_norms_agree(tokens, sizes):
    module = nn.Linear(*sizes)
    x = torch.randn(4, tokens, sizes[0], generator=torch.Generator().manual_seed(0))
    check(module, x, 0.01, EngineSettings(), 1e-4)


OPACUS = [
    *("linear", "linear without bias", "linear 4-D", "conv1d", "conv2d", "layer norm"),
    *("group norm", "embedding", "linear 2-D"),
]


@pytest.mark.parametrize("kind", OPACUS)
def test_agrees_with_the_hooks_of_opacus(kind):
    """With one draw, where the folded first axis is the example's own."""
    module, x = build(kind), draw(5, 1)
    hooked = GradSampleModule(copy.deepcopy(module), loss_reduction="sum", strict=False)
    losses(hooked, x).sum().backward()
    samples = torch.cat([p.grad_sample.flatten(1) for p in hooked.parameters()], dim=1).double()
    with PerExampleClipper(module, losses, 0.5) as clipper:
        found = clipper.clipped_sum(x)
    norms = samples.norm(dim=1)
    total = (samples * (0.5 * (1 - MARGIN) / norms.clamp(min=0.5 * (1 - MARGIN)))[:, None]).sum(0)
    torch.testing.assert_close(found.norms, norms, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(flat(found.gradients), total, rtol=1e-3, atol=1e-5)


def test_a_bias_on_tokens_is_summed_before_its_norm():
    """The fault of a fast norm that squares each token's bias gradient by itself."""
    module = nn.Linear(WIDTH, 1)
    x = torch.zeros(3, 7, WIDTH)
    with PerExampleClipper(module, lambda m, x: m(x).sum((1, 2)), 100.0) as clipper:
        found = clipper.clipped_sum(x)
    torch.testing.assert_close(found.norms, torch.full((3,), 7.0, dtype=torch.float64))


def test_two_uses_of_a_weight_count_by_their_sum():
    """Cross terms: two equal uses double the norm, two opposite ones cancel."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1, bias=False)

        def forward(self, x, sign):
            return self.layer(x) + sign * self.layer(x)

    x = draw(3, 1)[:, 0, 0]
    for sign, times in ((1.0, 2.0), (-1.0, 0.0)):
        with PerExampleClipper(Twice(), lambda m, x, s=sign: m(x, s).sum(1), 100.0) as clipper:
            found = clipper.clipped_sum(x)
        torch.testing.assert_close(
            found.norms, times * x.double().norm(dim=1), rtol=1e-5, atol=1e-3
        )
        torch.testing.assert_close(
            flat(found.gradients), times * x.double().sum(0), rtol=1e-4, atol=1e-6
        )


def test_half_precision_products_are_clipped_by_the_values_that_are_summed():
    module, x = build("encoder"), draw(6, 2)
    speed = EngineSettings(precision="bfloat16")
    with PerExampleClipper(module, losses, 1e-3, settings=speed) as clipper:
        found = clipper.clipped_sum(x)
        for i in range(6):
            alone = clipper.clipped_sum(x[i : i + 1])
            assert 0.99e-3 < float(flat(alone.gradients).norm()) <= 1e-3
    exact = by_func(copy.deepcopy(module), x).norm(dim=1)
    torch.testing.assert_close(found.norms, exact, rtol=0.1, atol=0)
