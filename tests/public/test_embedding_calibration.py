"""Public calibration of feature maps, against dense answers."""

import itertools

import numpy as np
import pytest

from dpsynth.errors import UsageError
from dpsynth.models.embeddings.build import build_map
from dpsynth.planning.embedding import Embedding
from dpsynth.public.embedding import (
    calibrate_map,
    median_difference,
    median_distance,
    pixel_pairs,
)

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (41, 4, 5, 1), dtype=np.uint8)
IMAGES[:, 0] = 0  # a row that never varies


def test_the_bandwidth_is_the_median_distance():
    rows = IMAGES.reshape(41, -1) / 255
    wanted = sorted(np.linalg.norm(a - b) for a, b in itertools.combinations(rows, 2))
    assert wanted[0] < median_distance(IMAGES, 0) < wanted[-1]
    assert abs(median_distance(IMAGES, 0) - np.median(wanted)) < 1e-2


def test_a_pixels_length_looks_at_what_varies():
    assert abs(median_difference(IMAGES, 0) - 6**-0.5) < 0.05  # uniform levels: variance 1/12 each


def test_pairs_are_different_places_that_vary():
    pairs = pixel_pairs(IMAGES, 60, 0)
    assert pairs.shape == (60, 2)
    assert (pairs >= 5).all()
    assert (pairs < 20).all()
    assert len({frozenset(pair) for pair in pairs.tolist()}) == 60
    assert (pixel_pairs(IMAGES, 60, 0) == pairs).all()
    every = pixel_pairs(IMAGES, 500, 0)
    assert len({frozenset(pair) for pair in every.tolist()}) == len(every) == 20 * 19 // 2
    assert (every[:105] >= 5).all()  # places that vary come first
    assert pixel_pairs(IMAGES, 0, 0).shape == (0, 2)
    assert len(pixel_pairs(np.zeros((3, 4, 5, 1), np.uint8), 5, 0)) == 5


@pytest.mark.parametrize("kind", ["fourier", "hermite", "tangent"])
def test_a_recipe_makes_a_map_of_the_declared_size(kind):
    settings = Embedding(kind=kind, features=40, pairs=9, width=6)
    recipe = calibrate_map(IMAGES, settings, 3)
    assert recipe.dim == settings.dim(4, 5, 1)
    assert build_map(recipe).dim == recipe.dim
    assert calibrate_map(IMAGES, settings, 3).digest == recipe.digest


def test_declared_numbers_win_and_hopeless_images_are_refused():
    assert calibrate_map(IMAGES, Embedding(bandwidth=2.5), 0).numbers["bandwidth"] == 2.5
    same = np.zeros((5, 4, 5, 1), np.uint8)
    with pytest.raises(UsageError, match="bandwidth"):
        calibrate_map(same, Embedding(), 0)
    with pytest.raises(UsageError, match="2 public images"):
        calibrate_map(IMAGES[:1], Embedding(), 0)
