"""A feature map from its public recipe, and the recipe of a map."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.embedding import MapRecipe
from dpsynth.errors import UsageError
from dpsynth.models.embeddings.fourier import FourierMap
from dpsynth.models.embeddings.hermite import HermiteMap
from dpsynth.models.embeddings.space import FeatureMap, Shape
from dpsynth.models.embeddings.tangent import TangentMap


def recipe_of(
    kind: str,
    shape: Shape,
    seed: int,
    numbers: Mapping[str, float],
    arrays: Mapping[str, NDArray[Any]],
) -> MapRecipe:
    """The recipe of the map that these make. Raises UsageError where they make none."""
    made = _make(kind, shape, seed, numbers, arrays)
    return MapRecipe(kind, shape, seed, made.dim, made.digest(), dict(numbers), dict(arrays))


def build_map(recipe: MapRecipe) -> FeatureMap:
    """The map of a recipe.

    Raises:
        UsageError: it makes none, or another one than where it was written (another version of
            torch may draw other random numbers).
    """
    made = _make(recipe.kind, recipe.shape, recipe.seed, recipe.numbers, recipe.arrays)
    if made.dim != recipe.dim or made.digest() != recipe.digest:
        raise UsageError(
            "the feature map made here is not the one that was released with",
            hint="use the version of torch and NumPy that the run's lock names",
        )
    return made


def _make(
    kind: str,
    shape: Shape,
    seed: int,
    numbers: Mapping[str, float],
    arrays: Mapping[str, NDArray[Any]],
) -> FeatureMap:
    try:
        if kind == "fourier":
            return FourierMap(shape, int(numbers["features"]), numbers["bandwidth"], seed)
        if kind == "tangent":
            return TangentMap(shape, int(numbers["width"]), arrays["centre"], seed)
        if kind == "hermite":
            return HermiteMap(
                shape,
                length=numbers["length"],
                order=int(numbers["order"]),
                pairs=arrays["pairs"].astype(np.int64),
                pair_order=int(numbers["pair_order"]),
                alpha=numbers["alpha"],
            )
    except KeyError as error:
        raise UsageError(f"the recipe of a {kind} feature map has no {error}") from error
    raise UsageError(f"feature maps of kind {kind!r} are not known")
