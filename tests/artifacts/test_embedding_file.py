"""`embedding.safetensors` and `feature-map.safetensors`: round trips and refusals."""

from dataclasses import replace

import numpy as np
import pytest

from dpsynth.artifacts.embedding import (
    MapRecipe,
    ReleasedEmbedding,
    load_embedding,
    load_recipe,
    save_embedding,
    save_recipe,
)
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import MissingError, UsageError

PAIRS = np.array([[0, 1], [2, 3]])
RECIPE = MapRecipe("hermite", (2, 2, 1), 5, 7, "ab" * 32, {"length": 0.5}, {"pairs": PAIRS})
EMBEDDING = ReleasedEmbedding(
    np.array([3.5, -1.0]), np.random.default_rng(0).normal(size=(2, 7)), 0.5, 1.5, RECIPE
)


def test_an_embedding_comes_back_whole(tmp_path):
    path = tmp_path / "embedding.safetensors"
    save_embedding(path, EMBEDDING)
    found = load_embedding(path)
    assert (found.counts == EMBEDDING.counts).all()
    assert (found.sums == EMBEDDING.sums).all()
    assert (found.count_std, found.sum_std) == (0.5, 1.5)
    assert (found.recipe.arrays["pairs"] == PAIRS).all()
    assert found.recipe.to_metadata() == RECIPE.to_metadata()
    first = path.read_bytes()
    save_embedding(path, found)
    assert path.read_bytes() == first


def test_a_recipe_comes_back_whole(tmp_path):
    path = tmp_path / "feature-map.safetensors"
    for recipe in (RECIPE, replace(RECIPE, arrays={})):
        save_recipe(path, recipe)
        found = load_recipe(path)
        assert found.to_metadata() == recipe.to_metadata()
        assert list(found.arrays) == list(recipe.arrays)
    with pytest.raises(MissingError):
        load_recipe(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"counts": np.array([1.0])},
        {"counts": np.array([1.0, np.nan])},
        {"sums": np.zeros((2, 6))},
        {"sum_std": -1.0},
        {"recipe": replace(RECIPE, kind="other")},
        {"recipe": replace(RECIPE, dim=8)},
    ],
)
def test_nonsense_is_not_written(tmp_path, change):
    with pytest.raises(UsageError):
        save_embedding(tmp_path / "x.safetensors", replace(EMBEDDING, **change))


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "embedding.safetensors"
    save_embedding(path, EMBEDDING)
    arrays, metadata = load_tensors(path)
    for key, value in (
        ("map", "{"), ("map", "[]"), ("sum_std", "x"), ("format", "other"), ("room", "curator"),
    ):  # fmt: skip
        save_tensors(path, arrays, {**metadata, key: value})
        with pytest.raises(UsageError):
            load_embedding(path)
    save_tensors(path, {**arrays, "counts": arrays["counts"].astype(np.float32)}, metadata)
    with pytest.raises(UsageError, match="float64"):
        load_embedding(path)


def test_weights_and_means_are_finite_for_any_counts():
    assert EMBEDDING.weights().tolist() == [1.0, 0.0]
    assert np.isfinite(EMBEDDING.means()).all()
    nobody = replace(EMBEDDING, counts=np.array([-3.0, 0.2]))
    assert nobody.weights().tolist() == [0.5, 0.5]
    assert np.isfinite(nobody.means()).all()
