"""Private Evolution's populations: sizes, schedules, files, and a run that goes on."""

import math

import numpy as np
import pytest
import torch

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.votes import (
    Population,
    ReleasedVotes,
    load_population,
    load_votes,
    population_name,
    save_population,
    save_votes,
    votes_name,
)
from dpsynth.errors import MissingError, ReplayError, UsageError
from dpsynth.models.seeding import generator
from dpsynth.planning.evolution import Evolution
from dpsynth.public.geometry import PixelCodec
from dpsynth.public.representation import Representation
from dpsynth.released.evolution import Evolver, evolve, survivors
from dpsynth.released.varying import FlowGenerator

HASH, SIDE = "b" * 64, 2
CLASSES, SIZE = 2, 40


class Dots:
    """A generator whose members are images of one grey; a variation moves it a little."""

    def draw(self, labels, source):
        grey = torch.randint(0, 256, (len(labels),), generator=source).numpy()
        return np.repeat(grey.astype(np.uint8), SIDE * SIDE).reshape(-1, SIDE, SIDE, 1)

    def vary(self, members, labels, strength, source):
        moved = torch.randn(len(members), generator=source).numpy() * 60 * strength
        found = members.astype(float) + moved[:, None, None, None]
        return np.clip(np.rint(found), 0, 255).astype(np.uint8)

    def images(self, members):
        return members


def space():
    dim = SIDE * SIDE
    return Representation(PixelCodec((SIDE, SIDE, 1)), (SIDE, SIDE, 1), np.zeros(dim), 255.0, 9.0)


def evolver(**keys):
    settings = Evolution(**({"rounds": 6, "population": SIZE, "threshold": 0.0} | keys))
    return Evolver(settings, Dots(), space(), CLASSES, {"generator": "dots"})


class Towards:
    """Votes of 500 records of class y at `targets[y]`, without noise but for its declared size."""

    def __init__(self, folder, targets=(0.2, 0.9), die_at=None):
        self.folder, self.targets, self.die_at, self.asked = folder, targets, die_at, []

    def settled(self, number):
        path = self.folder / votes_name(number)
        return load_votes(path) if path.exists() else None

    def release(self, number, digest, features, labels):
        if number == self.die_at:
            raise KeyboardInterrupt
        self.asked.append(number)
        votes = np.zeros(len(labels))
        for y, target in enumerate(self.targets):
            mine = np.flatnonzero(labels == y)
            near = mine[np.abs(features[mine].mean(axis=1) - target).argsort()[:5]]
            votes[near] = 100.0
        save_votes(self.folder / votes_name(number), ReleasedVotes(votes, 1.0, digest))
        return load_votes(self.folder / votes_name(number))


def mean_grey(population, y):
    return population.members[population.labels == y].mean() / 255


def test_populations_follow_the_votes_and_keep_their_declared_sizes(tmp_path):
    done = []
    ballots = Towards(tmp_path)
    last = evolve(evolver(), tmp_path, ballots, generator(0), lambda: done.append(1))
    assert (last.number, len(done), ballots.asked) == (6, 6, [1, 2, 3, 4, 5, 6])
    for number in range(7):
        population = load_population(tmp_path / population_name(number))
        assert np.bincount(population.labels).tolist() == [SIZE, SIZE]
    first = load_population(tmp_path / population_name(0))
    for y, target in enumerate(ballots.targets):
        assert abs(mean_grey(last, y) - target) < 0.08 < abs(mean_grey(first, y) - target) + 0.08
    strengths = [
        float(load_population(tmp_path / population_name(n)).facts["strength"]) for n in range(1, 7)
    ]
    assert strengths == pytest.approx(np.linspace(0.55, 0.15, 6).tolist())


@pytest.mark.parametrize("die_at", [1, 3, 6])
def test_a_run_goes_on_where_it_died_and_asks_no_round_twice(tmp_path, die_at):
    with pytest.raises(KeyboardInterrupt):
        evolve(evolver(), tmp_path, Towards(tmp_path, die_at=die_at), generator(0))
    kept = sha256_file(tmp_path / population_name(die_at - 1))
    ballots = Towards(tmp_path)
    last = evolve(evolver(), tmp_path, ballots, generator(1))
    assert ballots.asked == list(range(die_at, 7))
    assert last.number == 6
    assert sha256_file(tmp_path / population_name(die_at - 1)) == kept
    again = Towards(tmp_path)
    assert (evolve(evolver(), tmp_path, again, generator(2)).members == last.members).all()
    assert again.asked == []


def test_a_population_that_was_not_voted_on_is_refused(tmp_path):
    evolve(evolver(rounds=2), tmp_path, Towards(tmp_path), generator(0))
    (tmp_path / population_name(1)).unlink()
    with pytest.raises(ReplayError, match="not the population"):
        evolve(evolver(rounds=2), tmp_path, Towards(tmp_path), generator(5))


