"""The transcript's chain: nothing changed, dropped, swapped, added or torn goes unseen."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spendkit import make_lock, make_run, make_slots, reseal, spend_all

from dpsynth.artifacts import transcript as module
from dpsynth.artifacts.files import canonical_json
from dpsynth.artifacts.transcript import Appender, parse_transcript, read_transcript, seal
from dpsynth.errors import MissingError, ReplayError, UsageError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    lock = make_lock(make_slots(chunks=1))
    run = make_run(tmp_path_factory.mktemp("runs") / "a", lock)
    return spend_all(run, lock).transcript.read_bytes()


def holds(data: bytes) -> bool:
    """Whether the bytes pass as a whole, closed transcript."""
    try:
        known = parse_transcript(data)
    except ReplayError:
        return False
    whole = not known.torn and not known.unended and known.lines
    return bool(whole) and known.lines[-1]["kind"] == "close"


def test_it_holds(data):
    assert holds(data)
    kinds = [line["kind"] for line in parse_transcript(data).lines]
    assert kinds == ["open", "charge", "settle", "charge", "settle", "close"]


def test_every_single_byte_change_is_caught(data):
    for at in range(len(data)):
        for value in {data[at] ^ 1, data[at] ^ 0x20, data[at] ^ 0x80, 0, 32, 10, 48} - {data[at]}:
            assert not holds(data[:at] + bytes([value]) + data[at + 1 :]), (at, value)


def test_every_removed_or_added_byte_is_caught(data):
    for at in range(len(data)):
        assert not holds(data[:at] + data[at + 1 :]), at
        assert not holds(data[:at] + b" " + data[at:]), at
        assert not holds(data[:at] + b"\n" + data[at:]), at


def test_every_truncation_is_caught(data):
    for at in range(len(data)):
        assert not holds(data[:at]), at


def test_dropped_swapped_and_duplicated_lines(data):
    lines = data.splitlines(keepends=True)
    for i in range(len(lines)):
        assert not holds(b"".join(lines[:i] + lines[i + 1 :]))
        for j in range(len(lines)):
            assert not holds(b"".join([*lines[:j], lines[i], *lines[j:]]))
            if i < j:
                swapped = list(lines)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                assert not holds(b"".join(swapped))


@given(st.data())
def test_any_other_bytes_are_refused_cleanly(data, draw):
    at = draw.draw(st.integers(0, len(data)))
    cut = draw.draw(st.integers(at, len(data)))
    new = draw.draw(st.binary(max_size=20))
    changed = data[:at] + new + data[cut:]
    assert holds(changed) == (changed == data)


def forged(data, change):
    lines = [dict(line) for line in parse_transcript(data).lines]
    return reseal(change(lines) or lines)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ls: ls[1:], "open"),
        (lambda ls: [ls[0], *ls], "open"),
        (lambda ls: [ls[0], ls[1], ls[1], *ls[2:]], "charged twice"),
        (lambda ls: [*ls[:3], ls[2], *ls[3:]], "settled twice"),
        (lambda ls: [ls[0], *ls[2:]], "never charged"),
        (lambda ls: [*ls, ls[-1]], "after `close`"),
        (lambda ls: [*ls[:3], ls[-1]], "count"),
        (lambda ls: ls[1].update(extra=1), "keys"),
        (lambda ls: ls[1].update(slot=[1]), "no number"),
        (lambda ls: ls[1].update(kind="gift"), "kind"),
        (lambda ls: ls[0].update(format=2), "format 2"),
    ],
)
def test_an_impossible_order_is_refused_even_with_right_hashes(data, change, says):
    with pytest.raises(ReplayError, match=says):
        parse_transcript(forged(data, change))


@pytest.mark.parametrize("junk", [b"[]\n", b"1\n", b"{}\n", b"\n", b'{"line":NaN}\n', b"\xff\n"])
def test_junk_lines(junk):
    with pytest.raises(ReplayError, match="line 1"):
        parse_transcript(junk)


def test_a_torn_tail_is_reported_and_repaired(data, tmp_path):
    lines = data.splitlines(keepends=True)
    whole = b"".join(lines[:4])
    path = tmp_path / "transcript.jsonl"
    for cut in range(1, len(lines[4]) - 1):
        path.write_bytes(whole + lines[4][:cut])
        assert parse_transcript(path.read_bytes()).torn
        appender = Appender(path)
        appender.close()
        assert path.read_bytes() == whole


def test_a_line_that_lacks_only_its_newline_counts(data, tmp_path):
    path = tmp_path / "transcript.jsonl"
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:4])[:-1])
    assert parse_transcript(path.read_bytes()).unended
    appender = Appender(path)
    assert len(appender.known.lines) == 4
    appender.append("settle", {"slot": 3, "sha256": "0" * 64})
    appender.close()
    assert len(read_transcript(path).lines) == 5


def test_a_tampered_file_is_never_repaired(data, tmp_path):
    path = tmp_path / "transcript.jsonl"
    changed = data.replace(b'"slot":1', b'"slot":2', 1)
    path.write_bytes(changed)
    with pytest.raises(ReplayError):
        Appender(path)
    assert path.read_bytes() == changed


@pytest.mark.parametrize("written", [0, 40])
def test_a_full_disk_charges_nothing_and_poisons_the_appender(data, tmp_path, monkeypatch, written):
    path = tmp_path / "transcript.jsonl"
    before = b"".join(data.splitlines(keepends=True)[:2])
    path.write_bytes(before)
    appender = Appender(path)
    real = os.write

    def full(fd, view):
        if written and os.fstat(fd).st_size == len(before):
            return real(fd, bytes(view)[:written])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "write", full)
    with pytest.raises(UsageError, match="No space left"):
        appender.append("settle", {"slot": 1, "sha256": "0" * 64})
    monkeypatch.undo()
    assert path.read_bytes() == before
    with pytest.raises(ReplayError, match="could not be written"):
        appender.append("settle", {"slot": 1, "sha256": "0" * 64})
    appender.close()


def test_missing(tmp_path):
    with pytest.raises(MissingError, match="nothing was spent"):
        read_transcript(tmp_path / "transcript.jsonl")


def test_the_seal_is_over_everything_but_itself():
    line = seal(3, "settle", {"slot": 1, "sha256": "x"}, "p")
    assert seal(3, "settle", {"slot": 1, "sha256": "y"}, "p")["hash"] != line["hash"]
    assert b'"hash"' in canonical_json(line)
