"""The hand-out folder stands on its own: replay holds there, and nothing curator-only is in it."""

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpsynth.artifacts.files import write_json
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.manifest import check_manifest
from dpsynth.artifacts.nonprivate import reference_stamps
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import content_digest, write_samples
from dpsynth.artifacts.settled import DERIVED
from dpsynth.artifacts.sheet import encode_png
from dpsynth.artifacts.tensors import load_released
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import BudgetError, DataError, MissingError, ReplayError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.card import build_card, spent, stamps
from dpsynth.released.card_contents import FILES
from dpsynth.released.handout import hand_out


def test_replay_holds_on_a_copy_elsewhere(tiny: VerifiedPlan, tmp_path: Path) -> None:
    facts = hand_out(tiny.run)
    copy = Path(shutil.copytree(tiny.run.released, tmp_path / "received"))
    report = replay(copy, head=facts["head"])
    assert report.ok
    assert report.epsilon == pytest.approx(facts["epsilon"])
    assert report.epsilon <= 3.0
    card = (copy / "card.md").read_text()
    assert facts["head"] in card
    assert f"epsilon {report.epsilon:.4f}" in card
    assert "`moments.safetensors`: noisy counts" in card
    for name in ("geometry.safetensors", "calibration.json"):
        assert (copy / "public" / name).read_bytes() == (tiny.run.public / name).read_bytes()


def test_a_transcript_that_lost_lines_is_not_handed_out(tiny: VerifiedPlan) -> None:
    hand_out(tiny.run)
    whole = tiny.run.transcript.read_bytes()
    try:
        tiny.run.transcript.write_bytes(whole.splitlines(keepends=True)[0])
        with pytest.raises(BudgetError, match="earlier transcript"):
            hand_out(tiny.run)
        assert (tiny.run.released / "transcript.jsonl").read_bytes() == whole
    finally:
        tiny.run.transcript.write_bytes(whole)


def test_replay_knows_every_array_of_a_hand_out() -> None:
    arrays = {name for name in FILES if name.endswith(".safetensors")}
    made = ("moments", "cross-moments", "cells", "embedding", "votes", "central", "confusion")
    made = (*made, "model")
    rounds = {name for name in arrays if name.startswith(made)}
    assert arrays - rounds == set(DERIVED)


def test_idempotent(tiny: VerifiedPlan) -> None:
    def state() -> dict[Path, tuple[int, bytes]]:
        files = [p for p in tiny.run.released.rglob("*") if p.is_file()]
        return {
            p: (0 if p.name == "manifest.json" else p.stat().st_mtime_ns, p.read_bytes())
            for p in files
        }

    hand_out(tiny.run)
    before = state()
    hand_out(tiny.run)
    assert state() == before


def test_a_changed_file_is_caught(tiny: VerifiedPlan, tmp_path: Path) -> None:
    hand_out(tiny.run)
    for name in ("card.md", "moments.safetensors", "plan.lock.json", "transcript.jsonl"):
        copy = Path(shutil.copytree(tiny.run.released, tmp_path / name))
        data = bytearray((copy / name).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / name).write_bytes(bytes(data))
        with pytest.raises(ReplayError):
            replay(copy)


def test_every_released_array_is_stamped_for_release(tiny: VerifiedPlan) -> None:
    hand_out(tiny.run)
    files = list(tiny.run.released.rglob("*.safetensors"))
    assert files
    for path in files:
        load_released(path)


def test_no_path_of_this_machine_leaves(tiny: VerifiedPlan) -> None:
    hand_out(tiny.run)
    here = str(tiny.run.root.resolve().parent).encode()
    for path in tiny.run.released.rglob("*"):
        if path.is_file():
            assert here not in path.read_bytes(), path.name


def test_card_says_what_it_must(tiny: VerifiedPlan) -> None:
    lock, transcript = read_lock(tiny.run.lock), read_transcript(tiny.run.transcript)
    card = build_card(lock, transcript, {"samples": {"count": 30, "origin": {"model": "field"}}})
    for text in (
        "delta 1e-05",
        "add-or-remove-one record",
        "PUBLIC DEMO",
        "pretrained models",
        "Timing, crashes",
        "scores on private records",
        "curator/",
        "dpsynth replay",
        "30 images (model field)",
        "| moments | 1 |",
        "1,800",
    ):
        assert text in card, text
    assert "UNSAFE" not in card
    assert "Warning" not in card
    assert spent(lock, transcript) > 2.5


