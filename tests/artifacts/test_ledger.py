"""One ledger a dataset: runs add up, a run counts once, the cap holds."""

import json
import multiprocessing
import shutil
import stat

import pytest
from spendkit import make_lock, make_run, open_spending, spend_all

from dpsynth.artifacts.ledger import Entry, Ledger, dataset_text
from dpsynth.errors import BudgetError, MissingError, UsageError


def entry(name, epsilon=1.0, delta=1e-5, run_id=None):
    return Entry(run_id or name, name, "p", epsilon, delta)


CAP = {"epsilon": 2.0, "delta": 1e-4}


def test_runs_add_up_to_the_cap(tmp_path):
    ledger = Ledger.beside(tmp_path / "a", "d")
    ledger.enter(entry("a"), CAP)
    ledger.enter(entry("a"), CAP)
    ledger.enter(entry("b"), CAP)
    with pytest.raises(BudgetError, match=r"epsilon 1 and 2 earlier .* make 3, .* cap of 2"):
        ledger.enter(entry("c"), CAP)
    with pytest.raises(BudgetError):
        ledger.check(1.0, 1e-5, CAP)
    ledger.enter(entry("c"), None)
    assert [e.run for e in ledger.entries()] == ["a", "b", "c"]


def test_delta_is_capped_too(tmp_path):
    ledger = Ledger.beside(tmp_path / "a", "d")
    ledger.enter(entry("a", delta=6e-5), CAP)
    with pytest.raises(BudgetError, match="delta"):
        ledger.enter(entry("b", delta=6e-5), CAP)


def test_decimal_sums_do_not_trip_the_cap(tmp_path):
    ledger = Ledger.beside(tmp_path / "a", "d")
    for name in "abc":
        ledger.enter(entry(name, epsilon=0.1), {"epsilon": 0.3, "delta": 1})


def test_check_writes_nothing(tmp_path):
    ledger = Ledger.beside(tmp_path / "a", "d")
    ledger.check(1.0, 1e-5, CAP)
    with pytest.raises(BudgetError):
        ledger.check(3.0, 1e-5, CAP)
    assert list(tmp_path.iterdir()) == []


def test_datasets_and_parents_are_apart(tmp_path):
    for folder in ("x", "y"):
        for dataset in ("d", "e"):
            Ledger.beside(tmp_path / folder / "same", dataset).enter(entry("same"), CAP)
    assert len(list(tmp_path.glob("*/ledgers/*.json"))) == 4 + 2  # and two indices


def test_no_private_path_outside_the_index(tmp_path):
    lock = make_lock()
    run = make_run(tmp_path / "runs" / "a", lock, dataset="/vault/patients")
    spend_all(run, lock)
    index = tmp_path / "runs" / "ledgers" / ".index.json"
    assert "patients" in index.read_text()
    assert stat.S_IMODE(index.stat().st_mode) == 0o600
    others = [p for p in tmp_path.rglob("*") if p.is_file() and p != index]
    others.remove(run.curator / "source.json")
    assert all(b"patients" not in p.read_bytes() for p in others)
    name = next(p for p in index.parent.glob("*.json") if p != index).stem
    assert len(name) == 32


def test_a_run_planned_again_counts_again(tmp_path):
    lock = make_lock(cap={"epsilon": 1.5, "delta": 1e-4})
    run = make_run(tmp_path / "runs" / "a", lock)
    spend_all(run, lock)
    shutil.rmtree(run.root)
    run = make_run(tmp_path / "runs" / "a", lock)
    with open_spending(run, lock) as spender, pytest.raises(BudgetError, match="cap of"):
        spender.charge(lock.slots[0])
    assert b'"charge"' not in run.transcript.read_bytes()


def test_a_copied_run_is_refused_and_a_renamed_one_goes_on(tmp_path):
    lock = make_lock()
    run = make_run(tmp_path / "runs" / "a", lock)
    with open_spending(run, lock) as spender:
        spender.charge(lock.slots[0])
    copy = make_run(tmp_path / "runs" / "b", lock)
    shutil.copy(run.transcript, copy.transcript)
    with open_spending(copy, lock) as spender, pytest.raises(BudgetError, match="copy of a"):
        spender.charge(lock.slots[2])
    shutil.rmtree(run.root)
    with open_spending(copy, lock) as spender:
        spender.charge(lock.slots[2])
    (row,) = Ledger.of(copy).entries()
    assert row.run == "b"


def test_a_run_without_a_source(tmp_path):
    lock = make_lock()
    run = make_run(tmp_path / "a", lock)
    (run.curator / "source.json").unlink()
    with open_spending(run, lock) as spender, pytest.raises(MissingError, match="private source"):
        spender.charge(lock.slots[0])


def test_a_damaged_ledger_blocks_spending(tmp_path):
    ledger = Ledger.beside(tmp_path / "a", "d")
    ledger.enter(entry("a"), None)
    path = next(p for p in ledger.folder.glob("*.json") if not p.name.startswith("."))
    path.write_text(json.dumps({"format": 2}))
    with pytest.raises(UsageError, match="damaged"):
        ledger.enter(entry("b"), None)


def _enter(args):
    root, name = args
    try:
        Ledger.beside(root, "d").enter(entry(name), {"epsilon": 5.0, "delta": 1.0})
    except BudgetError:
        return False
    return True


def test_many_processes_at_once(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        done = pool.map(_enter, [(tmp_path / "a", f"r{i}") for i in range(12)])
    assert sum(done) == 5
    assert len(Ledger.beside(tmp_path / "a", "d").entries()) == 5


def test_dataset_text(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "d")
    folder = {"kind": "folder", "path": str(tmp_path / "d")}
    assert dataset_text(folder) == dataset_text({**folder, "path": str(tmp_path / "link")})
    assert dataset_text({**folder, "path": "/x"}, str(tmp_path / "d")) == dataset_text(folder)
    assert dataset_text({"kind": "npz", "path": "/a.npz", "images": "x", "labels": "y"}) == (
        dataset_text({"kind": "npz", "path": "/a.npz", "images": "z", "labels": "w"})
    )
    idx = {"kind": "idx", "images": "/a/i", "labels": "/a/l"}
    assert dataset_text(idx) == dataset_text({**idx, "images": "/b/i", "labels": "/b/l"}, "/a")
    assert dataset_text(idx) == dataset_text({**idx, "images": "/b", "labels": "/c"}, "/a/i,/a/l")
