"""The three rooms of a run."""

import stat
from pathlib import Path

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


def handed(run):
    """A hand-out as far as its names tell: lock and manifest in one folder."""
    run.lock.write_text("{}")
    for name in ("plan.lock.json", "manifest.json"):
        (run.released / name).write_text("{}")
    return run.released


def test_a_hand_out_is_no_run(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path / "runs" / "x")
    released = handed(run)
    for path in (released, released / "plan.lock.json", run.curator, run.lock):
        with pytest.raises(UsageError) as caught:
            RunDir.open(path)
        assert caught.value.hint == f"name the run folder: {run.root}"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(released)
    for path in (Path("runs/x/released"), Path("runs/x/plan.lock.json"), Path("link")):
        with pytest.raises(UsageError) as caught:
            RunDir.open(path)
        assert caught.value.hint == "name the run folder: runs/x"
    monkeypatch.chdir(released)
    with pytest.raises(UsageError, match="released/ is a room of the run x") as caught:
        RunDir.open(Path())
    assert caught.value.hint == "name the run folder: .."
    assert RunDir.open(Path("..")).root == Path("..")


def test_a_copy_of_a_hand_out_is_no_run(tmp_path):
    copy = handed(RunDir.create(tmp_path / "x")).rename(tmp_path / "given")
    with pytest.raises(UsageError, match="given/ is a hand-out of a run") as caught:
        RunDir.open(copy)
    assert caught.value.hint.endswith(f"dpsynth replay {copy}")
    assert not (copy / "curator").exists()


def test_a_file_is_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UsageError, match=r"notes\.txt is a file, and a run is a folder"):
        RunDir.open(tmp_path / "notes.txt")
