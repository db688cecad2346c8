"""`check` on units of several images: bad values are found, large units are told to the curator."""

import os

import numpy as np
import pytest

from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.assess.check import check, require_checked
from dpsynth.errors import DataError, UsageError
from dpsynth.planning import verify
from dpsynth.planning.schema import Plan


def verified_plan(root, units, *, unit=None, capacity=100, held_out=None):
    n = len(units)
    images = np.random.default_rng(0).integers(0, 256, (n, 4, 3), dtype=np.uint8)
    np.savez(root / "data.npz", images=images, labels=np.arange(n) % 2, patient=units)
    plan = Plan.model_validate(
        {
            "name": "small",
            "budget": {
                "epsilon": 1.0,
                "delta": 1e-5,
                "unit": unit or {"column": "patient", "most": 3},
            },
            "private": {
                "source": {"kind": "npz", "path": root / "data.npz"},
                "capacity": capacity,
                "image": {"height": 4, "width": 3},
                "classes": ["cat", "dog"],
                "held_out": held_out or {"by": "hash", "fraction": 1e-9},
            },
            "public": [{"kind": "letters"}],
            "representation": {"kind": "pca", "code": 4},
            "stages": {"moments": {}},
        }
    )
    return verify.VerifiedPlan(plan, None, RunDir.create(root / "run"), verify._KEY)


UNITS = np.array(["secret-1"] * 5 + ["secret-2"] * 3 + ["secret-3"] * 4 + ["secret-4"])


def test_units_are_counted_and_large_ones_told_to_the_curator(tmp_path, capfd):
    verified = verified_plan(tmp_path, UNITS)
    shown = check(verified)
    found = read_json(verified.run.curator / "check.json")
    assert found["counts"]["train"] == 13  # records, as ever
    assert found["units"]["train"] == {"count": 4, "over": 2, "most_images": 5}
    assert found["units"]["held_out"] == {"count": 0, "over": 0, "most_images": 0}
    assert "2 training units have more than 3 images" in found["notes"][0]
    assert shown["units"] == found["units"]
    said = "".join(capfd.readouterr()) + str(found)
    assert "secret" not in said


def test_the_capacity_is_one_of_units(tmp_path):
    verified = verified_plan(tmp_path, UNITS, capacity=4)
    assert not any("capacity" in note for note in check(verified)["notes"])
    verified = verified_plan(tmp_path, UNITS, capacity=3)
    assert "4 training units, more than the declared capacity 3" in check(verified)["notes"]


def test_a_record_without_a_unit_is_bad(tmp_path):
    verified = verified_plan(tmp_path, np.array(["a", "", "b"]))
    with pytest.raises(DataError, match="1 record does not fit"):
        check(verified)
    (bad,) = read_json(verified.run.curator / "check.json")["bad"]
    assert bad == {"name": "image 1", "reason": "no value in patient"}


def test_another_unit_makes_the_check_stale(tmp_path):
    check(verified_plan(tmp_path, UNITS))
    require_checked(verified_plan_again(tmp_path, {"column": "patient", "most": 3}))
    for other in ({"column": "patient", "most": 2}, "record"):
        with pytest.raises(UsageError, match="changed since"):
            require_checked(verified_plan_again(tmp_path, other))


def verified_plan_again(root, unit):
    """The same files under a plan of another unit."""
    before = (root / "data.npz").stat()
    data = (root / "data.npz").read_bytes()
    verified = verified_plan(root, UNITS, unit=unit)
    (root / "data.npz").write_bytes(data)

    os.utime(root / "data.npz", ns=(before.st_atime_ns, before.st_mtime_ns))
    return verified


def test_a_plan_of_records_reports_no_units(tmp_path):
    verified = verified_plan(tmp_path, UNITS, unit="record")
    assert "units" not in check(verified)
    assert "units" not in read_json(verified.run.curator / "check.json")


def test_held_out_records_of_another_source_are_no_units(tmp_path):
    np.savez(
        tmp_path / "test.npz", images=np.zeros((5, 4, 3), np.uint8), labels=np.zeros(5, np.int64)
    )
    other = {"by": "source", "source": {"kind": "npz", "path": tmp_path / "test.npz"}}
    found = check(verified_plan(tmp_path, UNITS, held_out=other))
    assert found["counts"] == {"train": 13, "held_out": 5}
    assert list(found["units"]) == ["train"]
