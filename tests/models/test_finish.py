"""Sharpening: the mask itself, and that the gain really restores the energy of real images."""

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve
from sklearn.datasets import load_digits
from torch import Tensor

from dpsynth.models.finish import MOST, _blur, gain_for, gradient_energy, sharpen
from dpsynth.models.seeding import generator
from dpsynth.planning.schema import ImageShape
from dpsynth.readers.letters import render

SHAPES = [(4, 1, 28, 28), (4, 1, 8, 8), (4, 3, 20, 33), (2, 1, 1, 1), (2, 3, 1, 9)]


def digits() -> Tensor:
    return torch.from_numpy(load_digits().images).float().div(16)[:, None]


def letters() -> Tensor:
    images = [image for image, _ in render(200, 0, ImageShape(height=28, width=28))]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().div(255)


def blurred(images: Tensor, kernel: np.ndarray) -> Tensor:
    """Images under a known kernel, by SciPy."""
    parts = [convolve(image[0], kernel, mode="nearest") for image in images.numpy()]
    return torch.from_numpy(np.stack(parts))[:, None]


BOX = np.full((3, 3), 1 / 9)
MILD = 0.5 * BOX + 0.5 * np.eye(3)[1][:, None] * np.eye(3)[1]
CROSS = np.array([[0, 1, 0], [1, 4, 1], [0, 1, 0]]) / 8


@pytest.mark.parametrize("kernel", [MILD, CROSS], ids=["mild", "cross"])
@pytest.mark.parametrize("originals", [digits, letters])
def test_the_gain_restores_the_energy_of_blurred_images(originals, kernel: np.ndarray) -> None:
    images = originals()
    soft = blurred(images, kernel)
    gain = gain_for(soft, images)
    assert 0.0 < gain < MOST
    assert gradient_energy(soft) < 0.8 * gradient_energy(images)
    assert gradient_energy(sharpen(soft, gain)) == pytest.approx(gradient_energy(images), rel=1e-3)
    # And it brings the images themselves nearer, not only their energy.
    assert (sharpen(soft, gain) - images).square().mean() < (soft - images).square().mean()


def test_the_gain_is_nought_for_sharp_images_and_bounded_for_flat_ones() -> None:
    images = digits()
    assert gain_for(images, images) == 0.0
    assert gain_for(images, blurred(images, BOX)) == 0.0
    assert gain_for(torch.full_like(images, 0.5), images) == MOST


@pytest.mark.parametrize("shape", SHAPES)
def test_range_shape_identity_and_constants(shape: tuple[int, ...]) -> None:
    images = torch.rand(shape, generator=generator(0))
    assert torch.equal(sharpen(images, 0.0), images)
    sharp = sharpen(images, 2.0)
    assert sharp.shape == images.shape
    assert 0.0 <= float(sharp.min()) <= float(sharp.max()) <= 1.0
    flat = torch.full(shape, 0.3)
    torch.testing.assert_close(sharpen(flat, 4.0), flat)
    assert np.isfinite(gradient_energy(images))


def test_the_blur_is_scipys_and_looks_at_one_channel_of_one_image() -> None:
    images = torch.rand(3, 3, 7, 9, generator=generator(0))
    kernel = np.outer([1, 2, 1], [1, 2, 1]) / 16
    expected = np.stack(
        [
            np.stack([convolve(channel, kernel, mode="nearest") for channel in image])
            for image in images.numpy()
        ]
    )
    np.testing.assert_allclose(_blur(images).numpy(), expected, atol=1e-6)
    together, alone = sharpen(images, 1.0), sharpen(images[1:2, 2:3], 1.0)
    torch.testing.assert_close(together[1:2, 2:3], alone)


def test_energy_of_a_known_image() -> None:
    image = torch.tensor([[[[0.0, 1.0], [0.5, 0.5]]]])
    # Differences: down 0.5 and -0.5, across 1 and 0.
    assert gradient_energy(image) == pytest.approx((0.25 + 0.25 + 1.0 + 0.0) / 4)
    assert gradient_energy(torch.rand(2, 1, 1, 1)) == 0.0
