"""Physical batches, the empty batch, examples that are not finite, and what stays behind."""

import gc
import weakref

import pytest
import torch
from enginekit import KINDS, WIDTH, build, draw, flat, losses
from torch import nn

from dpsynth.errors import UsageError
from dpsynth.private.engine import GRID, EngineSettings, PerExampleClipper
from dpsynth.private.engine.settings import affordable


@pytest.mark.parametrize("kind", ["encoder", "tied", "conv2d", "bare parameters"])
def test_physical_batches_change_nothing_but_rounding(kind):
    module, x = build(kind), draw(11, 2)
    sums = []
    for physical in (1, 2, 4, 11, 50, None):
        with PerExampleClipper(
            module, losses, 0.05, settings=EngineSettings(physical=physical)
        ) as clipper:
            sums.append(flat(clipper.clipped_sum(x).gradients))
    for other in sums[1:]:
        torch.testing.assert_close(other, sums[0], rtol=1e-4, atol=1e-6)


def test_the_physical_batch_is_chosen_once_by_memory():
    with PerExampleClipper(build("encoder"), losses, 1.0) as clipper:
        assert clipper.physical is None
        clipper.clipped_sum(draw(3, 2))
        chosen = clipper.physical
        clipper.clipped_sum(draw(40, 2))
        assert clipper.physical == chosen
    assert chosen is not None
    assert chosen >= 100
    assert affordable(2**40, torch.device("cpu")) == 1
    assert affordable(2**20, torch.device("cpu")) <= 2**10


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_a_sum_of_zeros(kind):
    module = build(kind)
    with PerExampleClipper(module, losses, 1.0) as clipper:
        found = clipper.clipped_sum(draw(0, 2))
    wanted = {n: p.shape for n, p in module.named_parameters() if p.requires_grad}
    assert {n: g.shape for n, g in found.gradients.items()} == wanted
    assert not flat(found.gradients).any()
    assert len(found.norms) == len(found.losses) == 0


@pytest.mark.parametrize("kind", [k for k in KINDS if "embedding" not in k])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e38])
def test_an_example_that_is_not_finite_counts_as_zero(kind, bad):
    module, x = build(kind), draw(5, 2)
    others = x[torch.tensor([0, 1, 3, 4])]
    x[2, 1, 2, 4] = bad
    for exact in (False, True):
        speed = EngineSettings(exact_sums=exact)
        with PerExampleClipper(module, losses, 0.05, settings=speed) as clipper:
            found, rest = clipper.clipped_sum(x), clipper.clipped_sum(others)
        assert bool(flat(found.gradients).isfinite().all())
        if not bool(found.norms[2].isfinite()):
            torch.testing.assert_close(
                flat(found.gradients), flat(rest.gradients), rtol=1e-4, atol=1e-6
            )
        else:  # a layer that divides by the size of its input brings a huge one back
            assert bad == -1e38


def test_one_bad_example_alone_is_a_sum_of_zeros():
    x = torch.full((1, 2, 4, WIDTH), float("nan"))
    with PerExampleClipper(build("encoder"), losses, 1.0) as clipper:
        assert not flat(clipper.clipped_sum(x).gradients).any()


def test_sums_lie_on_the_grid():
    with PerExampleClipper(build("encoder"), losses, 0.75) as clipper:
        steps = flat(clipper.clipped_sum(draw(6, 2)).gradients) / (0.75 * GRID)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)


def test_a_parameter_that_the_losses_do_not_reach_gets_zeros():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
            self.never = nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.idle(x)
            return self.used(x)

    with PerExampleClipper(Half(), losses, 1.0) as clipper:
        found = clipper.clipped_sum(draw(3, 2)).gradients
    assert bool(found["used.weight"].any())
    assert not any(bool(found[n].any()) for n in ("idle.weight", "idle.bias", "never"))


def test_losses_that_reach_no_parameter_give_zeros():
    with PerExampleClipper(nn.Linear(2, 2), lambda m, x: x.sum(1), 1.0) as clipper:
        found = clipper.clipped_sum(torch.ones(3, 2))
    assert not flat(found.gradients).any()
    assert found.norms.tolist() == [0, 0, 0]


def test_weights_changed_between_calls_are_seen():
    module, x = nn.Linear(WIDTH, 1), draw(2, 1)[:, 0, 0]
    with PerExampleClipper(module, lambda m, x: m(x).square().sum(1), 1e6) as clipper:
        clipper.clipped_sum(x)
        module.weight.data = torch.zeros(1, WIDTH)
        module.bias.data = torch.zeros(1)
        assert not flat(clipper.clipped_sum(x).gradients).any()


def test_nothing_stays_on_the_module():
    module = build("encoder")
    before = {n: id(p) for n, p in module.named_parameters()}
    seen = []

    def kept(m, x):
        found = losses(m, x)
        seen.append(weakref.ref(found))
        return found

    with PerExampleClipper(module, kept, 1.0) as clipper:
        clipper.clipped_sum(draw(4, 2))
        gc.collect()
        assert all(one() is None for one in seen)
        assert all(p.grad is None for p in module.parameters())
        assert {n: id(p) for n, p in module.named_parameters()} == before

        def fails(m, x):
            m(x)
            raise RuntimeError("stop")

        clipper._losses = fails
        with pytest.raises(RuntimeError, match="stop"):
            clipper.clipped_sum(draw(4, 2))
    assert {n: id(p) for n, p in module.named_parameters()} == before
    losses(module, draw(2, 1)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("physical", [0, -1])
def test_a_meaningless_physical_batch_is_refused(physical):
    with pytest.raises(UsageError):
        PerExampleClipper(nn.Linear(2, 2), losses, 1.0, settings=EngineSettings(physical=physical))
    with pytest.raises(UsageError):
        EngineSettings(physical=physical)
