import pytest
import torch
from torch import nn

from dpsynth.models.autoencoder import (
    ConvAutoencoder,
    build_autoencoder,
    pixels,
    reconstruction_loss,
)
from dpsynth.models.seeding import batches, generator, seeded_initialisation
from dpsynth.planning.schema import Autoencoder, ImageShape, Representation


@pytest.mark.parametrize(
    ("height", "width", "channels"),
    [(8, 8, 1), (28, 28, 1), (64, 64, 3), (9, 13, 3), (30, 17, 1), (1, 1, 1)],
)
def test_any_shape_comes_back(height, width, channels):
    model = ConvAutoencoder(height, width, channels, code=5, base=4)
    images = torch.rand(3, channels, height, width)
    codes = model.encode(images)
    assert codes.shape == (3, 5)
    assert model.decode(codes).shape == images.shape


def test_a_code_does_not_depend_on_the_batch():
    model = ConvAutoencoder(28, 28, 1, code=6, base=4).double().eval()
    images = torch.rand(4, 1, 28, 28, dtype=torch.float64)
    alone = torch.cat([model.encode(image[None]) for image in images])
    torch.testing.assert_close(model.encode(images), alone, rtol=0, atol=1e-12)


def test_no_layer_keeps_statistics_or_drops_units():
    model = ConvAutoencoder(28, 28, 1, code=6, base=4)
    assert not list(model.buffers())
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(model.train()(images), model.eval()(images))


@pytest.mark.parametrize(("height", "width", "channels"), [(8, 8, 1), (28, 28, 1), (64, 50, 3)])
def test_norm_follows_every_layer_but_the_two_last(height, width, channels):
    model = ConvAutoencoder(height, width, channels, code=5, base=4, hidden=24, norm=True)
    assert model.decode(model.encode(torch.rand(3, channels, height, width))).shape == (
        (3, channels, height, width)
    )
    layers = [layer for part in (model.down, model.lift, model.up) for layer in part]
    weighted = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    plain = [layer for layer in layers if isinstance(layer, weighted) and layer.bias is not None]
    assert plain == [model.down[-1], model.up[-1]]
    for layer, after, last in zip(layers, layers[1:], layers[2:], strict=False):
        if isinstance(layer, weighted) and layer not in plain:
            assert isinstance(after, nn.BatchNorm1d | nn.BatchNorm2d)
            assert isinstance(last, nn.ReLU)
    assert model.down[-1].in_features == model.lift[0].out_features == 24
    assert not any(isinstance(layer, nn.GELU) for layer in layers)


def test_a_normalised_code_does_not_depend_on_the_batch():
    model = ConvAutoencoder(28, 28, 1, code=6, base=4, norm=True).double()
    images = torch.rand(4, 1, 28, 28, dtype=torch.float64)
    model(images)  # the averages move once
    model.eval()
    alone = torch.cat([model.encode(image[None]) for image in images])
    torch.testing.assert_close(model.encode(images), alone, rtol=0, atol=1e-12)


def test_losses_by_hand():
    logits, images = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.25]])
    p = torch.sigmoid(logits)
    entropy = -(images * p.log() + (1 - images) * (1 - p).log()).mean()
    torch.testing.assert_close(reconstruction_loss(logits, images), entropy)
    squares = 4 * ((p - images) ** 2).mean()
    torch.testing.assert_close(reconstruction_loss(logits, images, "squares"), squares)


def test_growing_codes_do_not_drown_the_noise():
    """Ten times longer codes get ten times the noise: what reaches the decoder just scales."""
    model = ConvAutoencoder(8, 8, 1, code=4, base=4)
    images, noise = torch.rand(16, 1, 8, 8), torch.randn(16, 4)
    seen = []
    model.decode = lambda codes: seen.append(codes) or codes  # type: ignore[method-assign]
    model(images, noise)
    last = model.down[-1]
    with torch.no_grad():
        last.weight.mul_(10.0)
        last.bias.mul_(10.0)
    model(images, noise)
    torch.testing.assert_close(seen[1], 10.0 * seen[0], rtol=1e-4, atol=1e-4)


def test_it_learns_to_rebuild():
    settings = Representation(kind="autoencoder", code=8, autoencoder=Autoencoder(width=8))
    with seeded_initialisation(0):
        model = build_autoencoder(settings, ImageShape(height=8, width=8))
    images = (torch.rand(64, 1, 8, 8, generator=generator(0)) > 0.5).float()
    images[:, :, :, 4:] = 0.0
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = float(reconstruction_loss(model(images), images).detach())
    for _ in range(150):
        optimiser.zero_grad()
        loss = reconstruction_loss(model(images), images)
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.6 * first


def test_pixels_and_seeds():
    images = torch.tensor([[[[0], [255]]]], dtype=torch.uint8)
    assert pixels(images).tolist() == [[[[0.0, 1.0]]]]
    before = torch.random.get_rng_state()
    with seeded_initialisation(1):
        one = torch.nn.Linear(3, 2).weight
    assert torch.equal(before, torch.random.get_rng_state())
    with seeded_initialisation(1):
        assert torch.equal(one, torch.nn.Linear(3, 2).weight)


def test_batches_cover_an_epoch_once():
    parts = list(batches(10, 4, generator(0)))
    assert [len(part) for part in parts] == [4, 4]
    assert len(set(torch.cat(parts).tolist())) == 8
    assert [len(part) for part in batches(3, 8, generator(0))] == [3]
