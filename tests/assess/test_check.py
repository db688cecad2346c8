"""`check`: bad records end in exit 5; names and counts stay in the curator room."""

import io
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.assess.check import check, ensure_checked, require_checked
from dpsynth.errors import DataError, UsageError
from dpsynth.planning import verify
from dpsynth.planning.schema import Plan


def png(seed: int) -> bytes:
    file = io.BytesIO()
    image = np.random.default_rng(seed).integers(0, 256, (4, 3), dtype=np.uint8)
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def folder(root: Path, n: int = 20) -> Path:
    for number in range(n):
        path = root / "private" / "cat-dog"[4 * (number % 2) :][:3] / f"patient-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return root / "private"


def verified_plan(path: Path, run: Path, *, capacity: int = 100, public: bool = False):
    plan = Plan.model_validate(
        {
            "name": "small",
            "budget": {"epsilon": 1.0, "delta": 1e-5},
            "private": {
                "source": {"kind": "folder", "path": path},
                "capacity": capacity,
                "image": {"height": 4, "width": 3},
                "classes": ["cat", "dog"],
                "held_out": {"by": "hash", "fraction": 0.3, "salt": ""},
                "public": public,
            },
            "public": [{"kind": "letters"}],
            "representation": {"kind": "pca", "code": 4},
            "stages": {"moments": {}},
        }
    )
    # Without a transcript the lock is never looked at.
    return verify.VerifiedPlan(plan, None, RunDir.create(run), verify._KEY)


def report(verified) -> dict:
    return read_json(verified.run.curator / "check.json")


def test_sound_records_pass_and_counts_stay_with_the_curator(tmp_path, capfd):
    verified = verified_plan(folder(tmp_path), tmp_path / "run")
    shown = check(verified)
    assert shown["findings"] == 0 and shown["ignored"] == 0
    found = report(verified)
    assert found["ok"] is True and sum(found["counts"].values()) == 20
    assert found["classes"]["train"].keys() == {"cat", "dog"}
    out, err = capfd.readouterr()
    assert out == "" and "20" not in err and "patient" not in err
    curator = verified.run.curator
    assert stat.S_IMODE(curator.stat().st_mode) == 0o700
    assert stat.S_IMODE((curator / "check.json").stat().st_mode) & 0o077 == 0


def test_a_caller_gets_the_counts_of_the_report(tmp_path):
    verified = verified_plan(folder(tmp_path), tmp_path / "run", public=True)
    found = check(verified)
    assert sum(found["counts"].values()) == 20
    assert {key: report(verified)[key] for key in ("counts", "classes")} == {
        key: found[key] for key in ("counts", "classes")
    }


def test_bad_records_are_counted_aloud_and_named_in_the_curator_room(tmp_path, capfd):
    path = folder(tmp_path)
    (path / "cat/patient-broken.png").write_bytes(b"no image")
    (path / "cow").mkdir()
    (path / "cow/patient-cow.png").write_bytes(png(1))
    (path / "dog/patient-link.png").symlink_to("/etc/hostname")
    verified = verified_plan(path, tmp_path / "run")
    with pytest.raises(DataError, match="3 records do not fit the plan") as caught:
        check(verified)
    said = caught.value.message + caught.value.hint + "".join(capfd.readouterr())
    assert caught.value.exit_code == 5
    assert "patient" not in said and "cow" not in said
    names = {row["name"]: row["reason"] for row in report(verified)["bad"]}
    assert set(names) == {
        "cat/patient-broken.png",
        "cow/patient-cow.png",
        "dog/patient-link.png",
    }
    with pytest.raises(DataError):
        require_checked(verified)
    for name in names:
        (path / name).unlink()
    with pytest.raises(UsageError, match="changed"):
        require_checked(verified)
    ensure_checked(verified)
    require_checked(verified)


def test_an_unreadable_source_is_explained_in_the_curator_room(tmp_path):
    path = tmp_path / "secret.zip"
    path.write_bytes(b"PK\x03\x04 and no more")
    verified = verified_plan(path, tmp_path / "run")
    with pytest.raises(DataError) as caught:
        check(verified)
    assert "secret" not in caught.value.message
    assert report(verified)["ok"] is False
    assert "BadZipFile" in report(verified)["bad"][0]["reason"]


@pytest.mark.parametrize("make_empty", [lambda path: path.mkdir(), lambda path: None])
def test_an_empty_or_absent_folder_fails(make_empty, tmp_path):
    make_empty(tmp_path / "none")
    verified = verified_plan(tmp_path / "none", tmp_path / "run")
    with pytest.raises(DataError):
        check(verified)


def test_hidden_files_are_ignored_with_a_notice(tmp_path, capfd):
    path = folder(tmp_path)
    (path / ".DS_Store").write_bytes(b"x")
    (path / "cat/Thumbs.db").write_bytes(b"x")
    verified = verified_plan(path, tmp_path / "run")
    assert check(verified)["ignored"] == 2
    assert "2 hidden or foreign files were ignored" in capfd.readouterr().err
    assert sorted(report(verified)["ignored"]) == [".DS_Store", "cat/Thumbs.db"]


def test_more_records_than_the_capacity_is_a_note_for_the_curator_alone(tmp_path, capfd):
    verified = verified_plan(folder(tmp_path), tmp_path / "run", capacity=5)
    check(verified)
    assert "capacity" not in "".join(capfd.readouterr())
    assert "more than the declared capacity 5" in report(verified)["notes"][0]


def test_spending_needs_a_check_of_the_files_as_they_are(tmp_path):
    path = folder(tmp_path)
    verified = verified_plan(path, tmp_path / "run")
    with pytest.raises(UsageError, match="not checked yet") as caught:
        require_checked(verified)
    assert caught.value.hint == f"dpsynth check {tmp_path / 'run'}"
    check(verified)
    require_checked(verified)
    (path / "cat/patient-new.png").write_bytes(png(99))
    with pytest.raises(UsageError, match="changed since"):
        require_checked(verified)


def test_a_zip_is_checked_like_a_folder(tmp_path):
    path = folder(tmp_path)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for file in path.rglob("*.png"):
            archive.write(file, file.relative_to(tmp_path))
    verified = verified_plan(tmp_path / "data.zip", tmp_path / "run")
    check(verified)
    assert sum(report(verified)["counts"].values()) == 20


def test_report_is_the_only_file_written(tmp_path):
    verified = verified_plan(folder(tmp_path), tmp_path / "run")
    before = set(tmp_path.rglob("*"))
    check(verified)
    assert set(tmp_path.rglob("*")) - before == {verified.run.curator / "check.json"}
