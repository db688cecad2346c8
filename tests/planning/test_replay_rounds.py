"""Replay of a release in rounds: every round's file is the one that its own charge settled."""

import shutil
from pathlib import Path

import pytest
from plan_texts import celled, changed
from spendkit import hand_out, reseal

from dpsynth.accounting import gaussian
from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.artifacts.lock import Lock, Slot, read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import DERIVED, FOLLOWS
from dpsynth.artifacts.spending import Spender, spending
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import ReplayError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import make_run

FILES = [
    "moments.safetensors",
    "cells-lloyd-1.safetensors",
    "cells-lloyd-2.safetensors",
    "cells.safetensors",
]


def planned(folder: Path, text: str) -> RunDir:
    (folder / "plan.yaml").write_text(text)
    return make_run(folder / "plan.yaml", folder / "runs" / "r").run


def release(spender: Spender, run: RunDir, slot: Slot, *, settle: bool = True) -> None:
    spender.charge(slot)
    path = run.released / f"{slot.release}.safetensors"
    path.write_bytes(slot.name.encode())
    if settle:
        spender.settle(slot, path)


def open_spending(run: RunDir, lock: Lock):
    return spending(run, lock, calibration_hash="0" * 64, noise_source=lock.noise_source)


def spent(folder: Path, *, crash: int = 0, close: bool = True) -> RunDir:
    """A run with every round released; round `crash` was lost once and took its spare."""
    run = planned(folder, celled(spares=1 if crash else 0))
    lock = read_lock(run.lock)
    with open_spending(run, lock) as spender:
        for number, name in enumerate(lock.releases("moments"), start=1):
            if number == crash:
                release(spender, run, spender.release_slot(name), settle=False)
            release(spender, run, spender.release_slot(name))
        if close:
            spender.close()
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return spent(tmp_path)


def test_all_rounds_replay(run: RunDir) -> None:
    lock = read_lock(run.lock)
    (one,) = replay(run.root).runs
    assert (one.charges, one.settled, one.closed) == (4, 4, True)
    assert one.epsilon == lock.epsilon
    assert [(row.mechanism, row.executions) for row in one.rows] == [
        ("moments: class-moments", 1),
        ("moments: cell-sums", 2),
        ("moments: cell-moments", 1),
    ]
    m = lock.by_stage["moments"]["noise_multiplier"]
    assert sum(row.executions / row.noise_multiplier**2 for row in one.rows) == pytest.approx(
        1 / m**2
    )
    assert one.epsilon == pytest.approx(gaussian.epsilon(1e-5, m), rel=1e-2)
    shutil.copytree(hand_out(run), run.root / "received")
    assert replay(run.root / "received").ok


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("source", [*FILES, None])
def test_a_swapped_round_file_is_refused(run: RunDir, name: str, source: str | None) -> None:
    if name == source:
        assert replay(run.root).ok
        return
    data = b"other" if source is None else (run.released / source).read_bytes()
    (run.released / name).write_bytes(data)
    with pytest.raises(ReplayError, match=f"{name} is not what the transcript settled"):
        replay(run.root)
    with pytest.raises(ReplayError, match=name):  # its manifest made right again
        replay(hand_out(run))


@pytest.mark.parametrize(
    "name",
    ["cells-lloyd-3.safetensors", "cells-lloyd-01.safetensors", "cells-spare-1.safetensors",
     "cells-old.safetensors", "moments-old.safetensors", "model.safetensors"],
)  # fmt: skip
def test_a_file_that_no_charge_paid_for_is_refused(run: RunDir, name: str) -> None:
    shutil.copy(run.released / "cells.safetensors", run.released / name)
    for target in (run.root, hand_out(run)):
        with pytest.raises(ReplayError, match=f"{name} is there, and .* no charge that paid"):
            replay(target)


def test_a_round_ahead_of_its_charge_is_refused(tmp_path: Path) -> None:
    run = planned(tmp_path, celled())
    lock = read_lock(run.lock)
    with open_spending(run, lock) as spender:
        for slot in lock.slots[:3]:
            release(spender, run, slot)
    assert replay(run.root, partial=True).runs[0].charges == 3
    (run.released / "cells.safetensors").write_bytes(b"cells")
    with pytest.raises(ReplayError, match="no charge that paid"):
        replay(run.root, partial=True)


