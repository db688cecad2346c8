"""The noise source: cryptographic, fresh, never inherited; the coins are Poisson sampling's."""

import copy
import os
import pickle  # noqa: TID251 - to show that it is refused

import numpy as np
import pytest
import torch

from dpsynth.errors import UsageError
from dpsynth.private.noise import MAX_SCALE, NoiseSource


def test_two_sources_and_two_draws_differ():
    first, second = NoiseSource(), NoiseSource()
    draws = [first.gaussian((50,), 1.0), first.gaussian((50,), 1.0), second.gaussian((50,), 1.0)]
    assert len({d.tobytes() for d in draws}) == 3
    assert draws[0].dtype == np.float64


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan"), float("inf")])
def test_meaningless_noise_is_refused(std):
    with pytest.raises(UsageError):
        NoiseSource().gaussian((2,), std)


@pytest.mark.parametrize("scale", [0, -3, MAX_SCALE + 1, 1.5, float("nan")])
def test_meaningless_discrete_scales_are_refused(scale):
    with pytest.raises(UsageError):
        NoiseSource().discrete_gaussian(scale, 2)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_meaningless_rates_are_refused(rate):
    with pytest.raises(UsageError):
        NoiseSource().coins(3, rate)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_source_is_never_saved_or_copied(way):
    with pytest.raises(TypeError):
        way(NoiseSource())


@pytest.mark.parametrize("make", [NoiseSource, lambda: NoiseSource.unsafe(3)])
def test_a_forked_child_draws_other_noise(make):
    source = make()
    source.gaussian((3,), 1.0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.write(write, source.gaussian((8,), 1.0).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 64)
    os.close(read)
    os.close(write)
    assert len(theirs) == 64
    assert theirs != source.gaussian((8,), 1.0).tobytes()


def test_an_unsafe_source_repeats_itself_and_says_so():
    first, second = NoiseSource.unsafe(7, "a"), NoiseSource.unsafe(7, "a")
    assert first.is_unsafe
    assert not NoiseSource().is_unsafe
    np.testing.assert_array_equal(first.gaussian((5,), 2.0), second.gaussian((5,), 2.0))
    drawn = first.discrete_gaussian(10**6, 5).tolist()
    assert drawn == second.discrete_gaussian(10**6, 5).tolist()
    assert drawn != NoiseSource.unsafe(7, "b").discrete_gaussian(10**6, 5).tolist()


def _within(value, mean, std, sigmas=6.0):
    assert abs(value - mean) < sigmas * std, (value, mean, std)


def _correlation(draws):
    """The largest correlation between two of the arrays."""
    return np.abs(np.corrcoef(draws) - np.eye(len(draws))).max()


SHAPES = {"one": (40, 50), "two": (40, 50), "vector": (2000,), "scale": (1,)}
BOUND = 6 / np.sqrt(2000)


def test_every_tensor_of_every_step_has_noise_of_its_own_and_the_declared_variance():
    source = NoiseSource()
    steps = [source.gaussian_like(SHAPES, 3.0) for _ in range(6)]
    assert {name: tuple(x.shape) for name, x in steps[0].items()} == SHAPES
    draws = [s[name].numpy().ravel() for s in steps for name in ("one", "two", "vector")]
    for draw in draws:
        _within(draw.mean(), 0, 3 / np.sqrt(len(draw)))
        _within((draw**2).mean() / 9, 1, np.sqrt(2 / len(draw)))
    assert _correlation(draws) < BOUND
    assert _correlation([np.roll(draw, shift) for shift, draw in enumerate(draws)]) < BOUND
    assert len({float(s["scale"]) for s in steps}) == 6


def test_one_key_for_two_tensors_would_be_seen():
    drawn = NoiseSource.unsafe(1).gaussian((2000,), 1.0)
    assert _correlation([drawn, NoiseSource.unsafe(1).gaussian((2000,), 1.0)]) > BOUND
    # Nor may a small part of the one come back in the other.
    other = NoiseSource().gaussian((2000,), 1.0)
    other[:400] = drawn[:400]
    assert _correlation([drawn, other]) > BOUND


def test_the_tensors_of_a_step_share_no_memory_with_each_other_or_the_next_step():
    source = NoiseSource()
    first, second = (source.gaussian_like({"a": (5,), "b": (5,)}, 1.0) for _ in range(2))
    before = [x.clone() for x in (first["b"], *second.values())]
    first["a"].zero_()
    for old, new in zip(before, (first["b"], *second.values()), strict=True):
        assert torch.equal(old, new)
    assert first["a"].dtype == torch.float64


def test_scalars_empty_tensors_and_no_tensor():
    drawn = NoiseSource().gaussian_like({"scalar": (), "empty": (0, 3)}, 1.0)
    assert drawn["scalar"].shape == ()
    assert drawn["empty"].shape == (0, 3)
    assert NoiseSource().gaussian_like({}, 1.0) == {}
    with pytest.raises(UsageError):
        NoiseSource().gaussian_like({"a": (2,)}, 0.0)


def test_gaussian_moments():
    draws = NoiseSource().gaussian((200_000,), 3.0)
    _within(draws.mean(), 0, 3 / np.sqrt(len(draws)))
    _within(draws.var() / 9, 1, np.sqrt(2 / len(draws)))


@pytest.mark.parametrize("scale", [1, 5, 2**30 + 1, 2**57])
def test_discrete_gaussian_moments(scale):
    draws = np.array([float(x) for x in NoiseSource().discrete_gaussian(scale, 4000)]) / scale
    _within(draws.mean(), 0, 1 / np.sqrt(len(draws)))
    _within(draws.var(), 1, np.sqrt(2 / len(draws)))


def test_discrete_gaussian_of_nothing():
    assert NoiseSource().discrete_gaussian(5, 0).shape == (0,)


def test_poisson_batches_have_binomial_mean_and_variance_and_independent_records():
    source, n, q, steps = NoiseSource(), 100, 0.1, 4000
    coins = np.stack([source.coins(n, q) for _ in range(steps)])
    sizes = coins.sum(axis=1)
    variance = n * q * (1 - q)
    _within(sizes.mean(), n * q, np.sqrt(variance / steps))
    _within(sizes.var(), variance, variance * np.sqrt(2.2 / steps))
    correlation = np.corrcoef(coins[:, 0], coins[:, 1])[0, 1]
    _within(correlation, 0, 1 / np.sqrt(steps))


def test_coins_at_the_ends():
    assert NoiseSource().coins(1000, 1.0).all()
    assert NoiseSource().coins(0, 0.5).shape == (0,)
    assert not NoiseSource().coins(1000, 2.0**-60).any()  # rounded down to never
