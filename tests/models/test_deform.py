"""Deformation and jitter: identity, range, shapes, sharpness, and that nothing else moves."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from dpsynth.models import deform as module
from dpsynth.models.deform import deform, jitter
from dpsynth.models.finish import gradient_energy
from dpsynth.models.seeding import generator

SHAPES = [(6, 1, 28, 28), (6, 1, 8, 8), (6, 3, 20, 33), (6, 1, 40, 17)]


def digits(side: int = 28, count: int = 300) -> Tensor:
    """Real digits (n, 1, side, side) with a margin, as MNIST has one."""
    images = torch.from_numpy(load_digits().images[:count]).float().div(16)[:, None]
    inner = functional.interpolate(
        images, size=(side - 8, side - 8), mode="bicubic", align_corners=False
    )
    return functional.pad(inner, (4, 4, 4, 4)).clamp(0, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_strength_is_the_identity_and_little_is_nearly_so(shape: tuple[int, ...]) -> None:
    images = torch.rand(shape, generator=generator(0))
    assert torch.equal(deform(images, 0.0, generator(1)), images)
    torch.testing.assert_close(deform(images, 1e-6, generator(1)), images, atol=1e-3, rtol=0)
    torch.testing.assert_close(jitter(images, 0, 0, 0, generator(1)), images, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_range_shape_and_seed(shape: tuple[int, ...], strength: float) -> None:
    images = torch.rand(shape, generator=generator(0))
    for function in (
        lambda seed: deform(images, strength, generator(seed)),
        lambda seed: jitter(images, 20 * strength, 0.2, 0.2, generator(seed)),
    ):
        once = function(1)
        assert once.shape == images.shape and once.dtype == images.dtype
        assert 0.0 <= float(once.min()) <= float(once.max()) <= 1.0
        assert torch.equal(once, function(1))
        assert not torch.equal(once, function(2))


def test_each_image_has_a_map_of_its_own() -> None:
    same = digits(count=1).expand(4, -1, -1, -1)
    for moved in (deform(same, 1.0, generator(0)), jitter(same, 6, 0.05, 0.03, generator(0))):
        assert all(not torch.equal(moved[0], other) for other in moved[1:])


def test_a_turn_is_a_turn_in_pixels_also_of_a_long_image() -> None:
    """A quarter turn puts a bar across where it stood upright, and keeps its length."""
    image = torch.zeros(1, 1, 21, 41)
    image[..., 4:17, 19:22] = 1.0
    grid = module._affine_grid(
        image, torch.tensor([torch.pi / 2]), torch.ones(2, 1), torch.zeros(1), torch.zeros(1, 2)
    )
    turned = module._resampled(image, grid, "zeros")
    expected = torch.zeros_like(image)
    expected[..., 9:12, 14:27] = 1.0
    torch.testing.assert_close(turned, expected, atol=1e-3, rtol=0)


def test_a_shift_is_a_share_of_the_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "_uniform", lambda count, limit, source: torch.full((count,), limit)
    )
    images = torch.rand(2, 1, 10, 20, generator=generator(0))
    moved = jitter(images, 0.0, 0.0, 0.1, generator(0))
    torch.testing.assert_close(moved[..., :9, :18], images[..., 1:, 2:], atol=1e-4, rtol=0)


def test_thickness_goes_both_ways_and_never_on_tiny_images() -> None:
    images = digits()
    ink = images.mean(dim=(1, 2, 3))
    thick = module._thickness(images, torch.ones(len(images))).mean(dim=(1, 2, 3))
    thin = module._thickness(images, -torch.ones(len(images))).mean(dim=(1, 2, 3))
    assert bool((thick > ink).all()) and bool((thin < ink).all())
    torch.testing.assert_close(module._thickness(images, torch.zeros(len(images))), images)
    torch.testing.assert_close(  # no further than the whole dilation
        module._thickness(images, torch.full((len(images),), 2.0)),
        functional.max_pool2d(images, 3, stride=1, padding=1),
    )


def test_tiny_images_keep_their_thickness(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Tensor:
        raise AssertionError("thickness of an image of 8 pixels")

    monkeypatch.setattr(module, "_thickness", refused)
    deform(torch.rand(2, 1, 8, 8), 1.0, generator(0))
    with pytest.raises(AssertionError):
        deform(torch.rand(2, 1, 16, 16), 1.0, generator(0))


def test_jitter_keeps_sharpness_where_bilinear_resampling_would_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On digits as soft as decoded ones: a jump from black to white never fits a new grid."""
    images = digits()
    images = 0.5 * images + 0.5 * functional.avg_pool2d(images, 3, stride=1, padding=1)
    energy = gradient_energy(images)
    moved = jitter(images, 6.0, 0.05, 0.03, generator(0))
    assert gradient_energy(moved) == pytest.approx(energy, rel=0.05)
    real = functional.grid_sample
    monkeypatch.setattr(
        module.functional, "grid_sample", lambda *a, **k: real(*a, **{**k, "mode": "bilinear"})
    )
    blurred = jitter(images, 6.0, 0.05, 0.03, generator(0))
    assert gradient_energy(blurred) < 0.9 * energy
