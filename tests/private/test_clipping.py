"""Clipped sums against per-example gradients taken one example at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import GRID, MARGIN, EngineSettings, PerExampleClipper
from dpsynth.private.engine.rounding import squared_norms
from dpsynth.private.steps import flow_losses

DIM, CLASSES = 10, 3
KINDS = ["mlp", "transformer"]


def model(kind, width=12, depth=2):
    with seeded_initialisation(1):
        made = build_velocity(Velocity(kind=kind, width=width, depth=depth), DIM, CLASSES)
        for parameter in made.parameters():  # the output layer starts at zero: move it
            nn.init.normal_(parameter, std=0.3)
    return made


def batch(size, draws, seed=0):
    source = generator(seed)
    return (
        torch.randn(size, DIM, generator=source),
        torch.randint(CLASSES + 1, (size,), generator=source),
        torch.rand(size, draws, generator=source),
        torch.randn(size, draws, DIM, generator=source),
    )


def one_by_one(net, data):
    """Flat per-example gradients (B, P), float64, by plain autograd on one example at a time."""
    rows = []
    for i in range(len(data[0])):
        losses = flow_losses(net, *(x[i : i + 1] for x in data))
        grads = torch.autograd.grad(losses.sum(), list(net.parameters()), allow_unused=True)
        rows.append(torch.cat([g.reshape(-1) for g in grads]).double())
    return torch.stack(rows)


def flat(found):
    return torch.cat([g.reshape(-1) for g in found.gradients.values()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", [1, 2, 8])
@pytest.mark.parametrize("clip", [1e-3, 0.7, 1e6])
def test_agrees_with_materialised_gradients(kind, draws, clip):
    net, data = model(kind), batch(7, draws)
    expected = one_by_one(net, data)
    norms = expected.norm(dim=1)
    bound = clip * (1 - MARGIN)
    total = (expected * (bound / norms.clamp(min=bound))[:, None]).sum(0)
    with PerExampleClipper(
        net, flow_losses, clip, settings=EngineSettings(physical=3)
    ) as clipper:  # 3 + 3 + 1: ragged
        found = clipper.clipped_sum(*data)
    torch.testing.assert_close(found.norms, norms, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        flat(found), total, rtol=1e-3, atol=1e-5 * min(clip, 1.0) + clip * GRID
    )
    torch.testing.assert_close(found.losses, flow_losses(net, *data).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_multiplicity_axis_is_folded_into_the_example(kind):
    """The gradient of one example is the mean over its draws, taken before the clip."""
    net, (z, y, t, xi) = model(kind), batch(1, 5)
    each = one_by_one(net, (z.expand(5, -1), y.expand(5), t.view(5, 1), xi.view(5, 1, DIM)))
    with PerExampleClipper(net, flow_losses, 1e4) as clipper:
        found = clipper.clipped_sum(z, y, t, xi)
    torch.testing.assert_close(flat(found), each.mean(0), rtol=1e-3, atol=1e-4)


@given(st.integers(1, 8), st.floats(1e-4, 50), st.floats(0.1, 1e4), st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_one_record_never_moves_the_sum_by_more_than_the_clip(draws, clip, size, seed):
    net = model("mlp")
    z, y, t, xi = batch(4, draws, seed)
    with PerExampleClipper(net, flow_losses, clip) as clipper:
        alone = clipper.clipped_sum(z[:1] * size, y[:1], t[:1], xi[:1] * size)
        assert float(flat(alone).norm()) <= clip
        # Removing one record from a batch, after rounding to the grid, stays within the clip.
        scaled = torch.cat([z[:1] * size, z[1:]])
        both = clipper.clipped_sum(scaled, y, t, xi)
        without = clipper.clipped_sum(scaled[1:], y[1:], t[1:], xi[1:])
        assert float((flat(both) - flat(without)).norm()) <= clip * (1 + 1e-5)


def test_sums_lie_on_the_grid():
    clip = 0.75
    with PerExampleClipper(model("mlp"), flow_losses, clip) as clipper:
        steps = flat(clipper.clipped_sum(*batch(6, 2))) / (clip * GRID)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_a_sum_of_zeros(kind):
    net = model(kind)
    with PerExampleClipper(net, flow_losses, 1.0) as clipper:
        found = clipper.clipped_sum(*batch(0, 4))
    assert {n: g.shape for n, g in found.gradients.items()} == {
        n: p.shape for n, p in net.named_parameters()
    }
    assert not flat(found).any()
    assert len(found.norms) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_an_example_that_is_not_finite_counts_as_zero(kind, bad):
    net, data = model(kind), batch(5, 3)
    with PerExampleClipper(net, flow_losses, 0.5) as clipper:
        data[3][2, 1, 4] = bad
        found = clipper.clipped_sum(*data)
        keep = torch.tensor([0, 1, 3, 4])
        others = clipper.clipped_sum(*(x[keep] for x in data))
    assert not bool(found.norms[2].isfinite())
    torch.testing.assert_close(flat(found), flat(others), rtol=1e-5, atol=1e-6)


def test_physical_batches_change_nothing_but_rounding():
    data, net = batch(11, 2), model("transformer")
    sums = []
    for physical in (1, 4, 11, 50):
        with PerExampleClipper(
            net, flow_losses, 0.3, settings=EngineSettings(physical=physical)
        ) as clipper:
            sums.append(flat(clipper.clipped_sum(*data)))
    for other in sums[1:]:
        torch.testing.assert_close(other, sums[0], rtol=1e-4, atol=1e-6)


def test_hooks_and_gradients_are_gone_afterwards():
    net = model("mlp")
    with PerExampleClipper(net, flow_losses, 1.0) as clipper:
        clipper.clipped_sum(*batch(3, 2))
    for parameter in net.parameters():
        assert parameter.grad is None
        assert getattr(parameter, "grad_sample", None) is None
    flow_losses(net, *batch(3, 2)).sum().backward()
    assert all(getattr(p, "grad_sample", None) is None for p in net.parameters())


def test_norms_of_long_rows_are_far_more_exact_than_the_margin():
    rows = torch.randn(3, 5 * 1024 + 7, generator=generator(0)) * torch.logspace(-9, 9, 3)[:, None]
    exact = rows.double().square().sum(1)
    torch.testing.assert_close(squared_norms(rows), exact, rtol=MARGIN / 16, atol=0)


@pytest.mark.parametrize("clip", [0.0, -1.0, 1e-13, float("nan"), float("inf")])
def test_a_meaningless_clip_is_refused(clip):
    with pytest.raises(UsageError):
        PerExampleClipper(model("mlp"), flow_losses, clip)


def test_losses_that_are_not_one_an_example_are_refused():
    """A loss over a batch with the draws folded into it would let one record give K C."""

    def folded(net, z, y, t, xi):
        return flow_losses(net, z, y, t, xi).mean()

    with PerExampleClipper(model("mlp"), folded, 1.0) as clipper, pytest.raises(UsageError):
        clipper.clipped_sum(*batch(3, 2))