@pytest.mark.parametrize("crash", [1, 2, 4])
def test_a_spare_stands_for_its_round(tmp_path: Path, crash: int) -> None:
    run = spent(tmp_path, crash=crash)
    (one,) = replay(run.root).runs
    assert (one.charges, one.settled, one.forfeited) == (5, 4, 1)
    (run.released / FILES[crash - 1]).write_bytes(FILES[crash - 1].split(".")[0].encode())
    with pytest.raises(ReplayError, match="is not what"):  # that of the lost slot
        replay(run.root)


def test_a_file_whose_line_a_crash_cut_off(tmp_path: Path) -> None:
    """It is no forgery while the run is open; once that is closed, it is never to be used."""
    run = planned(tmp_path, celled())
    lock = read_lock(run.lock)
    with open_spending(run, lock) as spender:
        release(spender, run, lock.slots[0])
        release(spender, run, lock.slots[1], settle=False)
    (one,) = replay(run.root, partial=True).runs
    assert "cells-lloyd-1.safetensors was charged and never settled: not checked" in one.notes
    with open_spending(run, lock) as spender:
        spender.close()
    assert not (run.released / "cells-lloyd-1.safetensors").exists()
    assert (run.released / "moments.safetensors").exists()
    assert replay(run.root).runs[0].forfeited == 1
    (run.released / "cells-lloyd-1.safetensors").write_bytes(b"forged")
    for target in (run.root, hand_out(run)):
        with pytest.raises(ReplayError, match="never settled in this closed transcript"):
            replay(target)


def rewritten(run: RunDir, order: list[int], settles: list[int]) -> None:
    """A forger's transcript: `order` of charged slots, each of `settles` right after its charge."""
    lines = [dict(line) for line in read_transcript(run.transcript).lines]
    of = {(line["kind"], line.get("slot")): line for line in lines}
    made = [of["open", None]]
    for slot in order:
        made += [of["charge", slot]] + ([of["settle", slot]] if slot in settles else [])
    made += [of["settle", slot] for slot in sorted({1, 2, 3, 4} & set(order) - set(settles))]
    close = {**of["close", None], "charged": len(order), "settled": len(order), "forfeited": []}
    run.transcript.write_bytes(reseal([*made, close]))


@pytest.mark.parametrize(
    ("order", "settles"),
    [([4, 3, 2, 1], [1, 2, 3, 4]), ([1, 2, 3, 4], []), ([1, 3, 2, 4], [1, 2, 3, 4]),
     ([4], [4]), ([1, 4], [1, 4]), ([1, 2, 3, 4], [1, 3, 4])],
)  # fmt: skip
def test_rounds_out_of_order_are_refused(run: RunDir, order: list[int], settles: list[int]) -> None:
    for path in run.released.glob("cells*"):
        path.unlink()
    (run.released / "moments.safetensors").unlink()
    rewritten(run, [1, 2, 3, 4], [1, 2, 3, 4])
    assert replay(run.root).ok
    rewritten(run, order, settles)
    with pytest.raises(ReplayError, match="before every earlier round"):
        replay(run.root)


def test_the_papers_two_mechanisms_are_one_round(tmp_path: Path) -> None:
    paper = "{covariance: shared, sensitivity: paper, spares: 1}"
    run = planned(tmp_path, changed("{covariance: class}", paper))
    lock = read_lock(run.lock)
    with open_spending(run, lock) as spender:
        for name in ("moments-sums", "moments-second"):  # a crash: neither settles
            spender.charge(spender.release_slot(name))
    with open_spending(run, lock) as spender:
        slots = [spender.release_slot(name) for name in ("moments-sums", "moments-second")]
        for slot in slots:
            spender.charge(slot)
        path = run.released / "moments.safetensors"
        path.write_bytes(b"both")
        for slot in slots:
            spender.settle(slot, path)
        spender.close()
    assert replay(run.root).runs[0].settled == 2