def test_a_population_of_another_plan_is_refused(tmp_path):
    evolve(evolver(rounds=1), tmp_path, Towards(tmp_path), generator(0))
    with pytest.raises(UsageError, match="another generator"):
        evolve(evolver(rounds=1, population=9), tmp_path, Towards(tmp_path), generator(0))


def test_survivors_are_drawn_by_votes_above_the_threshold_within_their_class():
    labels = np.repeat([0, 1, 2], 1000)
    votes = np.zeros(3000)
    votes[:4] = (10.0, 30.0, 5.0, -50.0)
    votes[1000:2000] = 4.9  # none above the threshold: the class stays as it is
    votes[2000:3000] = 50.0
    kept = survivors(ReleasedVotes(votes, 2.5, HASH), labels, 2.0, generator(0))
    assert (labels[kept] == labels).all()
    assert (kept[1000:2000] == np.arange(1000, 2000)).all()
    drawn = np.bincount(kept[:1000], minlength=4)
    assert drawn[2:].sum() == 0
    assert drawn[1] / 1000 == pytest.approx(25 / 30, abs=0.06)  # votes are 5 and 25 above it
    assert 550 < len(set(kept[2000:].tolist())) < 720  # with replacement: 1 - 1/e of them
    with pytest.raises(UsageError, match="members"):
        survivors(ReleasedVotes(votes[:5], 1.0, HASH), labels, 2.0, generator(0))


def test_features_are_means_over_variations():
    """Of many variations the mean is the member's own feature: its noise averages out."""
    own = evolver(variations=0)
    population = own.first(generator(0))
    exact = own.features(population, generator(1))
    assert exact == pytest.approx(population.members.reshape(len(exact), -1) / 255)
    far = [
        np.abs(evolver(variations=k).features(population, generator(1)) - exact).mean()
        for k in (1, 16)
    ]
    assert far[1] < far[0] / 2


def test_an_own_flow_is_a_generator():
    """The straight flow to one point: v = (z - x) / (1 - t) ends in z from anywhere."""
    target = torch.tensor([0.1, -0.2, 0.3, 0.4])

    def velocity(x, t, y):
        return (target + y[:, None] - x) / (1 - t)[:, None]

    flow = FlowGenerator(velocity, space(), null=CLASSES, steps=5)
    labels = np.array([0, 1, 1])
    drawn = flow.draw(labels, generator(0))
    assert drawn.dtype == np.float32
    assert drawn == pytest.approx((target + torch.tensor([[0.0], [1.0], [1.0]])).numpy(), abs=1e-5)
    varied = flow.vary(drawn, labels, 0.3, generator(1))
    assert varied == pytest.approx(drawn, abs=1e-5)
    still = FlowGenerator(lambda x, t, y: torch.zeros_like(x), space(), null=CLASSES)
    mild, strong = (
        np.abs(still.vary(drawn, labels, s, generator(1)) - drawn).mean() for s in (0.1, 1)
    )
    assert mild < strong / 3  # without a flow a variation is (1 - t) noise + t z
    assert flow.images(drawn).shape == (3, SIDE, SIDE, 1)
    assert flow.draw(np.zeros(0, np.int64), generator(0)).shape == (0, 4)
    for strength in (0.0, 1.1, math.nan):
        with pytest.raises(UsageError, match="strength"):
            flow.vary(drawn, labels, strength, generator(0))


def test_files_are_read_back_and_damage_is_named(tmp_path):
    votes = ReleasedVotes(np.array([1.5, -2.0]), 0.25, HASH)
    save_votes(tmp_path / votes_name(1), votes)
    read = load_votes(tmp_path / votes_name(1))
    assert (read.votes.tolist(), read.std, read.population) == ([1.5, -2.0], 0.25, HASH)
    with pytest.raises(MissingError):
        load_votes(tmp_path / votes_name(2))
    for wrong in (
        ReleasedVotes(np.array([math.nan]), 1.0, HASH),
        ReleasedVotes(np.zeros(0), 1.0, HASH),
        ReleasedVotes(np.zeros(3), 0.0, HASH),
        ReleasedVotes(np.zeros(3), 1.0, "no hash"),
    ):
        with pytest.raises(UsageError):
            save_votes(tmp_path / "x.safetensors", wrong)
    sound = Population(np.zeros((2, 3), np.float32), np.array([0, 1]), 1, {"generator": "g"})
    save_population(tmp_path / "p.safetensors", sound)
    assert load_population(tmp_path / "p.safetensors").facts == {"generator": "g"}
    with pytest.raises(UsageError, match="format"):
        load_votes(tmp_path / "p.safetensors")
    for members, labels, number in (
        (np.zeros((2, 3)), [0, 1], 0),
        (np.full((2, 3), np.nan, np.float32), [0, 1], 0),
        (np.zeros((2, 3), np.float32), [0], 0),
        (np.zeros((2, 3), np.float32), [0, -1], 0),
        (np.zeros((0, 3), np.float32), [], 0),
        (np.zeros((2, 3), np.float32), [0, 1], -1),
    ):
        with pytest.raises(UsageError):
            Population(members, np.array(labels, np.int64), number).check()
