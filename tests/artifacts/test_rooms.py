"""The three rooms of a run."""

import stat

import pytest

from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import MissingError, UsageError


def test_rooms(tmp_path):
    run = RunDir.create(tmp_path / "runs" / "x")
    assert {p.name for p in run.root.iterdir()} == {"public", "released", "curator"}
    assert stat.S_IMODE(run.curator.stat().st_mode) == 0o700
    run.curator.chmod(0o755)
    run.make_rooms()
    assert stat.S_IMODE(run.curator.stat().st_mode) == 0o700
    assert run.name == "x"
    with pytest.raises(MissingError, match="not a planned run"):
        RunDir.open(run.root)
    run.lock.write_text("{}")
    assert RunDir.open(run.root) == run


def test_a_run_that_is_a_file(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        RunDir.create(tmp_path / "x")
