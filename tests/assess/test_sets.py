"""Any two image sets by one ruler: what a run reports, what leaves the curator, what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpsynth.artifacts.nonprivate import reference_stamps
from dpsynth.artifacts.samples import write_samples
from dpsynth.assess import sets as module
from dpsynth.assess.evaluate import evaluate
from dpsynth.assess.sets import compare_sets, evaluate_in_public
from dpsynth.errors import DataError, MissingError, UsageError
from dpsynth.models import lenet
from dpsynth.planning.verify import VerifiedPlan, load_verified, make_run

Compared = tuple[Path, dict[str, Any]]
CLASSES = [str(i) for i in range(10)]
PLAN = """
version: 1
name: sets
budget: {epsilon: 3, delta: 1e-5}
private:
  source: {kind: npz, path: train.npz}
  capacity: 400
  image: {height: 8, width: 8}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {by: source, source: {kind: npz, path: test.npz}}
public:
  - {kind: letters, count: 200}
representation: {kind: pca, code: 8}
stages: {moments: {}}
"""


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lenet, "LEAST_STEPS", 4)
        patch.setattr("dpsynth.assess.domain.STEPS", 4)
        patch.setattr(module, "PROBE_EPOCHS", 1)
        patch.setattr(module, "FEATURE_EPOCHS", 1)
        patch.setattr("dpsynth.assess.imagesets.LETTERS", 200)
        patch.setattr("torch.hub.get_dir", lambda: "/nowhere")
        yield


def saved(folder: Path) -> Path:
    """train.npz (400 digits), test.npz (300) and samples.npz (250)."""
    data = load_digits()
    images = (data.images[..., None] * 15.9).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    parts = {"train": slice(400), "test": slice(400, 700), "samples": slice(700, 950)}
    for name, part in parts.items():
        chosen = order[part]
        np.savez(folder / f"{name}.npz", images=images[chosen], labels=data.target[chosen])
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """The three sets compared once, by a private reference."""
    folder = saved(tmp_path_factory.mktemp("compared"))
    return folder, compare(folder)


def compare(folder: Path, **options: Any) -> dict[str, Any]:
    given = {"train_reference": folder / "train.npz"} | options
    return compare_sets(folder / "samples.npz", folder / "test.npz", folder / "out", **given)


def test_the_ruler_is_the_one_of_runs(folder: Path, compared: Compared) -> None:
    (folder / "plan.yaml").write_text(PLAN + "evaluation: {probe_epochs: 1, feature_epochs: 1}\n")
    verified = make_run(folder / "plan.yaml", folder / "run")
    data = np.load(folder / "samples.npz")
    samples = verified.run.released / "samples"
    write_samples(samples, data["images"], data["labels"], CLASSES)
    ours = evaluate(load_verified(folder / "run"))
    other = compared[1]
    for name in ("accuracy", "frechet", "precision", "recall", "density", "coverage", "kernel",
                 "label_consistency", "diversity"):  # fmt: skip
        for part in ("synthetic", "ceiling", "interval"):
            assert other[name][part] == ours[name][part], (name, part)
    assert other["features"]["name"] == ours["features"]["name"]
    assert other["copies"]["verdict"] == ours["copies"]["verdict"]


def test_a_private_reference_stays_with_the_curator(compared: Compared) -> None:
    folder, report = compared
    assert report["room"] == "curator" and "curator-only" in report["who_may_see_it"]
    written = [path for path in (folder / "out").rglob("*") if path.is_file()]
    assert {path.name for path in written} == {"evaluation.json", "evaluation.png", "copies.png"}
    assert [path.name for path in written if path.stat().st_mode & 0o077] == []
    assert (folder / "out").stat().st_mode & 0o777 == 0o700
    assert json.loads((folder / "out/evaluation.json").read_text()) == report
    assert "test.npz" not in json.dumps(report)
    room = folder / "runs/x/released"
    room.mkdir(parents=True)
    (folder / "runs/x/plan.lock.json").write_text("{}")
    for output in (room, room / "deep/er"):
        with pytest.raises(UsageError, match="released"):
            compare_sets(folder / "samples.npz", folder / "test.npz", output)
    assert list(room.iterdir()) == []


def test_no_report_enters_a_hand_out_by_another_name(folder: Path) -> None:
    room = folder / "runs/x/released"
    room.mkdir(parents=True)
    (folder / "runs/x/plan.lock.json").write_text("{}")
    received = folder / "received"
    received.mkdir()
    for name in ("plan.lock.json", "manifest.json"):
        (received / name).write_text("{}")
    (folder / "link").symlink_to(room)
    (folder / "deep").mkdir()
    (folder / "deep/link").symlink_to(received)
    (folder / "deep/released").symlink_to(folder / "out")
    (folder / "deep/plan.lock.json").write_text("{}")
    outputs = ("link", "link/new", "received", "received/public/new", "deep/link/new",
               "deep/released", "out/../runs/x/released", "runs/x/curator/../released")  # fmt: skip
    for output in outputs:
        for public in (False, True):
            with pytest.raises(UsageError, match="--output lies in"):
                compare_sets("absent", "absent", folder / output, public_reference=public)
    assert list(room.iterdir()) == [] and len(list(received.iterdir())) == 2
    with pytest.raises(MissingError):  # beside the rooms there is nothing to refuse
        compare_sets("absent", "absent", folder / "runs/x/curator/new")


def test_no_report_to_be_released_is_made_of_what_is_the_curators(folder: Path) -> None:
    stamp = reference_stamps("nonprivate")
    images = np.zeros((2, 8, 8, 1), np.uint8)
    write_samples(folder / "stamped", images, np.array([0, 1]), CLASSES, stamp=stamp)
    room = folder / "run" / "curator"
    room.mkdir(parents=True)
    (folder / "run" / "plan.lock.json").write_text("{}")
    (folder / "samples.npz").rename(room / "samples.npz")
    for samples in (folder / "stamped", room / "samples.npz"):
        with pytest.raises(UsageError, match="curator-only"):
            compare_sets(samples, folder / "test.npz", folder / "out", public_reference=True)
    assert not (folder / "out").exists()


def run_of(folder: Path, plan: str = PLAN) -> VerifiedPlan:
    (folder / "plan.yaml").write_text(plan)
    return make_run(folder / "plan.yaml", folder / "run")


def require_refused(verified: VerifiedPlan, **references: Any) -> None:
    given = {"reference": verified.run.root.parent / "samples.npz", **references}
    with pytest.raises(UsageError, match="not public") as caught:
        evaluate_in_public(verified, public_reference=True, **given)
    assert str(verified.run.root.parent) not in caught.value.message


def test_the_runs_own_records_are_no_public_reference(folder: Path) -> None:
    verified = run_of(folder)
    (folder / "link.npz").symlink_to("test.npz")
    (verified.run.curator / "x.npz").write_bytes((folder / "samples.npz").read_bytes())
    for path in ("test.npz", "train.npz", "link.npz", "run/../test.npz", "samples.npz,test.npz",
                 ".", "run/curator", "run/curator/x.npz"):  # fmt: skip
        require_refused(verified, reference=f"{folder}/{path}".replace(",", f",{folder}/"))
        require_refused(verified, train_reference=f"{folder}/{path}".replace(",", f",{folder}/"))
    assert list(verified.run.released.iterdir()) == []
    with pytest.raises(MissingError, match="no complete samples"):
        evaluate_in_public(verified, folder / "samples.npz", public_reference=True)
    (folder / "moved").mkdir()
    (folder / "train.npz").rename(folder / "moved/train.npz")
    np.savez(folder / "train.npz", images=np.zeros((1, 8, 8), np.uint8))
    moved = make_run(folder / "plan.yaml", folder / "run", private=folder / "moved/train.npz")
    for path in ("moved/train.npz", "train.npz", "test.npz", "moved"):
        require_refused(moved, reference=folder / path)


def test_records_of_a_folder_and_of_idx_files_are_no_public_reference(folder: Path) -> None:
    source = "{kind: npz, path: train.npz}"
    for name in ("images/cat/1.png", "a-images", "a-labels"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    verified = run_of(folder, PLAN.replace(source, "{kind: folder, path: images}"))
    for path in ("images", "images/cat", "images/cat/1.png"):
        require_refused(verified, reference=folder / path)
    idx = PLAN.replace(source, "{kind: idx, images: a-images, labels: a-labels}")
    verified = run_of(folder, idx)
    for path in ("a-images", "a-labels"):
        require_refused(verified, reference=folder / path)


def test_records_that_are_declared_public_may_be_a_public_reference(folder: Path) -> None:
    verified = run_of(folder, PLAN.replace("private:\n", "private:\n  public: true\n"))
    with pytest.raises(MissingError, match="no complete samples"):
        evaluate_in_public(verified, folder / "test.npz", public_reference=True)
    require_refused(verified, reference=verified.run.curator)


def test_a_public_reference_gives_a_report_that_may_be_released(folder: Path) -> None:
    report = compare(folder, public_reference=True)
    assert report["room"] == "public" and "may be released" in report["who_may_see_it"]
    assert (folder / "out/evaluation.json").stat().st_mode & 0o044


def test_every_measure_has_its_rows_and_an_interval(compared: Compared) -> None:
    _, report = compared
    found = {k: v for k, v in report.items() if isinstance(v, dict) and "synthetic" in v}
    assert {"accuracy", "frechet", "precision", "recall", "density", "coverage", "kernel",
            "label_consistency", "domain_rate", "diversity",
            "per_class_frechet"} <= set(found)  # fmt: skip
    for name, value in found.items():
        assert {"ceiling", "floor", "interval", "n"} <= set(value), name
        if value["interval"] is not None:
            low, high = value["interval"]
            about = value["interval_how"].get("estimate", value["synthetic"])
            assert low <= about <= high, name
            assert value["interval_how"]["level"] == 0.95
    for name in ("accuracy", "frechet", "precision", "recall", "density", "coverage", "kernel"):
        assert found[name]["interval"] is not None, name
    rows = report["accuracy"]["classes"]
    assert [row["class"] for row in rows] == CLASSES and sum(row["count"] for row in rows) == 300
    counts = np.array(report["accuracy"]["confusion"]["counts"])
    assert counts.sum() == 3 * 300
    assert np.trace(counts) / counts.sum() == pytest.approx(report["accuracy"]["synthetic"])
    assert report["findings"] == len(found) + 1  # and the copy check


def test_halves_of_the_reference_stand_in_for_training_records(folder: Path) -> None:
    report = compare(folder, train_reference=None)
    assert any("split in two" in note for note in report["notes"]) and "copies" not in report
    sizes = {name: entry["count"] for name, entry in report["sets"].items()}
    assert sizes["reference"] + sizes["train_reference"] == 300 and sizes["samples"] == 250


def test_records_in_both_references_are_told(folder: Path) -> None:
    report = compare(folder, train_reference=folder / "test.npz")
    assert any(
        note.startswith("300 training records lie in the reference") for note in report["notes"]
    )


def test_without_labels_what_needs_none_is_measured(folder: Path) -> None:
    for name in ("train", "test", "samples"):
        images = np.load(folder / f"{name}.npz")["images"]
        np.savez(folder / f"{name}.npz", images=images)
    report = compare(folder)
    assert "accuracy" not in report and "label_consistency" not in report
    assert "letters" in report["features"]["name"]
    assert report["precision"]["synthetic"] > report["precision"]["floor"]
    assert report["per_class_frechet"]["synthetic"] is None
    assert any("labels" in note for note in report["notes"])


def test_one_labelled_reference_is_not_enough(folder: Path) -> None:
    np.savez(folder / "train.npz", images=np.load(folder / "train.npz")["images"])
    with pytest.raises(DataError, match="labels"):
        compare(folder)


def test_labels_that_the_reference_lacks_are_refused(folder: Path) -> None:
    data = np.load(folder / "samples.npz")
    np.savez(folder / "samples.npz", images=data["images"], labels=data["labels"] + 5)
    with pytest.raises(DataError, match="5 labels that the reference lacks"):
        compare(folder)


def test_samples_of_another_size_are_resized_and_told(folder: Path) -> None:
    data = np.load(folder / "samples.npz")
    images = data["images"].repeat(2, axis=1).repeat(2, axis=2).repeat(3, axis=3)
    np.savez(folder / "samples.npz", images=images, labels=data["labels"])
    report = compare(folder)
    assert report["sets"]["samples"]["resized"] == len(images)
    assert report["sets"]["samples"]["shape"] == [8, 8, 1]
    assert "Lanczos" in report["protocol"]["sizes"]


def test_a_copied_training_record_is_found(folder: Path) -> None:
    train, samples = np.load(folder / "train.npz"), np.load(folder / "samples.npz")
    images = samples["images"].copy()
    images[7] = train["images"][3]
    np.savez(folder / "samples.npz", images=images, labels=samples["labels"])
    assert compare(folder)["copies"]["verdict"] == "copies"


@pytest.mark.parametrize("counts", [(1, 1, 1), (12, 9, 7)])
def test_a_handful_of_images_is_refused_or_doubted(folder: Path, counts: tuple[int, ...]) -> None:
    for name, count in zip(("samples", "test", "train"), counts, strict=True):
        data = np.load(folder / f"{name}.npz")
        np.savez(folder / f"{name}.npz", images=data["images"][:count], labels=np.arange(count) % 2)
    report = compare(folder)
    assert report["frechet"]["synthetic"] is None and report["accuracy"]["synthetic"] is not None
    assert (report["precision"]["synthetic"] is None) is (min(counts) < 4)
    assert (report["density"]["synthetic"] is None) is (min(counts) < 6)
    assert any("no Frechet distance" in note for note in report["notes"])
    assert any("accuracy from" in note for note in report["notes"])
    low, high = report["accuracy"]["interval"]
    assert high - low > 0.2
