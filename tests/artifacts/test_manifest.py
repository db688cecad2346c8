"""The hand-out's manifest: nothing changed, missing or extra."""

import pytest
from spendkit import hand_out, make_lock, make_run, spend_all

from dpsynth.artifacts.manifest import check_manifest, write_manifest
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


def test_leftovers_of_a_crash_are_swept(released):
    (released / ".card.md.4194399.tmp").write_text("half")
    write_manifest(released)
    assert not (released / ".card.md.4194399.tmp").exists()
    check_manifest(released)
