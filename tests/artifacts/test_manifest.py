"""The hand-out's manifest: nothing changed, missing or extra."""

import json

import numpy as np
import pytest
from spendkit import hand_out, make_lock, make_run, spend_all

from dpsynth.artifacts import manifest as module
from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.artifacts.manifest import check_manifest, write_manifest
from dpsynth.artifacts.sheet import encode_png
from dpsynth.artifacts.tensors import save_tensors
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import ReplayError


@pytest.fixture
def released(tmp_path):
    lock = make_lock()
    run = spend_all(make_run(tmp_path / "a", lock), lock)
    (run.released / "samples" / "images").mkdir(parents=True)
    (run.released / "samples" / "images" / "0.png").write_bytes(b"png")
    return hand_out(run, epsilon=0.9)


def test_it_lists_everything_but_itself(released):
    manifest = check_manifest(released)
    assert list(manifest["files"]) == [
        "card.md",
        "plan.lock.json",
        "samples/images/0.png",
        "transcript.jsonl",
    ]
    assert manifest["epsilon"] == 0.9
    assert manifest["head"] == read_transcript(released / "transcript.jsonl").head


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "card.md").write_text("# other\n"), "not what the manifest says"),
        (lambda f: (f / "card.md").unlink(), "missing from the hand-out"),
        (lambda f: (f / "extra.txt").write_text(""), "not in the manifest"),
        (lambda f: (f / ".hidden").write_text(""), "not in the manifest"),
        (lambda f: (f / "link").symlink_to("card.md"), "symlink"),
        (lambda f: (f / "dir").symlink_to(f.parent), "symlink"),
        (lambda f: (f / "manifest.json").unlink(), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text("{}"), "damaged"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
    ],
)
def test_every_damage_is_caught(released, damage, says):
    damage(released)
    with pytest.raises(ReplayError, match=says):
        check_manifest(released)


def test_no_symlink_is_listed(released):
    (released / "link").symlink_to("/etc/hostname")
    with pytest.raises(ReplayError, match="symlink"):
        write_manifest(released)


@pytest.mark.parametrize("room", ["curator", "samples/curator"])
def test_a_curators_room_in_a_hand_out_is_neither_listed_nor_vouched_for(released, room):
    """Even one whose files do not say what they are, such as a page."""
    path = released / room / "report.html"
    path.parent.mkdir()
    path.write_text("<p>0.9133</p>")
    before = (released / "manifest.json").read_bytes()
    with pytest.raises(ReplayError, match=f"{room}/report.html lies in a curator's room"):
        write_manifest(released)
    assert (released / "manifest.json").read_bytes() == before
    said = json.loads(before)
    said["files"][f"{room}/report.html"] = sha256_file(path)
    write_json(released / "manifest.json", said)
    with pytest.raises(ReplayError, match="not for handing out"):
        check_manifest(released)


def test_leftovers_of_a_crash_are_swept(released):
    (released / ".card.md.4194399.tmp").write_text("half")
    write_manifest(released)
    assert not (released / ".card.md.4194399.tmp").exists()
    check_manifest(released)


def marked(path, room):
    """A report, a picture and arrays, as dpsynth writes and marks them for a room."""
    long = {"a": list(range(9000)), "room": room}
    write_json(path / f"{room}-report.json", long)
    (path / f"{room}-spaced.json").write_text(json.dumps(long, indent=2))
    stamp = {"title": "x" * 9000, "dpsynth": {"curator": "curator-only"}.get(room, room)}
    (path / f"{room}.png").write_bytes(encode_png(np.zeros((8, 8, 1), np.uint8), stamp))
    save_tensors(path / f"{room}.safetensors", {"w": np.ones(9000)}, {"z": "1", "room": room})
    return sorted(path.glob(f"{room}*"))


def test_what_is_marked_as_the_curators_is_not_listed(released, tmp_path):
    for path in marked(tmp_path, "curator"):
        before = (released / "manifest.json").read_bytes()
        for name in (path.name, "samples/images/1.png"):
            (released / name).write_bytes(path.read_bytes())
            with pytest.raises(ReplayError, match="not for handing out"):
                write_manifest(released)
            (released / name).unlink()
        assert (released / "manifest.json").read_bytes() == before


def test_what_is_public_or_released_is_listed(released, monkeypatch):
    marked(released, "public")
    marked(released, "released")
    named = {"class": '"room": "curator"', "words": "curator-only", "room": "public"}
    write_json(released / "quoted.json", named)
    found = write_manifest(released)["files"]
    assert len(found) == 13
    assert all(sha256_file(released / name) == said for name, said in found.items())
    monkeypatch.setattr(module, "_BLOCK", 7)  # every mark lies across blocks
    assert write_manifest(released)["files"] == found
    check_manifest(released)
    marked(released, "curator")
    with pytest.raises(ReplayError, match="curator"):
        write_manifest(released)
