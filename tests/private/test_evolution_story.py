"""A votes stage from check to close: charged before the records, resumed, and nothing un-noised."""

import json

import methodkit
import numpy as np
import pytest
import torch

from dpsynth.artifacts import spending
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.samples import read_summary
from dpsynth.artifacts.spending import close_run, read_state
from dpsynth.artifacts.votes import load_population, load_votes, save_population
from dpsynth.errors import BudgetError, DpsynthError, MissingError, ReplayError, UsageError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified
from dpsynth.private import evolving, voting
from dpsynth.private.voting import evolve
from dpsynth.released.evolution import PARENTS
from dpsynth.released.handout import hand_out
from dpsynth.released.members import load_members
from dpsynth.released.sampling import sample

STAGES = """\
stages: {votes: {rounds: 2, population: 4, variations: 0, spares: 1}}
sampling: {method: population, count: 30, steps: 2, guidance: 1.0}
"""
EVOLVE = "from dpsynth.private.voting import evolve\nevolve(verified)"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("votes")
    methodkit.prepared(folder, STAGES)
    return folder


@pytest.fixture
def run(prepared, tmp_path):
    return methodkit.copied(prepared, tmp_path / "run")


@pytest.fixture
def exact(monkeypatch):
    """The exact histograms of each round, as the mechanism had them in memory."""
    seen, inner = [], evolving.release_votes

    def release_votes(chunks, ballot, slot, noise, ranks):
        chunks = list(chunks)
        from dpsynth.private.votes import shard_votes

        seen.append(shard_votes(chunks, ballot))
        return inner(chunks, ballot, slot, noise, ranks)

    monkeypatch.setattr(evolving, "release_votes", release_votes)
    return seen


def votes_of(run, number):
    return load_votes(run.run.released / f"votes-0{number}.safetensors")


def population(run, number):
    return run.run.released / f"population-0{number}.safetensors"


def check_whole(run, forfeited):
    """Closed, replayed, each round settled once with its file, populations of declared sizes."""
    assert read_state(run.run, run.lock).closed
    assert methodkit.counts(run) == (2, forfeited)
    hand_out(run.run)
    report = replay(run.run.released)
    assert report.runs[0].closed
    assert report.epsilon <= 3.0
    for number in (0, 1, 2):
        found = load_population(population(run, number))
        assert (np.bincount(found.labels) == [4, 4, 4]).all()
        if number:
            parents = sha256_file(population(run, number - 1))
            assert found.facts[PARENTS] == votes_of(run, number).population == parents


def test_records_are_read_after_the_first_charge_and_once(run, capsys):
    found, seen = methodkit.watched(run, evolve)
    assert set(seen) == {("charge", "votes-01")}
    assert found["slots"] == ["votes-01", "votes-02"]
    assert capsys.readouterr().err.splitlines() == ["vote rounds ...", "vote rounds: done"]
    check_whole(run, 0)


@pytest.mark.parametrize(
    ("point", "settled", "lost"),
    [
        ("charge:before", 0, 0),
        ("charge:written", 0, 1),
        ("mechanism:done@2", 1, 1),
        ("settle:before", 0, 1),
        ("settle:written", 1, 0),
        ("settle:written@2", 2, 0),
        ("close:before", 2, 0),
    ],
)
def test_a_crash_at_any_point_is_gone_on_from(run, monkeypatch, point, settled, lost):
    with monkeypatch.context() as patched:
        methodkit.crashing(patched, point, spending, evolving)
        with pytest.raises(methodkit.Crash):
            evolve(run)
    assert methodkit.counts(run) == (settled, lost)
    first = population(run, 0).read_bytes()
    kept = [(run.run.released / f"votes-0{n + 1}.safetensors").read_bytes() for n in range(settled)]
    again = load_verified(run.run.root)  # as a command would: nothing refuses what lies there
    found = evolve(again)
    spare = [f"votes-0{settled + 1}-spare-1"] * lost
    assert found["slots"] == (spare + [f"votes-0{n}" for n in (1, 2)][settled + lost :])
    assert population(run, 0).read_bytes() == first, "voted on, or about to be"
    for number, data in enumerate(kept, start=1):
        assert (run.run.released / f"votes-0{number}.safetensors").read_bytes() == data
    check_whole(run, lost)


def test_a_process_killed_between_charge_and_settle_goes_on(run):
    assert methodkit.killed(run, "charge:written@2", EVOLVE) == -9
    assert methodkit.counts(run) == (1, 1)
    assert replay(run.run.root, partial=True).runs[0].charges == 2
    assert evolve(load_verified(run.run.root))["slots"] == ["votes-02-spare-1"]
    check_whole(run, 1)
    assert evolve(run)["slots"] == [], "nothing more is charged"
    check_whole(run, 1)


def test_exact_votes_are_in_no_file_and_in_no_word(run, exact, capsys):
    told = json.dumps(evolve(run))
    sample(run)
    assert len(exact) == 2
    assert all(votes.sum() > 30 for votes in exact)
    shown = capsys.readouterr()
    for votes in exact:
        assert not methodkit.holds(run.run.root, votes)
        by_class = votes.reshape(3, 4).sum(axis=1)
        assert not methodkit.holds(run.run.root, by_class)
        for words in (told, shown.out, shown.err):
            assert str(votes.tolist()) not in words
            assert str(int(votes.sum())) not in words.split()
    leak = run.run.curator / "leak"
    leak.write_bytes(b"12345" + exact[0].astype(np.float32).tobytes())
    assert methodkit.holds(run.run.root, exact[0]) == [leak], "a leak would have been seen"


