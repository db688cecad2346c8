"""Private stages over several processes: nothing of a mechanism depends on how many there are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rankkit import Starter
from spendkit import make_lock

from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import UsageError
from dpsynth.private.together import own_noise, require_same_codes, require_small_rounding, shard

WORLDS = (1, 2, 3)
N, RATE, STEPS = 60, 0.2, 200


class Pretended(Ranks):
    """One of several processes, none of which is there: for what needs no exchange."""

    def __init__(self, rank, world):
        self.rank, self.world, self.compared = rank, world, []

    def require_same(self, what, value):
        self.compared.append(value)


@pytest.fixture(scope="module")
def start():
    with Starter() as starter:
        yield starter


@pytest.fixture(scope="module")
def chunks(start):
    runs = {world: start("chunk", world) for world in WORLDS}
    assert all(set(run["codes"]) == {0} for run in runs.values()), runs
    return {world: run["answers"] for world, run in runs.items()}


@given(n=st.integers(0, 40), world=st.integers(1, 7))
def test_shards_partition_the_units(n, world):
    ranks = [Pretended(rank, world) for rank in range(world)]
    units = [bytes([number]) for number in range(n)]
    held = [list(shard(iter(units), one, lambda unit: unit)) for one in ranks]
    assert sorted(unit for part in held for unit in part) == units
    assert max(map(len, held)) - min(map(len, held)) <= 1  # shared out, never padded
    if world > 1:
        assert len({one.compared[0] for one in ranks}) == 1


class Coded:
    """A representation whose kernels round as `error` says."""

    shape = (2, 2, 1)

    def __init__(self, error):
        self.error = error

    def encode_exact_many(self, images):
        return images.reshape(len(images), -1) * (1 + self.error)


def test_processes_that_encode_otherwise_are_told_apart():
    ranks = [Pretended(rank, 2) for rank in range(2)]
    for error, one in zip((0.0, 2.0**-52), ranks, strict=True):
        require_same_codes(Coded(error), one)
        require_same_codes(Coded(0.0), one)
    assert ranks[0].compared[0] != ranks[1].compared[0]
    assert ranks[0].compared[1] == ranks[1].compared[1] == ranks[0].compared[0]
    require_same_codes(Coded(0.0), ALONE)


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_another_order_of_units_is_noticed(first, second):
    found = []
    for order in (first, second):
        one = Pretended(0, 2)
        list(shard(order, one, lambda unit: bytes([unit])))
        found += one.compared
    assert (found[0] == found[1]) == (first == second)


@pytest.mark.parametrize("world", WORLDS)
def test_noise_is_added_once_to_the_sum(chunks, world):
    found = chunks[world][0]
    n = found["entries"]
    assert n > 20_000
    # Twice the noise would give 2 n, and none would give 0.
    assert abs(found["squares"] - n) < 6 * (2 * n) ** 0.5


@pytest.mark.parametrize("world", WORLDS)
def test_every_process_takes_the_same_step(chunks, world):
    assert len({answer["bits"] for answer in chunks[world]}) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_the_batch_is_a_poisson_sample_of_all_units(chunks, world):
    sizes = np.array([answer["sizes"] for answer in chunks[world]]).sum(axis=0)
    variance = N * RATE * (1 - RATE)
    assert len(sizes) == STEPS
    assert abs(sizes.mean() - N * RATE) < 6 * (variance / STEPS) ** 0.5
    # Coins shared by the processes would multiply the variance by their number.
    assert abs(sizes.var() - variance) < 6 * variance * (2 / STEPS) ** 0.5
    assert chunks[world][0]["logged"] == sizes.tolist()
    assert [answer["logged"] for answer in chunks[world][1:]] == [[]] * (world - 1)


@pytest.mark.parametrize("world", [2, 3])
def test_coins_of_two_processes_are_independent(chunks, world):
    sizes = np.array([answer["sizes"] for answer in chunks[world]])
    correlations = np.corrcoef(sizes)[~np.eye(world, dtype=bool)]
    assert np.abs(correlations).max() < 6 / STEPS**0.5


def test_a_repeatable_run_repeats_on_the_same_number_of_processes(start):
    runs = [start("chunk", world, unsafe=5, steps=3) for world in (2, 2, 3)]
    bits = [run["answers"][0]["bits"] for run in runs]
    assert bits[0] == bits[1] != bits[2]
    assert runs[0]["answers"][0]["sizes"] == runs[1]["answers"][0]["sizes"]
    assert runs[0]["answers"][0]["sizes"] != runs[0]["answers"][1]["sizes"]


def test_streams_are_a_processs_own_and_unchanged_for_one_alone():
    lock = make_lock(seed=3)
    drawn = [
        own_noise(lock, "train-0001", ranks).gaussian((4,), 1.0).tolist()
        for ranks in (ALONE, Pretended(0, 2), Pretended(1, 2), Pretended(0, 3))
    ]
    assert len({tuple(values) for values in drawn}) == 4
    assert not own_noise(make_lock(), "train-0001", Pretended(0, 2)).is_unsafe


@pytest.mark.parametrize("world", WORLDS)
def test_the_sum_is_that_of_the_shards_to_the_bit(start, world):
    found = start("clipped", world)["answers"][0]
    assert found["same"]
    # Against one batch of all: each process rounds its sum to the grid by half a step.
    assert found["off"] <= (world + 1) / 2 + 1e-6
    assert found["moved"] > 2**20


def test_moments_are_those_of_one_process_to_the_bit(start):
    found = [start("moments", world)["answers"][0] for world in WORLDS]
    assert found[0] == found[1] == found[2]
    assert sum(found[0][0]) == 50


def test_more_processes_than_the_rounding_bound_covers_are_refused():
    require_small_rounding(Pretended(0, 8), 2**30, 2.0**-30)
    with pytest.raises(UsageError, match="9 processes are too many") as found:
        require_small_rounding(Pretended(0, 9), 2**30, 2.0**-30)
    assert "--nproc-per-node 8" in found.value.hint
