"""Atomic files and canonical JSON."""

import errno
import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.artifacts import files
from dpsynth.artifacts.files import (
    canonical_json,
    read_json,
    readable_json,
    sha256_bytes,
    sha256_file,
    sweep,
    write_atomic,
    write_json,
)
from dpsynth.errors import MissingError, UsageError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=5)


@given(JSON)
def test_canonical_json_reads_back_and_is_stable(value):
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data


@given(OBJECTS)
def test_key_order_does_not_matter(obj):
    backwards = dict(reversed(list(obj.items())))
    assert canonical_json(backwards) == canonical_json(obj)
    assert readable_json(backwards) == readable_json(obj)


@given(OBJECTS)
def test_readable_json_reads_back_and_is_stable(obj):
    data = readable_json(obj)
    assert json.loads(data) == obj
    assert readable_json(json.loads(data)) == data


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_json_for_what_is_no_number(bad):
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"x": bad})


@given(st.binary(max_size=300))
def test_write_then_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("w") / "x"
    write_atomic(path, data)
    assert path.read_bytes() == data
    assert sha256_file(path) == sha256_bytes(data)
    assert [p.name for p in path.parent.iterdir()] == ["x"]


def test_mode_of_a_private_file(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1}, mode=0o600)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "x.json"
    write_json(path, {"old": True})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(UsageError, match="No space left") as caught:
        write_json(path, {"new": True})
    monkeypatch.undo()
    assert "free some space" in caught.value.hint
    assert read_json(path) == {"old": True}
    assert len(list(tmp_path.iterdir())) == 1


def test_short_writes_are_completed(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(files.os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    write_atomic(tmp_path / "x", b"0123456789")
    monkeypatch.undo()
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(UsageError, match="cannot write x"):
        write_atomic(tmp_path / "f" / "x", b"")


def test_read_json_says_what_is_wrong(tmp_path):
    with pytest.raises(MissingError, match=r"x\.json is missing"):
        read_json(tmp_path / "x.json")
    for damaged in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "x.json").write_bytes(damaged)
        with pytest.raises(UsageError, match="damaged"):
            read_json(tmp_path / "x.json")


def test_sha256_of_nothing(tmp_path):
    with pytest.raises(MissingError):
        sha256_file(tmp_path / "x")


def test_sweep_takes_only_what_the_dead_left(tmp_path):
    dead, mine = tmp_path / ".a.json.4194399.tmp", tmp_path / f".b.json.{os.getpid()}.tmp"
    other = tmp_path / ".keep.tmp"
    for path in (dead, mine, other):
        path.write_text("")
    sweep(tmp_path)
    assert not dead.exists()
    assert mine.exists()
    assert other.exists()
