"""A cell release from check to close, killed between and inside its rounds, then resumed."""

import json
import shutil
import sys

import numpy as np
import pytest
from warmkit import python

from dpsynth.artifacts.cells import load_cells
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.moments import load_moments
from dpsynth.artifacts.spending import close_run, read_state
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.assess.check import ensure_checked
from dpsynth.errors import BudgetError, MissingError, ReplayError, UsageError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.private import encoding
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.moments import release_moments
from dpsynth.private.noise import NoiseSource
from dpsynth.public.pretrain import pretrain
from dpsynth.public.within import WITHIN, save_within
from dpsynth.released.gaussians import load_mixture
from dpsynth.released.handout import hand_out

PLAN = """\
version: 1
name: cells
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: npz, path: {private}}}
  capacity: 100
  image: {{height: 8, width: 8}}
  classes: [a, b, never]
  held_out: {{by: hash, fraction: 0.1}}
public:
  - {{kind: letters, count: 60}}
representation: {{kind: pca, code: 3}}
stages:
  moments: {{spares: {spares}, least_count: 1.0, cells: {{most: 2, lloyd: 2}}}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3}}
"""
FILES = {
    "moments": "moments.safetensors",
    "cells-lloyd-1": "cells-lloyd-1.safetensors",
    "cells-lloyd-2": "cells-lloyd-2.safetensors",
    "cells": "cells.safetensors",
}
RELEASE = """
import sys
from pathlib import Path
from dpsynth.planning.verify import load_verified
from dpsynth.private.moments import release_moments
release_moments(load_verified(Path(sys.argv[1])))
"""

_watched = {"path": None, "transcript": None, "seen": []}


def _watch(event, given):
    """At each opening of the private file, note what the transcript says by then."""
    if event != "open" or _watched["path"] is None or str(given[0]) != _watched["path"]:
        return
    lines = _watched["transcript"].read_text().splitlines()
    last = json.loads(lines[-1]) if lines else {}
    _watched["seen"].append((last.get("kind"), last.get("mechanism")))


sys.addaudithook(_watch)


def planned(folder, images, labels, spares=1):
    """A run folder, checked and pretrained, whose private records are these."""
    np.savez(folder / "private.npz", images=images, labels=labels)
    plan = folder / "plan.yaml"
    plan.write_text(PLAN.format(private=folder / "private.npz", spares=spares))
    verified = make_run(plan, folder / "run")
    pretrain(verified)
    ensure_checked(verified)
    return verified


def pictures(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 255, (n, 8, 8), dtype=np.uint8), rng.integers(0, 2, n)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    planned(folder, *pictures(50))
    return folder


@pytest.fixture
def run(prepared, tmp_path):
    """A fresh copy of the prepared run; its private file stays where it is."""
    shutil.copytree(prepared / "run", tmp_path / "run")
    yield load_verified(tmp_path / "run")
    _watched.update(path=None)


def killed(verified, point):
    """Release in a process of its own that dies at a named point."""
    environment = {"DPSYNTH_KILL_AT": point}
    return python(RELEASE, verified.run.root, environment=environment).returncode


def settled_files(verified):
    """Name of each settled release, and the hash that it settled with."""
    releases = {slot.id: slot.release for slot in verified.lock.slots}
    lines = read_transcript(verified.run.transcript).lines
    return {releases[line["slot"]]: line["sha256"] for line in lines if line["kind"] == "settle"}


def check_whole(verified, forfeited):
    """A finished release: closed, replayed, and every file the one that was settled."""
    state = read_state(verified.run, verified.lock)
    assert state.closed
    assert len(state.forfeited) == forfeited
    found = replay(verified.run.root)
    assert found.runs[0].closed
    assert found.epsilon <= verified.plan.budget.epsilon
    settled = settled_files(verified)
    assert list(settled) == list(FILES), "each round settles once, in order"
    for name, digest in settled.items():
        assert sha256_file(verified.run.released / FILES[name]) == digest
    kept = {path.name for path in verified.run.released.iterdir()}
    assert kept == set(FILES.values())
    with pytest.raises(BudgetError, match="only once"):
        release_moments(load_verified(verified.run.root))


