"""Feature spaces of votes: one record's feature is the same alone and in any company."""

import numpy as np
import pytest
import torch

from dpsynth.errors import MissingError, UsageError
from dpsynth.public.geometry import PixelCodec
from dpsynth.public.representation import Representation
from dpsynth.public.voting import (
    WIDE,
    code_space,
    lenet_space,
    load_features,
    save_features,
    train_features,
)

SHAPE = (28, 28, 1)


def pictures(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *SHAPE), dtype=np.uint8)


@pytest.fixture(scope="module")
def net():
    return train_features(pictures(40), np.arange(40) % 4, 4, steps=2, seed=0)


def test_a_records_feature_is_the_same_bits_alone_and_among_others(net):
    space = lenet_space(net, pictures(10))
    together = space.encode_exact_many(pictures(6))
    alone = np.stack([space.encode_exact(one) for one in pictures(6)])
    assert (together == alone).all()
    assert space.encode_exact_many(pictures(0)).shape == (0, 84)
    assert space.encode(pictures(6)).numpy() == pytest.approx(together, rel=1e-3, abs=1e-4)
    with pytest.raises(UsageError, match="decoded"):
        space.decode(torch.zeros(1, 84))
    with pytest.raises(UsageError, match="shape"):
        space.encode(np.zeros((1, 8, 8, 1), np.uint8))


def test_radii_are_wide_and_of_public_images(net):
    public = pictures(20)
    space = lenet_space(net, public)
    largest = np.linalg.norm(space.encode_exact_many(public), axis=1).max()
    assert space.radius == pytest.approx(WIDE * largest, rel=1e-3)
    plain = Representation(PixelCodec(SHAPE), SHAPE, np.zeros(784), 1.0, 1.0)
    assert code_space(plain, public).radius > 2 * plain.radius
    with pytest.raises(UsageError, match="public images"):
        code_space(plain, np.zeros((3, *SHAPE), np.uint8))


def test_a_saved_network_is_read_back_to_the_bit(net, tmp_path):
    space = lenet_space(net, pictures(10))
    save_features(tmp_path / "f.safetensors", net, space.radius)
    read = load_features(tmp_path / "f.safetensors", SHAPE)
    assert read.radius == space.radius
    assert (read.encode_exact_many(pictures(3)) == space.encode_exact_many(pictures(3))).all()
    with pytest.raises(UsageError, match="other images"):
        load_features(tmp_path / "f.safetensors", (28, 28, 3))
    with pytest.raises(MissingError):
        load_features(tmp_path / "absent.safetensors", SHAPE)
