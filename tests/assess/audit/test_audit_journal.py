"""The audit's own lock and transcript: chained, resumed, held by one process, never the run's."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from auditkit import FLOW, SHARED, TRAIN, shared_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spendkit import make_slots

from dpsynth.artifacts.transcript import parse_transcript
from dpsynth.assess.audit.journal import TRANSCRIPT, journal, read_transcript
from dpsynth.assess.audit.store import load_world, save_world
from dpsynth.assess.audit.worlds import Canaries, Observed, Statistic, WhiteBox
from dpsynth.errors import BudgetError, MissingError, ReplayError, UsageError
from dpsynth.models.velocity import build_for

FACTS = {"plan_hash": "ab", "asked": {"canaries": 50}}


def _audit(folder, *worlds, close=False):
    """An audit with these worlds finished."""
    with journal(folder, FACTS) as held:
        for world in worlds:
            attempt = held.attempt(world)
            for slot in make_slots():
                held.charge(world, attempt, slot, "os-entropy")
            held.path(world).write_bytes(world.encode())
            held.settle(world, attempt)
        if close:
            (folder / "audit.json").write_text("{}")
            held.close(folder / "audit.json")


def test_charges_say_what_the_run_s_charges_say(tmp_path):
    _audit(tmp_path / "audit", "plan")
    lines = read_transcript(tmp_path / "audit")
    assert [line["kind"] for line in lines] == ["open", *["charge"] * 4, "settle"]
    assert lines[0]["format"] == "dpsynth-audit-transcript-1"
    for slot, line in zip(make_slots(), lines[1:5], strict=True):
        assert {key: line[key] for key in slot.spec()} == json.loads(json.dumps(slot.spec()))
        assert (line["world"], line["attempt"], line["slot"]) == ("plan", 1, slot.id)
    assert all(a["hash"] == b["prev"] for a, b in pairwise(lines))


def test_no_run_takes_it_for_its_own_transcript(tmp_path):
    _audit(tmp_path / "audit", "plan")
    with pytest.raises(ReplayError):
        parse_transcript((tmp_path / "audit" / TRANSCRIPT).read_bytes())


def test_an_audit_goes_on_with_finished_worlds(tmp_path):
    _audit(tmp_path / "audit", "one", "two")
    with journal(tmp_path / "audit", FACTS) as held:
        assert held.finished("one") and held.finished("two") and not held.finished("three")
        held.path("two").write_bytes(b"another")
        assert not held.finished("two")
        assert held.attempt("two") == 2 and held.attempt("three") == 1


@pytest.mark.parametrize("facts", [{**FACTS, "plan_hash": "cd"}, {**FACTS, "more": None}])
def test_other_facts_start_anew_and_delete_old_worlds(tmp_path, facts):
    _audit(tmp_path / "audit", "one")
    with journal(tmp_path / "audit", facts) as held:
        assert not held.finished("one") and not list(held.worlds.iterdir())
    assert len(read_transcript(tmp_path / "audit")) == 1


def test_a_closed_audit_has_no_world_and_starts_anew(tmp_path):
    _audit(tmp_path / "audit", "one", close=True)
    assert read_transcript(tmp_path / "audit")[-1]["kind"] == "close"
    assert not list((tmp_path / "audit" / "worlds").iterdir())
    with journal(tmp_path / "audit", FACTS) as held:
        assert not held.finished("one")
    assert [line["kind"] for line in read_transcript(tmp_path / "audit")] == ["open"]


def test_all_of_it_is_for_its_owner_alone(tmp_path):
    _audit(tmp_path / "audit", "one")
    modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.rglob("*")}
    assert modes.pop("audit") == modes.pop("worlds") == 0o700
    del modes["one.safetensors"]  # written by this test
    assert set(modes.values()) == {0o600}


def test_a_torn_line_is_left_out_and_overwritten(tmp_path):
    _audit(tmp_path / "audit", "one")
    path = tmp_path / "audit" / TRANSCRIPT
    with path.open("ab") as file:
        file.write(b'{"line":99,"kind":"cha')
    _audit(tmp_path / "audit", "two")
    worlds = [line["world"] for line in read_transcript(tmp_path / "audit")[1:]]
    assert worlds == ["one"] * 5 + ["two"] * 5


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_changed_byte_is_seen(tmp_path, place, flip):
    if not (tmp_path / "audit").exists():
        _audit(tmp_path / "audit", "one")
    data = bytearray((tmp_path / "audit" / TRANSCRIPT).read_bytes())
    copy = tmp_path / "copy"
    copy.mkdir(exist_ok=True)
    whole = len(read_transcript(tmp_path / "audit"))
    data[int(place * len(data))] ^= flip
    (copy / TRANSCRIPT).write_bytes(data)
    try:
        assert len(read_transcript(copy)) < whole  # a line lost its end: torn
    except ReplayError as error:
        assert "does not hold at line" in error.message


def test_another_process_is_kept_out(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from dpsynth.assess.audit.journal import journal\n"
        "with journal(Path(sys.argv[1]), {}):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "audit")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(BudgetError, match="another process") as refused,
            journal(tmp_path / "audit", {}),
        ):
            pass
        assert "the same command again" in refused.value.hint  # with the options that were typed
        other.stdin.close()
    with journal(tmp_path / "audit", {}):
        pass


def test_no_audit_no_transcript(tmp_path):
    with pytest.raises(UsageError, match="no audit"):
        read_transcript(tmp_path)


def _world(plan):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 8, 8, 1), dtype=np.uint8)
    labels = np.arange(50) % 10
    canaries = Canaries(images, labels, rng.normal(size=(50, 8)), rng.random(50) < 0.5)
    statistic = Statistic(
        "cells-lloyd-1", "sums", rng.normal(size=80), rng.normal(size=80), 0.1 + 0.2,
        rng.integers(0, 80, (50, 8)), rng.normal(size=(50, 8)),
    )  # fmt: skip
    seen = WhiteBox(rng.normal(size=(4, 50)), np.full(4, 0.7), 1 / 3, 0.1)
    return canaries, Observed((statistic,), seen, build_for(plan), 0.25, (images, labels))


def test_a_world_comes_back_to_the_bit(tmp_path):
    plan = shared_run(SHARED + "\n" + TRAIN, FLOW).plan
    canaries, observed = _world(plan)
    save_world(tmp_path / "w.safetensors", canaries, observed)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o600
    planted, found = load_world(tmp_path / "w.safetensors", plan)
    for name in ("images", "labels", "codes", "included"):
        assert np.array_equal(getattr(canaries, name), getattr(planted, name))
    assert planted.included.dtype == np.bool_
    for name in ("release", "part", "std"):
        assert getattr(found.moments[0], name) == getattr(observed.moments[0], name)
    for name in ("noisy", "known", "places", "values"):
        assert np.array_equal(getattr(found.moments[0], name), getattr(observed.moments[0], name))
    assert np.array_equal(found.gradients.sums, observed.gradients.sums)
    assert (found.gradients.std, found.gradients.rate, found.low) == (1 / 3, 0.1, 0.25)
    assert np.array_equal(found.samples[0], observed.samples[0])
    pairs = zip(found.model.parameters(), observed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_world_may_show_next_to_nothing(tmp_path):
    canaries, _ = _world(plan := shared_run(SHARED + "\n" + TRAIN, FLOW).plan)
    save_world(tmp_path / "w.safetensors", canaries, Observed())
    _, found = load_world(tmp_path / "w.safetensors", plan)
    assert found == Observed()


def test_damaged_worlds_are_refused(tmp_path):
    plan = shared_run(SHARED + "\n" + TRAIN, FLOW).plan
    path = tmp_path / "w.safetensors"
    with pytest.raises(MissingError):
        load_world(path, plan)
    save_world(path, *_world(plan))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError):
        load_world(path, plan)
    from dpsynth.artifacts.tensors import save_tensors

    save_tensors(path, {"a": np.zeros(1)}, {"room": "curator", "format": "other"})
    with pytest.raises(UsageError, match="no world of this audit"):
        load_world(path, plan)