@pytest.mark.parametrize(
    ("point", "done", "lost"),
    [
        ("settle:written", 1, 0),
        ("charge:written@2", 1, 1),
        ("mechanism:done@3", 2, 1),
        ("settle:before@4", 3, 1),
        ("close:before", 4, 0),
    ],
)
def test_killed_between_and_inside_rounds_and_resumed(run, point, done, lost):
    assert killed(run, point) == -9
    state = read_state(run.run, run.lock)
    assert (len(state.settled), len(state.forfeited)) == (done, lost)
    before = {path.name: path.read_bytes() for path in run.run.released.iterdir()}
    kept = [FILES[name] for name in list(FILES)[:done]]
    partial = replay(run.run.root, partial=True)
    assert partial.runs[0].charges == done + lost
    if done == len(FILES):
        with pytest.raises(BudgetError, match="only once"):  # which closes it
            release_moments(run)
    else:
        found = release_moments(run)
        spare = f"{list(FILES)[done]}-spare-1"
        assert len(found["slots"]) == len(FILES) - done
        assert found["slots"][0] == (spare if lost else list(FILES)[done])
        assert list(found["rounds"]) == list(FILES)
    for name in kept:
        assert (run.run.released / name).read_bytes() == before[name], "a settled round moved"
    check_whole(run, lost)


def test_the_records_are_read_once_and_after_a_charge(run, capsys):
    _watched.update(path=str(run.plan.private.source.path), transcript=run.run.transcript, seen=[])
    found = release_moments(run)
    assert set(_watched["seen"]) == {("charge", "moments")}
    _watched.update(path=None)
    assert found["slots"] == list(FILES)
    assert found["released"] == "moments.safetensors"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["releasing moments ...", "releasing moments: done"]
    check_whole(run, 0)


def test_a_round_rests_on_what_was_settled(run):
    assert killed(run, "settle:written@2") == -9
    path = run.run.released / FILES["cells-lloyd-1"]
    whole, charged = path.read_bytes(), read_state(run.run, run.lock).charged
    path.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(BudgetError, match="not what the transcript settled"):
        release_moments(run)
    path.unlink()
    with pytest.raises(MissingError):
        release_moments(run)
    assert read_state(run.run, run.lock).charged == charged
    path.write_bytes(whole)
    release_moments(run)
    check_whole(run, 0)


def test_the_spread_of_public_codes_is_there_before_any_charge(run):
    path, opened = run.run.public / WITHIN, run.run.transcript.exists()
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(MissingError, match=f"{WITHIN} is missing") as error:
        release_moments(run)
    assert "dpsynth pretrain" in error.value.hint
    save_within(path, np.eye(3), "another")
    with pytest.raises(UsageError, match="not the file that the calibration names"):
        release_moments(run)
    assert run.run.transcript.exists() == opened is False
    assert not any(run.run.released.iterdir())
    path.write_bytes(whole)
    release_moments(run)
    check_whole(run, 0)


def test_a_spread_lost_between_rounds_comes_back(run):
    assert killed(run, "settle:written@2") == -9
    path, charged = run.run.public / WITHIN, read_state(run.run, run.lock).charged
    path.unlink()
    with pytest.raises(MissingError, match=WITHIN):
        release_moments(run)
    assert read_state(run.run, run.lock).charged == charged
    pretrain(run)
    release_moments(run)
    check_whole(run, 0)


def test_a_transcript_rolled_back_releases_no_round_again(run):
    """Cut to its first round, it would pay for a second draw of what lies in released/."""
    assert killed(run, "settle:written@2") == -9
    whole = run.run.transcript.read_bytes()
    path = run.run.released / FILES["cells-lloyd-1"]
    before = path.read_bytes()
    run.run.transcript.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    with pytest.raises(BudgetError, match="earlier transcript"):
        release_moments(run)
    assert path.read_bytes() == before
    assert len(read_state(run.run, run.lock).charged) == 1
    run.run.transcript.write_bytes(whole)
    release_moments(run)
    check_whole(run, 0)


