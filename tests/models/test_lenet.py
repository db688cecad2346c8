"""The fixed classifier: shapes, the protocol's determinism, learning on real digits."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from dpsynth.errors import UsageError
from dpsynth.models import lenet


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return (data.images[..., None] * 15.9).astype(np.uint8), data.target.astype(np.int64)


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (64, 64, 3), (17, 31, 3)])
def test_any_size_and_colour(shape: tuple[int, int, int]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, *shape), dtype=np.uint8)
    net = lenet.LeNet(7, shape[2]).eval()
    assert lenet.features(net, images).shape == (5, 84)
    assert lenet.predict(net, images).shape == (5,)


def test_learns_real_digits() -> None:
    images, labels = digits()
    net = lenet.train_probe(images[:1297], labels[:1297], 10, steps=300)
    assert lenet.accuracy(net, images[1297:], labels[1297:]) > 0.85
    shuffled = np.random.default_rng(0).permutation(labels[:1297])
    blind = lenet.train_probe(images[:1297], shuffled, 10, steps=100)
    assert lenet.accuracy(blind, images[1297:], labels[1297:]) < 0.3


def test_same_seed_same_probe_and_global_state_is_left_alone() -> None:
    images, labels = digits()
    before = torch.random.get_rng_state()
    nets = [lenet.train_probe(images, labels, 10, steps=5, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [net.head.weight for net in nets]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_classes_are_declared_not_counted() -> None:
    images, labels = digits()
    few = labels < 3
    net = lenet.train_probe(images[few], labels[few], 10, steps=5)
    assert net.head.out_features == 10
    with pytest.raises(UsageError):
        lenet.train_probe(images, labels, 9, steps=1)
    with pytest.raises(UsageError):
        lenet.train_probe(images[:0], labels[:0], 10, steps=1)


def test_features_do_not_depend_on_the_rest_of_the_batch() -> None:
    images, _ = digits()
    net = lenet.LeNet(10).eval()
    together = lenet.features(net, images[:600])
    np.testing.assert_allclose(together[-1:], lenet.features(net, images[599:600]), atol=1e-5)


def test_progress_counts_every_step() -> None:
    images, labels = digits()
    seen: list[int] = []
    lenet.train_probe(images[:40], labels[:40], 10, steps=7, progress=seen.append)
    assert sum(seen) == 7
