"""What the engine does not know or cannot keep apart is refused with its name, never skipped."""

import pytest
import torch
from enginekit import WIDTH, draw
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpsynth.errors import UsageError
from dpsynth.private.engine import PerExampleClipper


def squares(module, x):
    return module(x).square().flatten(1).mean(1)


def refused(module, x, match, loss=squares):
    with PerExampleClipper(module, loss, 1.0) as clipper, pytest.raises(UsageError) as caught:
        clipper.clipped_sum(x)
    assert match in caught.value.message
    assert caught.value.hint
    return caught.value


class Named(nn.Module):
    """One layer called `odd` and a function of it."""

    def __init__(self, layer, apply=None):
        super().__init__()
        self.odd, self.apply_ = layer, apply or (lambda layer, x: layer(x))

    def forward(self, x):
        return self.apply_(self.odd, x)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.InstanceNorm1d(4, track_running_stats=True)],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("frozen", [True, False])
def test_batch_norm_is_refused_by_name(layer, frozen):
    layer.requires_grad_(not frozen)
    module = nn.Sequential(nn.Linear(2, 2), layer)
    with pytest.raises(UsageError, match=rf"layer '1' \({type(layer).__name__}\)") as caught:
        PerExampleClipper(module, squares, 1.0)
    assert "GroupNorm" in caught.value.hint


def test_an_unknown_layer_is_refused_by_name_unless_it_is_frozen():
    module = Named(nn.Bilinear(WIDTH, WIDTH, 2), lambda layer, x: layer(x, x))
    error = refused(module, draw(3, 1)[:, 0], "layer 'odd' (Bilinear)")
    assert "odd.weight" in error.message
    assert "requires_grad_(False)" in error.hint
    frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), module)
    module.requires_grad_(False)
    with PerExampleClipper(frozen, squares, 1.0) as clipper:
        assert clipper.clipped_sum(draw(3, 1)[:, 0]).norms.min() > 0


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_parameters_that_a_layer_holds_out_of_sight_are_refused(layer):
    module = Named(layer(WIDTH, 3, batch_first=True), lambda layer, x: layer(x)[0])
    refused(module, draw(3, 1)[:, 0], "odd.")


def test_a_parameter_of_a_closure_is_refused():
    module = nn.Linear(WIDTH, 2)
    weight = module.weight
    refused(
        module,
        draw(3, 1)[:, 0],
        "'weight'",
        lambda m, x: (m(x) + functional.linear(x, weight)).square().flatten(1).mean(1),
    )


@pytest.mark.parametrize(
    "apply",
    [
        lambda layer, x: layer(x) - layer(x).mean(0),  # looks across examples
        lambda layer, x: layer(x.flip(0)).flip(0),  # in another order
        lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1),  # tokens first
        lambda layer, x: layer(x.repeat(3, 1, 1)).unflatten(0, (3, -1)).mean(0),  # draws first
    ],
)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_layers_that_mix_or_move_examples_are_refused(apply, size):
    x = torch.randn(size, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    refused(Named(nn.Linear(WIDTH, 3), apply), x, "layer 'odd' (Linear)")


def test_a_first_axis_that_is_no_multiple_of_the_batch_is_refused():
    module = Named(nn.Linear(WIDTH, 3), lambda layer, x: layer(x[0])[None].expand(len(x), -1, -1))
    refused(module, draw(3, 1)[:, 0], "first axis")


def test_a_layout_that_turns_up_later_is_checked_as_well():
    """A position table taken for examples when a ragged batch has as many rows as tokens."""

    class Switches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)

        def forward(self, x):
            if len(x) == 4:
                return self.layer(x.transpose(0, 1).contiguous()).transpose(0, 1) + self.layer(x)
            return self.layer(x)

    with PerExampleClipper(Switches(), squares, 1.0) as clipper:
        clipper.clipped_sum(draw(6, 1)[:, 0])
        with pytest.raises(UsageError, match="another example"):
            clipper.clipped_sum(draw(4, 1)[:, 0])


def test_buffers_that_learn_from_examples_are_refused():
    class Learns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x):
            self.seen += x.mean((0, 1))
            return self.layer(x)

    refused(Learns(), draw(3, 1)[:, 0], "buffers")


def test_an_input_changed_in_place_is_refused():
    def apply(layer, x):
        x = x * 1
        y = layer(x)
        x += 1
        return y + x.sum()

    refused(Named(nn.Linear(WIDTH, 3), apply), draw(1, 1)[:, 0], "in place")


def test_parameters_are_not_written_during_the_pass():
    refused(
        Named(nn.Linear(WIDTH, 3), lambda layer, x: layer(x) + layer.bias.mul_(2)),
        draw(3, 1)[:, 0],
        "'mul_'",
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_refused_and_leaves_no_gradient(reentrant):
    module = Named(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)),
        lambda layer, x: checkpoint(layer, layer(x), use_reentrant=reentrant),
    )
    with PerExampleClipper(module, squares, 1.0) as clipper, pytest.raises(UsageError):
        clipper.clipped_sum(draw(3, 1)[:, 0])
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_look_at_the_batch_are_refused(options):
    module = Named(nn.Embedding(4, 3, **options))
    refused(module, torch.zeros(3, 2, dtype=torch.long), "layer 'odd' (Embedding)")


def test_the_message_holds_no_number_of_the_batch():
    module = Named(nn.Bilinear(WIDTH, WIDTH, 2), lambda layer, x: layer(x, x))
    error = refused(module, torch.full((3, 4, WIDTH), 271828.0), "Bilinear")
    assert "271828" not in error.message + error.hint