def test_a_file_that_never_settled_is_not_used_and_goes_with_the_close(run, capsys):
    assert killed(run, "settle:before@4") == -9
    path = run.run.released / FILES["cells"]
    data = path.read_bytes()
    for use in (lambda: load_mixture(run.run, run.plan), lambda: hand_out(run.run)):
        with pytest.raises(ReplayError, match="never settled"):
            use()
    assert "never settled" in "".join(replay(run.run.root, partial=True).runs[0].notes)
    assert close_run(run.run, run.lock).closed
    assert not path.exists()
    assert "removed released/cells.safetensors" in capsys.readouterr().err
    assert replay(run.run.root).ok
    hand_out(run.run)
    path.write_bytes(data)
    with pytest.raises(ReplayError, match="never settled"):
        replay(run.run.root)
    with pytest.raises(ReplayError, match="never settled"):
        hand_out(run.run)
    close_run(run.run, run.lock)  # closed before: what a crash kept it from removing goes now
    assert not path.exists()


@pytest.mark.parametrize("name", ["moments", "cells"])
def test_a_swapped_round_is_neither_used_nor_handed_out(run, name):
    release_moments(run)
    path = run.run.released / FILES[name]
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ReplayError, match="not what the transcript settled"):
        load_mixture(run.run, run.plan)
    with pytest.raises(BudgetError, match="not what the transcript settled"):
        hand_out(run.run)


def test_without_a_spare_a_lost_round_ends_the_release(tmp_path):
    verified = planned(tmp_path, *pictures(50), spares=0)
    assert killed(verified, "mechanism:done@2") == -9
    charged = read_state(verified.run, verified.lock).charged
    with pytest.raises(BudgetError, match="no slot of cells-lloyd-1 is left") as error:
        release_moments(verified)
    assert error.value.exit_code == 3
    assert read_state(verified.run, verified.lock).charged == charged


def test_each_round_has_noise_of_its_own(run, monkeypatch):
    streams = []
    ours = NoiseSource.for_run.__func__

    def watched(cls, lock, stream):
        streams.append(stream)
        return ours(cls, lock, stream)

    monkeypatch.setattr(NoiseSource, "for_run", classmethod(watched))
    release_moments(run)
    assert len(set(streams)) == len(streams) == len(FILES)


def without_records(monkeypatch):
    """As if every record were undeclared or not finite: `check` lets no file be empty."""
    nothing = UnitCodes(np.zeros((0, 3), np.int32), np.zeros(0, np.int64))
    monkeypatch.setattr(encoding, "encoded", lambda *_, **__: iter([nothing]))


def test_an_unsafe_seed_never_repeats_noise_across_rounds(tmp_path, monkeypatch):
    """A test's fixed seed gives the rounds, which are alike, streams of their own."""
    planned(tmp_path, *pictures(5))
    without_records(monkeypatch)
    verified = make_run(tmp_path / "plan.yaml", tmp_path / "run", unsafe_seed=1)
    release_moments(verified)
    first, second = (load_cells(verified.run.released / FILES[f"cells-lloyd-{n}"]) for n in (1, 2))
    assert not np.isclose(first.counts, second.counts).any()  # no record: noise alone


def test_without_any_record_the_release_is_noise_and_finite(run, monkeypatch):
    without_records(monkeypatch)
    release_moments(run)
    check_whole(run, 0)


@pytest.mark.parametrize(
    "records",
    [
        pictures(1),
        (np.full((40, 8, 8), 7, np.uint8), np.ones(40, np.int64)),
        pictures(160),
    ],
    ids=["one", "equal", "more-than-declared"],
)
def test_any_number_of_records_makes_a_finite_release(tmp_path, records):
    verified = planned(tmp_path, *records)
    found = release_moments(verified)
    assert set(found["rounds"]) == set(FILES)
    moments = load_moments(verified.run.released / "moments.safetensors")
    for name in list(FILES)[1:]:
        cells = load_cells(verified.run.released / FILES[name])
        assert cells.clip == moments.radius
        assert 0 < cells.radius <= 2 * cells.clip
        assert (np.linalg.norm(cells.centres, axis=-1) <= cells.clip * (1 + 1e-12)).all()
    assert cells.seconds is not None
    check_whole(verified, 0)
