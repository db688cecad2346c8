"""Velocity models: shapes, the axis of noise draws, per-example gradients, files."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpsynth.errors import MissingError, UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity, load_velocity, save_velocity
from dpsynth.planning.velocity import Velocity

CLASSES = 3
KINDS = [Velocity(kind="mlp", width=32, depth=2), Velocity(kind="transformer", width=32, depth=2)]
both = pytest.mark.parametrize("settings", KINDS, ids=["mlp", "transformer"])
dims = pytest.mark.parametrize("dim", [2, 30])


def model_and_inputs(settings: Velocity, dim: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A model away from its zero output, and inputs for 5 examples of 3 draws each."""
    with seeded_initialisation(0):
        model = build_velocity(settings, dim, CLASSES)
        nn.init.normal_(model.leave.weight)  # type: ignore[arg-type, union-attr]
    source = generator(1)
    x = torch.randn(5, 3, dim, generator=source)
    return model, x, torch.rand(5, 3, generator=source), torch.arange(5) % (CLASSES + 1)


@both
@dims
def test_draws_are_independent_columns(settings: Velocity, dim: int) -> None:
    model, x, t, y = model_and_inputs(settings, dim)
    together = model(x, t, y)
    assert together.shape == x.shape
    apart = torch.stack([model(x[:, k], t[:, k], y) for k in range(3)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


@both
def test_examples_are_independent_rows(settings: Velocity) -> None:
    model, x, t, y = model_and_inputs(settings, 30)
    alone = torch.cat([model(x[i : i + 1], t[i : i + 1], y[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(model(x, t, y), alone, rtol=1e-4, atol=1e-5)


@both
@dims
def test_every_layer_sees_the_example_axis_first(settings: Velocity, dim: int) -> None:
    """What per-example gradient hooks rely on: inputs (B, ...) of at most three axes."""
    model, x, t, y = model_and_inputs(settings, dim)
    seen = []
    for layer in model.modules():
        if not list(layer.children()):
            assert isinstance(layer, nn.Linear | nn.LayerNorm | nn.Embedding)
            layer.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    model(x, t, y)
    assert seen
    assert all(shape[0] == 5 and len(shape) <= 3 for shape in seen)


@both
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_hooked_gradients_are_the_materialised_ones(settings: Velocity) -> None:
    from opacus.grad_sample import GradSampleModule

    model, x, t, y = model_and_inputs(settings, 30)
    grads = []
    for i in range(5):
        model.zero_grad()
        model(x[i : i + 1], t[i : i + 1], y[i : i + 1]).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    model.zero_grad()
    hooked = GradSampleModule(model, loss_reduction="sum")
    hooked(x, t, y).square().mean(dim=(1, 2)).sum().backward()
    for index, parameter in enumerate(model.parameters()):
        expected = torch.stack([grad[index] for grad in grads])
        torch.testing.assert_close(parameter.grad_sample, expected, rtol=1e-3, atol=1e-4)


@both
def test_starts_at_the_field_of_a_unit_gaussian(settings: Velocity) -> None:
    model = build_velocity(settings, 6, CLASSES)
    x, t = torch.randn(4, 6, generator=generator(0)), torch.tensor([0.0, 0.3, 0.5, 1.0])
    expected = ((2 * t - 1) / ((1 - t).square() + t.square()))[:, None] * x
    torch.testing.assert_close(model(x, t, torch.tensor([0, 1, 2, 3])), expected)


@both
def test_file_round_trip(settings: Velocity, tmp_path: Path) -> None:
    model, x, t, y = model_and_inputs(settings, 30)
    path = tmp_path / "model.safetensors"
    save_velocity(model, path, settings, room="released", made_of="abc")
    loaded, metadata = load_velocity(path, settings, 30, CLASSES)
    assert metadata["room"] == "released"
    assert metadata["made_of"] == "abc"
    assert not loaded.training
    assert torch.equal(loaded(x, t, y), model(x, t, y))


def test_refuses_another_model_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(MissingError):
        load_velocity(path, KINDS[0], 30, CLASSES)
    save_velocity(build_velocity(KINDS[0], 30, CLASSES), path, KINDS[0], room="public")
    for settings, dim, classes in ((KINDS[1], 30, 3), (KINDS[0], 31, 3), (KINDS[0], 30, 4)):
        with pytest.raises(UsageError, match="plan expects"):
            load_velocity(path, settings, dim, classes)
