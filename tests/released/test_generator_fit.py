"""The generator: an unbiased distance, a fit that finds the classes, and its file."""

import math

import numpy as np
import pytest
import torch

from dpsynth.artifacts.embedding import MapRecipe, ReleasedEmbedding, save_embedding
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.embeddings.build import build_map
from dpsynth.models.generator import load_generator, new_generator, save_generator
from dpsynth.models.lenet import to_tensor
from dpsynth.models.seeding import generator
from dpsynth.planning.embedding import Embedding, GeneratorFit
from dpsynth.public.embedding import calibrate_map
from dpsynth.released.embedding import (
    distance,
    draw_images,
    draw_labels,
    fit_generator,
    train_generator,
)

RNG = np.random.default_rng(0)
# Class 0: bright left half, class 1: bright right half; 4x4.
LABELS = np.repeat([0, 1], 60)
IMAGES = RNG.integers(0, 60, (120, 4, 4, 1), dtype=np.uint8)
IMAGES[:60, :, :2] += 180
IMAGES[60:, :, 2:] += 180
FIT = GeneratorFit(width=32, depth=1, latent=4, steps=150, batch=32, learning_rate=1e-2)


def embedded(kind="fourier", noise=0.02, counts=(60.0, 60.0)):
    settings = Embedding(kind=kind, features=200, pairs=20, width=20, order=8)
    recipe = calibrate_map(IMAGES, settings, 1)
    features = build_map(recipe).encode_exact_many(IMAGES)
    sums = np.stack([features[y == LABELS].sum(0) for y in range(2)])
    sums += noise * RNG.normal(size=sums.shape)
    return ReleasedEmbedding(np.array(counts), sums, noise, noise, recipe)


@pytest.mark.parametrize("spread", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["fourier", "hermite", "tangent"])
def test_the_distance_is_that_of_pairs_of_different_images(kind, spread):
    space = build_map(embedded(kind).recipe)
    images, each = IMAGES[[0, 5, 9, 61, 70, 99]], 3
    features = space.encode_exact_many(images).reshape(2, each, -1)
    means = RNG.normal(size=(2, features.shape[-1])) / 10
    weights, wanted = np.array([0.3, 0.7]), 0.0
    for y in range(2):
        pairs = [
            f @ g for i, f in enumerate(features[y]) for j, g in enumerate(features[y]) if i != j
        ]
        wanted += weights[y] * (spread * np.mean(pairs) - 2 * features[y].mean(0) @ means[y])
    aims = torch.from_numpy(means).float(), torch.from_numpy(weights).float()
    found = distance(space, to_tensor(images), *aims, spread)
    assert math.isclose(float(found), wanted, abs_tol=2e-3)


@pytest.mark.parametrize("kind", ["fourier", "hermite", "tangent"])
def test_a_fit_finds_each_classs_own_images(kind):
    model = fit_generator(embedded(kind), FIT, 0)
    drawn = draw_images(model, LABELS, generator(1)).astype(float)
    for y, own in enumerate((slice(0, 2), slice(2, 4))):
        other = slice(2, 4) if y == 0 else slice(0, 2)
        mine = drawn[y == LABELS]
        assert mine[:, :, own].mean() > mine[:, :, other].mean() + 80


def test_a_class_without_records_costs_nothing_and_breaks_nothing():
    model = fit_generator(embedded(counts=(60.0, -4.0)), FIT.model_copy(update={"steps": 5}), 0)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    labels = draw_labels(embedded(counts=(60.0, -4.0)), 50, generator(0))
    assert (labels == 0).all()


def test_training_is_not_done_twice_and_needs_a_release(tmp_path):
    run = RunDir.create(tmp_path / "run")
    few = FIT.model_copy(update={"steps": 3})
    with pytest.raises(MissingError):
        train_generator(run, few, 0)
    save_embedding(run.released / "embedding.safetensors", embedded())
    first = train_generator(run, few, 0)
    path = run.released / "generator.safetensors"
    made = path.stat().st_mtime_ns
    assert train_generator(run, few, 0) == first
    assert path.stat().st_mtime_ns == made
    assert train_generator(run, few, 1)["sha256"] != first["sha256"]
    save_embedding(run.released / "embedding.safetensors", embedded(noise=0.5))
    assert train_generator(run, few, 1)["sha256"] != first["sha256"]


@pytest.mark.parametrize("norm", [False, True])
def test_the_generators_file_comes_back_or_is_refused(tmp_path, norm):
    path = tmp_path / "generator.safetensors"
    model = new_generator((4, 4, 1), 2, 3, (8, 8), 5, norm=norm)
    if norm:
        model(torch.randn(20, 3, generator=generator(1)), torch.arange(20) % 2)  # moves its means
    model.eval()
    save_generator(path, model, seed="5")
    found, facts = load_generator(path)
    assert facts["seed"] == "5"
    one, other = (draw_images(m, LABELS, generator(0)) for m in (model, found))
    assert (one == other).all()
    assert one.shape == (120, 4, 4, 1)
    arrays, metadata = load_tensors(path)
    for key, value in (("generator", "{}"), ("format", "x"), ("room", "curator")):
        save_tensors(path, arrays, {**metadata, key: value})
        with pytest.raises(UsageError):
            load_generator(path)


def test_a_map_that_cannot_be_made_again_is_refused():
    given = embedded()
    recipe = given.recipe
    changed = MapRecipe(
        recipe.kind, recipe.shape, recipe.seed + 1, recipe.dim, recipe.digest, recipe.numbers
    )
    with pytest.raises(UsageError, match="not the one"):
        fit_generator(ReleasedEmbedding(given.counts, given.sums, 1.0, 1.0, changed), FIT, 0)
