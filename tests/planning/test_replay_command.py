"""`dpsynth replay` and `dpsynth close` as typed."""

import json
import subprocess
import sys

import pytest
from spendkit import make_lock, make_run, open_spending, spend, spend_all

from dpsynth.artifacts.spending import close_run
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.commands import replay as command
from dpsynth.errors import ReplayError, UsageError


@pytest.fixture
def run(tmp_path):
    lock = make_lock()
    return spend_all(make_run(tmp_path / "a", lock), lock)


def test_text(run, capsys):
    command.replay([run.root])
    shown = capsys.readouterr()
    assert "class-moments" in shown.out
    assert "verdict: the transcript holds: consistent, head not checked" in shown.out
    assert read_transcript(run.transcript).head in shown.out
    assert "cannot prove that noise was drawn" in shown.err


def test_json(run, capsys):
    command.replay([run.root], budget="2,1e-4", json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["runs"][0]["charges"] == 3
    assert report["budget"] == [2.0, 1e-4]


def test_several(run, tmp_path, capsys):
    lock = make_lock(name="other")
    other = spend_all(make_run(tmp_path / "b", lock), lock)
    command.replay([run.root, other.root])
    assert "joint: epsilon" in capsys.readouterr().out


def test_unsafe_is_shown_and_fails(tmp_path, capsys):
    lock = make_lock(seed=3)
    run = spend_all(make_run(tmp_path / "u", lock), lock)
    with pytest.raises(ReplayError, match="UNSAFE"):
        command.replay([run.root])
    assert "UNSAFE" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "x", "1,2,3", "0", "-1", "nan", "inf", "1,0", "1,1", "1,x"])
def test_bad_budgets(text):
    with pytest.raises(UsageError, match="--budget"):
        command.parse_budget(text)


def test_a_forfeited_slot_is_shown(tmp_path, capsys):
    lock = make_lock()
    run = make_run(tmp_path / "a", lock)
    with open_spending(run, lock) as spender:
        spend(spender, run, lock.slots[0])
        spender.charge(lock.slots[2])
    close_run(run, lock)
    command.replay([run.root])
    assert "1 settled, 1 forfeited" in capsys.readouterr().out


def test_replay_needs_no_torch(run):
    code = (
        "import sys; from dpsynth.commands.replay import replay; from pathlib import Path; "
        f"replay([Path({str(run.root)!r})], json=True); "
        "assert not {'torch', 'opacus', 'safetensors', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
