"""Votes and central images by two processes: every record of both counts once, charged once."""

import json

import methodkit
import numpy as np
import pytest
from rankkit import Starter

from dpsynth.artifacts.central import load_central
from dpsynth.artifacts.spending import read_state
from dpsynth.artifacts.votes import load_votes
from dpsynth.private.encoding import private_stream
from dpsynth.public.representation import load_representation

EPSILON = 20.0  # so little noise that half of the records cannot be taken for all
VOTES = """\
stages: {votes: {rounds: 2, population: 4, variations: 0}}
sampling: {method: population, count: 12, steps: 2, guidance: 1.0}
"""
CENTRAL = """\
stages:
  central: {images: 2, rate: 1.0e-1}
  train: {rate: 0.5, steps: 1}
sampling: {method: flow, count: 12, steps: 2}
"""


@pytest.fixture(scope="module")
def start():
    with Starter() as starter:
        yield starter


def command(start, world, *words):
    return start("command", world, words=[str(word) for word in words])


def codes_of(run):
    stream = private_stream(run, load_representation(run.run, run.plan))
    return np.concatenate([chunk.codes for chunk in stream])


def test_votes_of_two_processes_are_those_of_one(start, tmp_path):
    run = methodkit.prepared(tmp_path, VOTES, epsilon=EPSILON)
    done = command(start, 2, "evolve", run.run.root, "--json")
    assert done["codes"] == [0, 0], done["err"]
    assert json.loads(done["out"][0])["slots"] == ["votes-01", "votes-02"]
    assert done["out"][1] == done["err"][1] == ""
    records = len(codes_of(run))
    for number in (1, 2):
        votes = load_votes(run.run.released / f"votes-0{number}.safetensors")
        assert abs(votes.votes.sum() - records) < max(5 * 12**0.5 * votes.std, 1) < records / 4
    again = command(start, 2, "evolve", run.run.root, "--json")
    assert again["codes"] == [0, 0], again["err"]
    assert json.loads(again["out"][0])["slots"] == []
    assert read_state(run.run, run.lock).closed
    done = command(start, 2, "sample", run.run.root, "--json")
    assert done["codes"] == [0, 0], done["err"]


def test_each_process_throws_coins_for_its_own_records(start, tmp_path):
    run = methodkit.prepared(tmp_path, CENTRAL, epsilon=EPSILON)
    done = command(start, 2, "release-central", run.run.root, "--json")
    assert done["codes"] == [0, 0], done["err"]
    assert done["out"][1] == done["err"][1] == ""
    central = load_central(run.run.released / "central.safetensors")
    sums, codes = central.sums.sum(axis=1), codes_of(run) * central.radius / 2**16
    assert not np.array_equal(np.round(sums[0], 3), np.round(sums[1], 3)), "coins anew"
    assert (np.abs(sums) <= np.abs(codes).sum(axis=0) + 10 * central.std).all()
    again = command(start, 2, "release-central", run.run.root)
    assert again["codes"] == [3, 3]
    assert "only once" in again["err"][0]
    assert again["err"][1] == ""