def test_card_of_an_unsafe_and_open_run(tiny: VerifiedPlan) -> None:
    lock = replace(read_lock(tiny.run.lock), unsafe_seed=7, lock_hash="")
    lock = replace(lock, budget={**lock.budget, "delta": 1e-3})
    transcript = read_transcript(tiny.run.transcript)
    opened = replace(transcript, lines=transcript.lines[:-2])
    card = build_card(lock, opened, {})
    assert "UNSAFE" in card.split("##")[0]
    assert "UNSAFE" in stamps(lock)["dpsynth-unsafe"]
    assert "still open" in card
    assert "--partial" in card
    assert "1 charge was lost to a crash and counts as spent" in card
    assert "**Warning**: delta 0.001" in card


def test_a_public_report_on_other_samples_is_removed(
    tiny: VerifiedPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    released = tiny.run.released
    labels = np.zeros(3, np.int64)

    def drawn(name: str, shade: int) -> str:
        images = np.full((3, 8, 8, 1), shade, np.uint8)
        write_samples(released / name, images, labels, tiny.plan.private.classes)
        return content_digest(released / name)

    def reported(name: str, digest: str | None) -> None:
        samples = {"metadata_sha256": "m", "content_sha256": digest}
        write_json(released / f"{name}.json", {"room": "public", "samples": samples})
        (released / f"{name}.png").write_bytes(b"picture")

    def there() -> set[str]:
        hand_out(tiny.run)
        listed = check_manifest(released)["files"]
        card = (released / "card.md").read_text()
        assert ("`evaluation-public.json`" in card) is ("evaluation-public.json" in listed)
        return {name for name in listed if name.startswith("evaluation-public")}

    try:
        whole = {"evaluation-public.json", "evaluation-public.png"}
        others = {"evaluation-public-prior.json", "evaluation-public-prior.png"}
        reported("evaluation-public", drawn("samples", 1))
        reported("evaluation-public-prior", drawn("samples-prior", 2))
        assert there() == whole | others
        metadata = (released / "samples/metadata.csv").read_bytes()
        drawn("samples", 3)  # other images of the same labels
        assert (released / "samples/metadata.csv").read_bytes() == metadata
        assert there() == others
        assert "evaluation-public.json was of other samples" in capsys.readouterr().err
        (released / "samples-prior/images/0000001.png").unlink()
        assert there() == set()
        reported("evaluation-public-gone", None)
        (released / "evaluation-public.json").write_text('{"room": "public"}')
        assert there() == set()
    finally:
        for path in [*released.glob("samples*.json"), *released.glob("evaluation-public*")]:
            path.unlink()
        for name in ("samples", "samples-prior"):
            shutil.rmtree(released / name, ignore_errors=True)


def test_a_link_is_refused_before_anything_is_made_of_it(
    tiny: VerifiedPlan, tmp_path: Path
) -> None:
    """A folder of pictures in the curator's room, linked into released/ as samples."""
    run = RunDir(Path(shutil.copytree(tiny.run.root, tmp_path / "run")))
    hand_out(run)
    page = (run.released / "card.html").read_bytes()
    for name in ("samples", "samples.json"):
        shutil.rmtree(run.released / name, ignore_errors=True)
        (run.released / name).unlink(missing_ok=True)
    images, names = np.full((3, 8, 8, 1), 99, np.uint8), ["zero", "one", "two"]
    write_samples(run.curator / "samples", images, np.arange(3), names)
    shutil.copy(run.curator / "samples.json", run.released)
    (run.released / "samples").symlink_to(run.curator / "samples")
    with pytest.raises(ReplayError, match="symlink"):
        hand_out(run)
    assert (run.released / "card.html").read_bytes() == page


EVIL = "x</p><script>alert(1)</script>\n\n## Guarantee\n\nSpent: epsilon 0 | [a](http://b)"


def test_what_bears_a_references_stamp_is_refused_before_anything_is_made(
    tiny: VerifiedPlan,
) -> None:
    """Its table alone, its images packed away: the manifest reads bytes, and would see neither."""
    hand_out(tiny.run)
    extra, card = tiny.run.released / "extra", tiny.run.released / "card.md"
    picture = encode_png(np.zeros((8, 8, 1), np.uint8), reference_stamps("nonprivate"))
    made = card.read_bytes()
    try:
        card.write_text("as it was")
        for name in ("metadata.csv", "0.png", "images.zip"):
            extra.mkdir()
            if name == "metadata.csv":
                (extra / name).write_text("file_name,label,text,stamp\n")
            elif name == "0.png":
                (extra / name).write_bytes(picture)
            else:
                with zipfile.ZipFile(extra / name, "w", zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr("0.png", picture)
            with pytest.raises(ReplayError, match=f"extra/{name} .* of a reference"):
                hand_out(tiny.run)
            assert card.read_text() == "as it was"
            shutil.rmtree(extra)
    finally:
        shutil.rmtree(extra, ignore_errors=True)
        card.write_bytes(made)
    hand_out(tiny.run)


@pytest.mark.parametrize("name", ["geometry.safetensors", "calibration.json"])
def test_a_changed_public_file_does_not_replace_the_last_good_copy(
    tiny: VerifiedPlan, name: str
) -> None:
    hand_out(tiny.run)
    path, good = tiny.run.public / name, (tiny.run.public / name).read_bytes()
    try:
        path.write_bytes(good[:-1] + b" ")
        with pytest.raises(ReplayError, match=name):
            hand_out(tiny.run)
        assert (tiny.run.released / "public" / name).read_bytes() == good
    finally:
        path.write_bytes(good)


def test_the_card_says_that_captions_are_declared_public(tiny: VerifiedPlan) -> None:
    lock, transcript = read_lock(tiny.run.lock), read_transcript(tiny.run.transcript)
    said = "the plan declares them public. Training"
    for captions, found in (({"kind": "free", "public": True}, True), ({"kind": "free"}, False)):
        private = {**lock.facts["private"], "captions": captions}
        told = replace(lock, facts={**lock.facts, "private": private})
        assert (said in build_card(told, transcript, {})) is found
    assert said not in build_card(lock, transcript, {})


def test_the_card_names_a_frozen_prior_and_no_folder(tiny: VerifiedPlan) -> None:
    lock, transcript = read_lock(tiny.run.lock), read_transcript(tiny.run.transcript)
    hub, folder = {"kind": "diffusers", "family": "sd3", "model": "a/b"}, {"kind": "diffusers"}
    for prior, said in ((hub, "a/b"), (folder | {"family": "flux"}, "a folder of the custodian")):
        told = replace(lock, facts={**lock.facts, "prior": prior})
        assert said in build_card(told, transcript, {}).replace("\\", "")
    assert "text-to-image" not in build_card(lock, transcript, {})


def test_a_summary_and_class_names_stay_text_in_the_card(tiny: VerifiedPlan) -> None:
    lock, transcript = read_lock(tiny.run.lock), read_transcript(tiny.run.transcript)
    facts = {**lock.facts, "private": {**lock.facts["private"], "classes": [EVIL, "two"]}}
    lock = replace(lock, facts=facts, lock_hash=lock.lock_hash)
    score = {"value": 0.5, "error": 0.1, "low": 0.3, "high": 0.7}
    found = {
        "accuracy": score, "level": 0.95, "samples": {"count": 3}, "of_samples": "samples",
        "records": {"value": 5.0, "error": 1.0},
        "per_class": [{"class": EVIL, "recall": score, "precision": score}],
    }  # fmt: skip
    origin = {"model": EVIL, "port": "guide", "start": 0.5, "mean": EVIL}
    card = build_card(lock, transcript, {"samples": {"count": 3, "origin": origin}}, [], found)
    assert card.count("\n## Guarantee\n") == 1
    for mark in ("<script>", "](http", "epsilon 0 | "):
        assert mark not in card
    assert card.count("alert") == 4  # each name is still told


@pytest.mark.parametrize(
    "summary",
    [
        {"count": "3", "origin": {"steps": "<b>"}},
        {"count": 3, "origin": {"guidance": "## x"}},
        {"count": 3, "origin": {"steps": float("inf")}},
        {"count": 3, "origin": {"port": "guide", "start": "<b>"}},
        {"count": 3, "origin": {"sharpen": "<b>"}},
        {"count": 3, "origin": {"augment": "<b>"}},
        {"count": 3, "origin": {"model": ["<b>"]}},
        {"count": 3, "origin": "<b>"},
        {"count": "many", "origin": {}},
        {"origin": {}},
    ],
)
def test_a_summary_that_no_sampler_writes_is_refused(tiny: VerifiedPlan, summary: dict) -> None:
    lock, transcript = read_lock(tiny.run.lock), read_transcript(tiny.run.transcript)
    with pytest.raises(DataError, match=r"samples\.json is damaged"):
        build_card(lock, transcript, {"samples": summary})


def test_nothing_to_hand_out_yet(tiny: VerifiedPlan, tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        hand_out(RunDir(tmp_path))
