"""`released/embedding.safetensors`: noisy mean embeddings by class; and a feature map's recipe.

The recipe is public: kind, seed and numbers, from which `models.embeddings` makes the map again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.tensors import load_release, load_tensors, save_tensors
from dpsynth.errors import UsageError

FORMAT, NAME = "dpsynth-embedding-1", "embedding.safetensors"
MAP_FORMAT, MAP_NAME = "dpsynth-feature-map-1", "feature-map.safetensors"
KINDS = ("fourier", "hermite", "tangent")
_ARRAYS = ("counts", "sums")
_STDS = ("count_std", "sum_std")
_PUBLIC = "map/"


@dataclass(frozen=True, eq=False)
class MapRecipe:
    """What makes a feature map: public numbers alone.

    `shape`: H, W, C; `numbers` and `arrays`: of the kind, see `models.embeddings.build`. `digest`:
    of the map that was made of them where the recipe was written.
    """

    kind: str
    shape: tuple[int, int, int]
    seed: int
    dim: int
    digest: str
    numbers: Mapping[str, float]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise UsageError for an unknown kind or numbers that make no sense."""
        if self.kind not in KINDS:
            raise UsageError(f"feature maps of kind {self.kind!r} are not known")
        if len(self.shape) != 3 or min(*self.shape, self.dim) < 1:
            raise UsageError(f"a feature map of {self.shape} with {self.dim} numbers")
        if not np.isfinite(list(self.numbers.values())).all():
            raise UsageError("a feature map's recipe holds a number that is not finite")

    def to_metadata(self) -> dict[str, str]:
        """Everything but the arrays, as text."""
        facts = {
            "kind": self.kind,
            "shape": list(self.shape),
            "seed": self.seed,
            "dim": self.dim,
            "digest": self.digest,
            "numbers": dict(self.numbers),
        }
        return {"map": json.dumps(facts, sort_keys=True)}

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays, named apart from those of the file that they stand in."""
        return {_PUBLIC + name: array for name, array in self.arrays.items()}


@dataclass(frozen=True, eq=False)
class ReleasedEmbedding:
    """Noisy sums over the private records, of features of norm at most 1.

    counts (Y,) and sums (Y, D) by class, none divided by a count; every entry with independent
    discrete Gaussian noise of std `count_std` or `sum_std`. `recipe`: of the feature map.
    """

    counts: NDArray[np.float64]
    sums: NDArray[np.float64]
    count_std: float
    sum_std: float
    recipe: MapRecipe

    @property
    def classes(self) -> int:
        """Number of declared classes Y; 1 where records have no labels."""
        return len(self.counts)

    @property
    def dim(self) -> int:
        """Numbers D of a feature vector."""
        return int(self.sums.shape[1])

    def check(self) -> None:
        """Raise UsageError when shapes or numbers make no sense."""
        shapes = (self.counts.shape, self.sums.shape)
        if self.counts.ndim != 1 or not len(self.counts):
            raise UsageError(f"{NAME} holds counts of shape {self.counts.shape}")
        if shapes[1] != (len(self.counts), self.recipe.dim):
            raise UsageError(f"{NAME} holds arrays of shapes {shapes} that do not fit together")
        stds = np.array([self.count_std, self.sum_std])
        finite = all(np.isfinite(a).all() for a in (self.counts, self.sums, stds))
        if not finite or stds.min() < 0:
            raise UsageError(f"{NAME} holds a value that is not finite, or a negative noise")
        self.recipe.check()

    def weights(self) -> NDArray[np.float64]:
        """Shares (Y,) of the classes, from noisy counts alone: none below 0, of sum 1.

        A count below its own noise says nothing of the class: it is taken for none. Where no class
        is left, all are equal.
        """
        kept = np.where(self.counts > self.count_std, self.counts, 0.0)
        total = kept.sum()
        found: NDArray[np.float64] = (
            kept / total if total > 0 else np.full(self.classes, 1 / self.classes)
        )
        return found

    def means(self) -> NDArray[np.float64]:
        """Noisy mean features (Y, D): sums over counts, counts of 1 and their noise at least."""
        return self.sums / np.maximum(self.counts, max(1.0, self.count_std))[:, None]


def save_embedding(path: Path, embedding: ReleasedEmbedding) -> None:
    """Write the embedding atomically. Raises UsageError when it makes no sense."""
    embedding.check()
    metadata = {name: repr(float(getattr(embedding, name))) for name in _STDS}
    metadata |= {"format": FORMAT, "room": "released", **embedding.recipe.to_metadata()}
    arrays = {name: getattr(embedding, name).astype(np.float64) for name in _ARRAYS}
    save_tensors(path, arrays | embedding.recipe.to_arrays(), metadata)


def load_embedding(path: Path) -> ReleasedEmbedding:
    """Read the embedding.

    Raises:
        MissingError: nothing was released yet.
        UsageError: the file is damaged, of another format, or not a released one.
    """
    arrays, metadata = load_release(path, FORMAT, by="release-embedding")
    try:
        stds = {name: float(metadata[name]) for name in _STDS}
        counts, sums = (arrays[name] for name in _ARRAYS)
        if any(array.dtype != np.float64 for array in (counts, sums)):
            raise ValueError("it holds numbers that are not float64")
        found = ReleasedEmbedding(counts, sums, recipe=_recipe(arrays, metadata), **stds)
        found.check()
    except (UsageError, KeyError, ValueError, TypeError, IndexError) as error:
        raise _damaged(path, error, "dpsynth release-embedding") from error
    return found


def save_recipe(path: Path, recipe: MapRecipe, made_by: str = "") -> None:
    """Write `public/feature-map.safetensors`, atomically; `made_by`: the recipe of its stage."""
    recipe.check()
    metadata = {"format": MAP_FORMAT, "room": "public", **recipe.to_metadata()}
    metadata |= {"recipe": made_by} if made_by else {}
    # A safetensors file holds one array or more.
    arrays = recipe.to_arrays() or {"none": np.zeros(1)}
    save_tensors(path, arrays, metadata)


def load_recipe(path: Path) -> MapRecipe:
    """Read a feature map's recipe.

    Raises:
        MissingError: `dpsynth pretrain` has not made it.
        UsageError: the file is damaged, or of another format.
    """
    arrays, metadata = load_tensors(path)
    try:
        if metadata.get("format") != MAP_FORMAT:
            raise ValueError(f"format {metadata.get('format')!r}")
        recipe = _recipe(arrays, metadata)
        recipe.check()
    except (UsageError, KeyError, ValueError, TypeError) as error:
        raise _damaged(path, error, "dpsynth pretrain") from error
    return recipe


def _recipe(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> MapRecipe:
    facts = json.loads(metadata["map"])
    height, width, channels = (int(side) for side in facts["shape"])
    return MapRecipe(
        kind=str(facts["kind"]),
        shape=(height, width, channels),
        seed=int(facts["seed"]),
        dim=int(facts["dim"]),
        digest=str(facts["digest"]),
        numbers={str(name): float(value) for name, value in facts["numbers"].items()},
        arrays={n.removeprefix(_PUBLIC): a for n, a in arrays.items() if n.startswith(_PUBLIC)},
    )


def _damaged(path: Path, error: Exception, by: str) -> UsageError:
    why = error.message if isinstance(error, UsageError) else str(error)
    return UsageError(f"{path.name} is damaged: {why}", hint=f"ask for the file that `{by}` wrote")
