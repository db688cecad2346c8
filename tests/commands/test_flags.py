"""Flags that reach the library: of `check --show-curator`, and what `run` hands to training."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_cli import PLAN, dpsynth


@pytest.fixture
def bad_records(tmp_path: Path) -> Path:
    """A planned run of three records, two of which have no declared class."""
    images = np.zeros((3, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "secret-records.npz", images=images, labels=np.array([0, 7, 9]))
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert dpsynth(tmp_path, "plan").returncode == 0
    return tmp_path


def test_bad_records_are_shown_to_the_curator_who_asks(bad_records: Path) -> None:
    told = dpsynth(bad_records, "check")
    assert told.returncode == 5
    assert "2 records do not fit the plan" in told.stderr
    assert told.stdout == "" and "image 1" not in told.stderr

    shown = dpsynth(bad_records, "check", "--show-curator")
    assert shown.returncode == 5
    assert [line.partition(":")[0] for line in shown.stdout.splitlines()] == ["image 1", "image 2"]
    assert "label 7 is undeclared" in shown.stdout
    assert "2 records do not fit the plan" in shown.stderr


def test_bad_records_lie_beside_the_error_in_json(bad_records: Path) -> None:
    hidden = json.loads(dpsynth(bad_records, "check", "--json").stdout)
    assert hidden.keys() == {"error"}
    found = json.loads(dpsynth(bad_records, "check", "--json", "--show-curator").stdout)
    assert found["error"] == hidden["error"] and found["error"]["exit_code"] == 5
    assert found["findings"] == 2 and found["where"].endswith("curator/check.json")
    assert [record["name"] for record in found["bad"]] == ["image 1", "image 2"]


def test_an_unreadable_source_is_explained_to_the_curator_who_asks(bad_records: Path) -> None:
    (bad_records / "secret-records.npz").write_bytes(b"no archive")
    shown = dpsynth(bad_records, "check", "--show-curator")
    assert shown.returncode == 5
    assert shown.stdout.startswith("(source): ")


SPY = """
import json
import dpsynth.commands._chain as chain
def carry_out(verified, engine):
    print(json.dumps(vars(engine())))
    raise SystemExit(0)
chain.carry_out = carry_out
"""


def test_run_takes_the_engine_settings_of_train(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    typed = ("--physical-batch", "7", "--precision", "bfloat16", "--exact-sums")
    done = dpsynth(tmp_path, "run", *typed, code=SPY)
    assert done.returncode == 0, done.stderr
    given = json.loads(done.stdout)
    assert given == {"physical": 7, "precision": "bfloat16", "exact_sums": True}
    plain = json.loads(dpsynth(tmp_path, "run", code=SPY).stdout)
    assert plain == {"physical": None, "precision": "float32", "exact_sums": False}


def test_the_chain_trains_with_the_engine_settings_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dpsynth.commands import _chain
    from dpsynth.private import dpsgd
    from dpsynth.private.engine import EngineSettings

    seen = []
    monkeypatch.setattr(dpsgd, "train", lambda verified, **given: seen.append((verified, given)))
    engine = EngineSettings(physical=3)
    dict(_chain._steps(lambda: engine))["train"]("a verified plan")
    assert seen == [("a verified plan", {"engine": engine})]
