"""One run carried on by two, one and three processes: the charges are those of one process."""

import csv
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from rankkit import Starter

from dpsynth.artifacts.spending import read_state
from dpsynth.assess.check import ensure_checked
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.public.pretrain import pretrain

PLAN = """\
version: 1
name: shared
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: npz, path: {private}}}
  capacity: 100
  image: {{height: 8, width: 8}}
  classes: [a, b]
  held_out: {{by: hash, fraction: 0.1}}
public:
  - {{kind: letters, count: 60}}
representation: {{kind: pca, code: 4}}
stages:
  moments: {{spares: 1, cells: {{most: 2, lloyd: 1}}}}
  train: {{rate: 0.05, steps: 12, chunk: 2, multiplicity: 2}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3}}
distillation: {{steps: 3, horizon: 0.5}}
sampling: {{count: 1100, steps: 2}}
"""


@pytest.fixture(scope="module")
def start():
    with Starter() as starter:
        yield starter


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (50, 8, 8), dtype=np.uint8), rng.integers(0, 2, 50)
    np.savez(folder / "private.npz", images=images, labels=labels)
    plan = folder / "plan.yaml"
    plan.write_text(PLAN.format(private=folder / "private.npz"))
    made = make_run(plan, folder / "run")
    pretrain(made)
    return made


@pytest.fixture
def fresh(verified, tmp_path):
    """A run that has spent nothing, with a public room and checked records."""
    made = make_run(verified.run.root.parent / "plan.yaml", tmp_path / "run")
    pretrain(made)
    ensure_checked(made)
    return made


def command(start, world, *words, **more):
    return start("command", world, words=[str(word) for word in words], **more)


def test_a_run_goes_from_two_processes_to_one_to_three(start, verified):
    run, lock = verified.run, verified.lock
    moments = [slot.id for slot in lock.stage_slots("moments") if not slot.spare]
    chunks = [slot.id for slot in lock.stage_slots("train")]

    done = command(start, 2, "release-moments", run.root, "--json")
    assert done["codes"] == [0, 0], done["err"]
    assert json.loads(done["out"][0])["released"] == "moments.safetensors"
    assert done["out"][1] == done["err"][1] == ""
    assert read_state(run, lock).settled == set(moments)

    again = command(start, 2, "release-moments", run.root)
    assert again["codes"] == [3, 3]
    assert "only once" in again["err"][0]
    assert again["err"][1] == ""

    # Two processes: one chunk settles, in the second the other process dies.
    done = command(start, 2, "train", run.root, dies_in_chunk={"1": 2})
    assert done["codes"] == [8, -9]
    assert "torchrun command again" in done["err"][0]
    assert "Traceback" not in done["err"][0]
    state = read_state(run, lock)
    assert state.settled == {*moments, chunks[0]}
    assert state.forfeited == {chunks[1]}

    # One process: one more chunk settles, the next is cut off after its charge.
    done = command(start, 1, "train", run.root, kill_at={"0": "charge:written@2"})
    assert done["codes"] == [-9]
    state = read_state(run, lock)
    assert state.settled == {*moments, chunks[0], chunks[2]}
    assert state.forfeited == {chunks[1], chunks[3]}

    # Three processes end it.
    done = command(start, 3, "train", run.root, "--json")
    assert done["codes"] == [0, 0, 0], done["err"]
    assert json.loads(done["out"][0])["train"]["steps"] == 8
    assert done["out"][1:] == done["err"][1:] == ["", ""]
    state = read_state(run, lock)
    assert state.closed
    assert state.settled == {*moments, chunks[0], chunks[2], chunks[4], chunks[5]}
    assert state.forfeited == {chunks[1], chunks[3]}

    lines = [json.loads(line) for line in run.transcript.read_text().splitlines()]
    charges = [line for line in lines if line["kind"] == "charge"]
    assert [line["slot"] for line in charges] == [*moments, *chunks]
    planned = {slot.id: (slot.noise_std, slot.rate, slot.steps) for slot in lock.slots}
    for line in charges:
        assert (line["noise_std"], line.get("rate"), line.get("steps")) == planned[line["slot"]]
    assert "rank" not in run.transcript.read_text()
    assert "world" not in run.transcript.read_text()

    log = (run.curator / "training.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3, 4, 5, 6, 7, 8]

    sampled = command(start, 3, "sample", run.root, "--json")
    assert sampled["codes"] == [0, 0, 0], sampled["err"]
    with (run.released / "samples" / "metadata.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["a", "b"] * 550
    assert len(list((run.released / "samples" / "images").iterdir())) == 1100
    assert "already there" in command(start, 2, "sample", run.root)["err"][0]
    assert replay(run.released).ok


def charged(run):
    lines = map(json.loads, (run / "transcript.jsonl").read_text().splitlines())
    return [line["slot"] for line in lines if line["kind"] == "charge"]


def test_two_copies_of_a_run_folder_are_not_spent_one_after_the_other(start, fresh):
    """As on two machines that share no disk: whichever holds the main process, it charges."""
    first, second = fresh.run.root, fresh.run.root.with_name("copy")
    shutil.copytree(first, second)
    here, there = (["release-moments", str(root)] for root in (first, second))
    done = command(start, 2, words_of={"0": here, "1": there})
    assert done["codes"] == [0, 0], done["err"]
    again = command(start, 2, words_of={"0": there, "1": here})
    assert again["codes"] == [8, 8]
    assert "the run's transcript" in "".join(again["err"])
    assert charged(first)
    assert not (second / "transcript.jsonl").exists()


def test_another_public_calibration_ends_all_before_a_charge(start, fresh):
    other = fresh.run.root.with_name("other")
    shutil.copytree(fresh.run.root, other)
    calibration = other / "public/calibration.json"
    calibration.write_text(calibration.read_text() + " ")
    here, there = (["release-moments", str(root)] for root in (fresh.run.root, other))
    done = command(start, 2, words_of={"0": here, "1": there})
    assert done["codes"] == [8, 8]
    assert "the public calibration" in "".join(done["err"])
    assert not fresh.run.transcript.exists()


def test_other_commands_refuse_several_processes(start, verified):
    done = command(start, 2, "status", verified.run.root)
    assert done["codes"] == [2, 2]
    assert "status works in one process" in done["err"][0]
    assert done["err"][1] == ""


def test_pretraining_is_the_main_processs_work(start, verified):
    before = verified.run.calibration.read_bytes()
    done = command(start, 2, "pretrain", verified.run.root)
    assert done["codes"] == [0, 0], done["err"]
    assert done["err"][1] == done["out"][1] == ""
    assert load_verified(verified.run.root).run.calibration.read_bytes() == before


def test_torchrun_starts_it(tmp_path, verified):
    """The real launcher, on what costs nothing: the prior is sampled."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--standalone", "-m", "dpsynth", "sample", str(verified.run.root)]
    done = subprocess.run(
        [*words, "--model", "prior", "-n", "700", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["count"] == 700
    assert len(list((verified.run.released / "samples-prior" / "images").iterdir())) == 700
