"""Halves of real MNIST against each other, and Fashion-MNIST against them: what figures mean."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from dpsynth.assess.bootstrap import frechet_interval
from dpsynth.assess.density import neighbourhood
from dpsynth.assess.diversity import diversity_interval
from dpsynth.assess.kernel import kernel_interval
from dpsynth.assess.metrics import frechet_distance, per_class_frechet

DATA = Path(__file__).parents[3] / "shared" / "data"
COUNT, WIDTH = 1500, 24

pytestmark = pytest.mark.skipif(
    not (DATA / "mnist").is_dir(), reason="MNIST is not beside this checkout"
)


def read(name: str, what: str, skip: int) -> np.ndarray:
    path = DATA / name / f"t10k-{what}-ubyte.gz"
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=skip)


@pytest.fixture(scope="module")
def spaces() -> dict[str, np.ndarray]:
    """Principal components of the pixels: a first half, a second half, and clothes."""
    digits = read("mnist", "images-idx3", 16).reshape(-1, 784) / 255
    clothes = read("fashion-mnist", "images-idx3", 16).reshape(-1, 784) / 255
    order = np.random.default_rng(0).permutation(len(digits))[: 2 * COUNT]
    pca = PCA(WIDTH, random_state=0).fit(digits[order])
    points, labels = pca.transform(digits[order]), read("mnist", "labels-idx1", 8)[order]
    return {
        "first": points[:COUNT],
        "second": points[COUNT:],
        "clothes": pca.transform(clothes[:COUNT]),
        "labels": labels.astype(np.int64),
    }


def test_distances_of_halves_are_at_the_floor(spaces: dict[str, np.ndarray]) -> None:
    first, second = spaces["first"], spaces["second"]
    found, other = frechet_interval(first, second), frechet_interval(spaces["clothes"], second)
    assert found.beyond.low == 0
    assert other.beyond.low > 50 * found.here.high
    null, apart = kernel_interval(first, second), kernel_interval(spaces["clothes"], second)
    assert null.low < 0 < null.high < apart.low
    labels = spaces["labels"]
    by_class = per_class_frechet(
        spaces["first"], labels[:COUNT], spaces["second"], labels[COUNT:], 10
    )
    # Fewer images a class: more bias, no other difference.
    assert frechet_distance(first, second) < np.mean(by_class) < 20 * found.here.high


def test_balls_of_halves_cover_each_other_alike(spaces: dict[str, np.ndarray]) -> None:
    found = neighbourhood(spaces["first"], spaces["second"])
    precision, recall = found.precision, found.recall
    assert precision.interval is not None
    assert precision.interval.low < recall.value < precision.interval.high
    assert found.density.interval is not None
    assert found.density.interval.low < 1 < found.density.interval.high
    assert found.coverage.value > 0.9
    clothes = neighbourhood(spaces["clothes"], spaces["second"])
    assert clothes.coverage.value < 0.5 < found.coverage.interval.low


def test_halves_are_as_diverse_as_each_other(spaces: dict[str, np.ndarray]) -> None:
    labels = spaces["labels"]
    first = diversity_interval(spaces["first"], labels[:COUNT], 10)
    second = diversity_interval(spaces["second"], labels[COUNT:], 10)
    assert max(first.low, second.low) < min(first.high, second.high)
