"""The hand-out folder stands on its own: replay holds there, and nothing curator-only is in it."""

import shutil
from pathlib import Path

import pytest

from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.settled import DERIVED
from dpsynth.artifacts.tensors import load_released
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import BudgetError, MissingError, ReplayError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.card import FILES, build_card, spent, stamps
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
    made = ("moments", "cross-moments", "cells", "confusion", "model")
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
    from dataclasses import replace

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


def test_nothing_to_hand_out_yet(tiny: VerifiedPlan, tmp_path: Path) -> None:
    from dpsynth.artifacts.rooms import RunDir

    with pytest.raises(MissingError):
        hand_out(RunDir(tmp_path))