def test_noise_is_fresh_for_each_round_and_run(prepared, tmp_path, monkeypatch, exact):
    monkeypatch.setattr(voting, "fresh_generator", lambda: torch.Generator().manual_seed(1))
    noises = []
    for name in ("one", "two"):
        run = methodkit.copied(prepared, tmp_path / name)
        evolve(run)
        noises += [
            (votes_of(run, n).votes - votes) / votes_of(run, n).std
            for n, votes in zip((1, 2), exact[-2:], strict=True)
        ]
    assert (exact[0] == exact[2]).all(), "the same population and records"
    numbers = np.concatenate(noises)
    assert len(np.unique(numbers)) == len(numbers)
    assert 0.6 < numbers.std() < 1.5
    assert abs(numbers.mean()) < 0.75


def test_a_class_without_records_has_members_and_noise_alone(run, exact):
    evolve(run)
    for number, votes in zip((1, 2), exact, strict=True):
        assert not votes[8:].any()
        assert votes_of(run, number).votes[8:].all()
    assert (load_population(population(run, 2)).labels[8:] == 2).all()


def test_what_was_settled_is_what_later_rounds_rest_on(run, monkeypatch):
    with monkeypatch.context() as patched:
        methodkit.crashing(patched, "settle:written", spending)
        with pytest.raises(methodkit.Crash):
            evolve(run)
    first = load_population(population(run, 0))
    whole = population(run, 0).read_bytes()
    save_population(population(run, 0), type(first)(-first.members, first.labels, 0, first.facts))
    with pytest.raises(ReplayError, match="not the population"):
        evolve(run)
    assert methodkit.counts(run) == (1, 0), "nothing was charged for it"
    population(run, 0).write_bytes(whole)
    path = run.run.released / "votes-01.safetensors"
    votes = path.read_bytes()
    path.write_bytes(votes[:-1] + b"\x01")
    with pytest.raises(BudgetError, match="not what the transcript settled"):
        evolve(run)
    path.write_bytes(votes)
    # A population that no settled votes made, laid into the folder: it is made anew.
    laid = {**first.facts, PARENTS: sha256_file(population(run, 0))}
    evolved = type(first)(first.members, first.labels, 1, laid)
    save_population(population(run, 1), evolved)
    save_population(
        population(run, 2),
        type(first)(
            first.members, first.labels, 2, {**laid, PARENTS: sha256_file(population(run, 1))}
        ),
    )
    before = population(run, 2).read_bytes()
    evolve(run)
    assert population(run, 2).read_bytes() != before
    check_whole(run, 0)


def test_a_run_without_a_transcript_that_holds_votes_is_refused(run):
    evolve(run)
    run.run.transcript.unlink()
    with pytest.raises(BudgetError, match="earlier transcript"):
        evolve(run)
    for path in run.run.released.iterdir():
        if path.name != population(run, 0).name:
            path.unlink()
    assert load_verified(run.run.root), "a public population alone says nothing"


def test_samples_are_the_members_and_then_variations(run):
    with pytest.raises(MissingError, match="0 of 2 vote rounds"):
        sample(run)
    evolve(run)
    members, _ = load_members(run.run, run.plan)
    assert sorted(members.order.reshape(-1).tolist()) == list(range(12))
    labels, source = torch.arange(30) % 3, torch.Generator().manual_seed(0)
    codes = members.codes(labels, 0, source).numpy()
    own = members.population.members[members.order]
    for number in range(30):
        y, turn = number % 3, number // 3
        assert (codes[number] == own[y, turn % 4]).all() == (turn < 4)
    # Where a sampler goes on, or another process draws, makes no difference to who is drawn.
    part = members.codes(labels[9:12], 9, source).numpy()
    assert (part == codes[9:12]).all()
    found, seen = methodkit.watched(run, sample)
    assert seen == [], "post-processing opens no private file"
    assert (found["count"], found["model"]) == (30, "population")
    assert read_summary(run.run.released / "samples")["origin"]["rounds"] == 2


def test_a_run_that_was_closed_early_gives_its_last_population(run, monkeypatch):
    with monkeypatch.context() as patched:
        methodkit.crashing(patched, "charge:before@2", spending)
        with pytest.raises(methodkit.Crash):
            evolve(run)
    with pytest.raises(MissingError, match="1 of 2 vote rounds"):
        sample(run)
    close_run(run.run, run.lock)
    sample(run)
    assert read_summary(run.run.released / "samples")["origin"]["rounds"] == 1
    with pytest.raises(BudgetError, match="closed"):
        evolve(run)
    assert methodkit.counts(run) == (1, 0)
    assert replay(run.run.released).ok


def test_a_public_file_that_is_another_one_is_refused_uncharged(run):
    prior = run.run.public / "prior.safetensors"
    whole = prior.read_bytes()
    prior.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UsageError, match="not the file that"):
        evolve(run)
    assert methodkit.counts(run) == (0, 0)


def test_units_of_several_images_vote_by_shares(tmp_path, exact):
    run = methodkit.prepared(tmp_path, STAGES, unit=5)
    evolve(run)
    units = 10  # of five images; all of them vote within an L2 norm of 1
    for votes in exact:
        assert 0 < np.sqrt((votes / 2**16) @ (votes / 2**16)) <= units
        assert votes.sum() > units, "in steps of 2^-16"
    check_whole(run, 0)


def test_unchecked_records_do_not_vote(run):
    (run.run.curator / "check.json").unlink()
    with pytest.raises(DpsynthError, match="check"):
        evolve(run)
    assert methodkit.counts(run) == (0, 0)