def test_an_array_that_nothing_accounts_for_is_refused_in_a_hand_out(run: RunDir) -> None:
    for name in ("extra.safetensors", "Cells-2.safetensors", "sub/cells.safetensors",
                 "public/cells.safetensors", "sub/model.SAFETENSORS", "adapter/adapter_model.bin",
                 "cells.pt", "sub/model.ckpt"):  # fmt: skip
        path = run.released / name
        path.parent.mkdir(exist_ok=True)
        shutil.copy(run.released / "cells.safetensors", path)
        with pytest.raises(ReplayError, match=f"{name} is no file of a hand-out"):
            replay(hand_out(run))
        path.unlink()
    for name in DERIVED:
        # Of releases that this plan has no charge for, and of a model that it does not train.
        if name in FOLLOWS or name.startswith("adapter/"):
            continue
        (run.released / name).parent.mkdir(exist_ok=True)
        (run.released / name).write_bytes(b"made from released or public values")
    assert replay(hand_out(run)).ok
    for name in ("population-01.safetensors", "generator.safetensors", "warm.safetensors"):
        (run.released / name).write_bytes(b"made of what nothing paid for")
        with pytest.raises(ReplayError, match=f"{name} is made of .*, which no charge"):
            replay(hand_out(run))
        (run.released / name).unlink()


def test_a_settled_file_that_is_missing_is_noted(run: RunDir) -> None:
    assert not any("not in this hand-out" in note for note in replay(hand_out(run)).runs[0].notes)
    (run.released / "cells-lloyd-1.safetensors").unlink()
    notes = replay(hand_out(run)).runs[0].notes
    assert "cells-lloyd-1.safetensors was settled, and is not in this hand-out" in notes


def test_public_files_are_those_that_the_calibration_names(tmp_path: Path) -> None:
    run = planned(tmp_path, celled())
    lock = read_lock(run.lock)
    named = [run.public / f"{key}.safetensors" for key in ("geometry", "within")]
    for path in named:
        path.write_bytes(path.name.encode())
    write_json(run.calibration, {f"{path.stem}_sha256": sha256_file(path) for path in named})
    digest = sha256_file(run.calibration)
    with spending(run, lock, calibration_hash=digest, noise_source=lock.noise_source) as spender:
        release(spender, run, lock.slots[0])
        spender.close()
    shutil.copytree(run.public, run.released / "public")
    handed = hand_out(run)
    assert replay(run.root).ok and replay(handed).ok
    for path in named:
        for target, other in ((run.root, path), (handed, handed / "public" / path.name)):
            whole = other.read_bytes()
            other.write_bytes(b"another")
            hand_out(run)
            with pytest.raises(ReplayError, match=f"{path.name} is not the one that"):
                replay(target)
            other.write_bytes(whole)
            hand_out(run)


def forge(run: RunDir, number: int, **fields: object) -> None:
    lines = [dict(line) for line in read_transcript(run.transcript).lines]
    charges = [line for line in lines if line["kind"] == "charge"]
    charges[number].update(fields)
    run.transcript.write_bytes(reseal(lines))


@pytest.mark.parametrize(
    "fields",
    [
        {"noise_std": 1e9},
        {"mechanism": "cells"},
        {"slot": 9},
        {"statistic": {"kind": "cell-sums", "count": 0.6, "sum": 0.8, "classes": 2, "cells": 3,
                       "dim": 4}},
    ],
)  # fmt: skip
def test_a_forged_round_meets_the_lock(run: RunDir, fields: dict[str, object]) -> None:
    forge(run, 1, **fields)
    with pytest.raises(ReplayError):
        replay(run.root)


@pytest.mark.parametrize(
    "fields",
    [
        {"noise_std": 0.1},
        {"statistic": {"kind": "cell-sums", "count": 0.6, "sum": 0.8, "classes": 2, "dim": 4}},
        {"statistic": {"kind": "cell-sums", "count": 6.0, "sum": 8.0, "classes": 2, "cells": 3,
                       "dim": 4}},
        {"statistic": {"kind": "cell-sums", "count": 0.6, "sum": 0.8, "classes": 2,
                       "cells": 10**14, "dim": 4}},
        {"rate": 0.5, "steps": 1, "noise_std": 1e-3},
        {"statistic": {"kind": "cells"}},
    ],
    ids=["less noise", "a key short", "more sensitive", "more numbers", "sampled", "unknown"],
)  # fmt: skip
def test_a_bare_transcript_of_rounds(
    run: RunDir, tmp_path: Path, fields: dict[str, object]
) -> None:
    shutil.copy(run.transcript, tmp_path / "t.jsonl")
    assert [row.executions for row in replay(tmp_path / "t.jsonl").runs[0].rows] == [1, 2, 1]
    forge(run, 1, **fields)
    shutil.copy(run.transcript, tmp_path / "t.jsonl")
    with pytest.raises(ReplayError):
        replay(tmp_path / "t.jsonl")
