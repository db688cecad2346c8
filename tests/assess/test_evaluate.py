"""The whole evaluation on scikit-learn's real digits, with short training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpsynth.artifacts.samples import write_samples
from dpsynth.assess import copies as copies_module
from dpsynth.assess import features as feature_module
from dpsynth.assess import measured as module
from dpsynth.assess import probes as probe_module
from dpsynth.assess.evaluate import evaluate
from dpsynth.assess.sets import evaluate_in_public
from dpsynth.errors import DataError, MissingError, UsageError
from dpsynth.models import lenet
from dpsynth.planning.steps import status
from dpsynth.planning.verify import VerifiedPlan, load_verified, make_run

CLASSES = [str(i) for i in range(10)]
PLAN = """
version: 1
name: look
budget: {epsilon: 3, delta: 1e-5}
private:
  source: {kind: npz, path: digits.npz}
  capacity: 1400
  image: {height: 8, width: 8}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {by: hash, fraction: 0.3}
public:
  - {kind: letters, count: 200}
representation: {kind: pca, code: 8}
stages: {moments: {}}
evaluation: {probe_epochs: 1, feature_epochs: 1}
"""


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return (data.images[..., None] * 15.9).astype(np.uint8), data.target.astype(np.int64)


def save_private(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    np.savez(folder / "digits.npz", images=images, labels=labels)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(lenet, "LEAST_STEPS", 4)
    monkeypatch.setattr("dpsynth.assess.domain.STEPS", 4)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "no-hub"))
    yield


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every LeNet that is trained."""
    seen: list[int] = []
    original = lenet.train_probe

    def counted(*args: Any, **kwargs: Any) -> lenet.LeNet:
        seen.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(probe_module, "train_probe", counted)
    monkeypatch.setattr(feature_module.lenet, "train_probe", counted)
    return seen


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("look")
    save_private(folder, *digits())
    (folder / "plan.yaml").write_text(PLAN)
    make_run(folder / "plan.yaml", folder / "run")
    return folder


@pytest.fixture
def verified(planned: Path) -> VerifiedPlan:
    save_private(planned, *digits())
    return load_verified(planned / "run")


def put(verified: VerifiedPlan, images: np.ndarray, labels: np.ndarray) -> None:
    write_samples(verified.run.released / "samples", images, labels, CLASSES)


def test_real_digits_as_samples_reach_the_ceiling(
    verified: VerifiedPlan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lenet, "LEAST_STEPS", 60)
    images, labels = digits()
    put(verified, images[:1000], labels[:1000])
    before = set(verified.run.released.rglob("*"))
    report = evaluate(verified)
    accuracy, frechet = report["accuracy"], report["frechet"]
    assert accuracy["chance"] == 0.1 and 0.1 <= accuracy["floor"] < 0.13
    assert accuracy["synthetic"] > accuracy["floor"] + 0.2
    assert abs(accuracy["synthetic"] - accuracy["ceiling"]) < 0.1
    assert frechet["synthetic"] < 0.2 * frechet["floor"]
    assert frechet["relative"] == frechet["synthetic"] / frechet["floor"]
    for name in ("precision", "recall"):
        assert report[name]["synthetic"] > report[name]["floor"]
        assert report[name]["ceiling"] > 0.7
    assert report["classes"] == CLASSES
    assert report["features"]["n_synthetic"] == 1000 and "lenet-84" in report["features"]["name"]
    # FID is blank, never guessed, and the terminal says why.
    assert report["inception"]["fid"] is None and "blank" in capsys.readouterr().err
    # Curator-only: nothing new in the room that is handed out.
    assert set(verified.run.released.rglob("*")) == before
    written = json.loads((verified.run.curator / "evaluation.json").read_text())
    assert written == report and written["room"] == "curator"
    assert Path(report["sheet"]).read_bytes().startswith(b"\x89PNG")
    assert (verified.run.curator.stat().st_mode & 0o777) == 0o700
    written = [path for path in verified.run.curator.rglob("*") if path.is_file()]
    assert [path.name for path in written if path.stat().st_mode & 0o077] == []


@pytest.fixture
def augmenting(tmp_path: Path) -> VerifiedPlan:
    save_private(tmp_path, *digits())
    (tmp_path / "plan.yaml").write_text(PLAN + "sampling: {augment: {}}\n")
    return make_run(tmp_path / "plan.yaml", tmp_path / "run")


def test_an_augmenting_plan_is_measured_with_and_without(augmenting: VerifiedPlan) -> None:
    def evaluated() -> bool:
        step = status(augmenting.run).step("evaluate")
        assert step is not None
        return step.done

    images, labels = digits()
    curator = augmenting.run.curator
    put(augmenting, images[:200], labels[:200])
    with pytest.raises(MissingError):  # both are needed
        evaluate(augmenting)
    plain = augmenting.run.released / "samples-plain"
    write_samples(plain, images[200:440], labels[200:440], CLASSES)
    alone = evaluate(augmenting, model="plain")
    assert "plain" not in alone["accuracy"] and not evaluated()
    report = evaluate(augmenting)
    assert evaluated()
    for key in ("accuracy", "frechet", "precision", "recall"):
        assert report[key]["plain"] == alone[key]["synthetic"]
        assert report[key]["plain"] != report[key]["synthetic"]
    assert report["samples"]["count"] == 200 and report["samples_plain"]["count"] == 240
    assert report["findings"] == 2 * alone["findings"]
    assert json.loads((curator / "evaluation.json").read_text()) == report
    assert json.loads((curator / "evaluation-plain.json").read_text()) == alone
    assert (curator / "evaluation-plain.png").is_file()
    write_samples(plain, images[:240], labels[:240], CLASSES)
    assert not evaluated()  # of other samples than those that are there


def test_a_declared_public_run_closes_the_curators_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may be shown; who shares them still does so by hand."""
    seen: list[str] = []
    draw = copies_module.side_by_side

    def drawn(*given: Any) -> Path:
        seen.append(given[3])
        return draw(*given)

    monkeypatch.setattr(copies_module, "side_by_side", drawn)
    save_private(tmp_path, *digits())
    plan = PLAN.replace("private:\n", "private:\n  public: true\n")
    (tmp_path / "plan.yaml").write_text(plan)
    public = make_run(tmp_path / "plan.yaml", tmp_path / "run")
    images, labels = digits()
    put(public, images[:300], labels[:300])
    report = evaluate(public)
    inside = list(public.run.curator.rglob("*"))
    assert {"copies.png", "evaluation.png", "cache"} <= {path.name for path in inside}
    assert [path.name for path in inside if path.stat().st_mode & 0o077] == []
    assert seen[0].startswith("look: closest pairs of the copy check; public\n")
    by_class = report["diversity"]["ceiling_by_class"]
    assert list(by_class) == CLASSES
    assert np.mean(list(by_class.values())) == pytest.approx(report["diversity"]["ceiling"])
    assert "more than 84 images" in report["per_class_frechet"]["note"]


def test_noise_falls_to_the_floor(verified: VerifiedPlan) -> None:
    rng = np.random.default_rng(0)
    put(verified, rng.integers(0, 256, (300, 8, 8, 1), dtype=np.uint8), np.arange(300) % 10)
    report = evaluate(verified)
    assert report["accuracy"]["synthetic"] < 0.3
    assert report["label_consistency"]["synthetic"] < 0.3
    assert report["label_consistency"]["floor"] == 0.1
    assert report["precision"]["synthetic"] < report["precision"]["ceiling"]


def test_repeated_evaluation_trains_only_on_the_samples(
    verified: VerifiedPlan, trained: list[int]
) -> None:
    images, labels = digits()
    put(verified, images[:200], labels[:200])
    first = evaluate(verified)
    trained.clear()
    assert evaluate(verified) == first
    assert len(trained) == len(probe_module.SEEDS)
    for path in (verified.run.curator / "cache").iterdir():
        path.write_bytes(b"damaged")
    trained.clear()
    assert evaluate(verified) == first
    assert len(trained) == 2 * len(probe_module.SEEDS) + 2


def test_data_changed_in_place_makes_the_cache_stale(
    verified: VerifiedPlan, planned: Path, trained: list[int]
) -> None:
    images, labels = digits()
    put(verified, images[:200], labels[:200])
    first = evaluate(verified)
    changed = images.copy()
    changed[:, 0, 0, 0] ^= 1
    save_private(planned, changed, labels)
    trained.clear()
    second = evaluate(verified)
    assert len(trained) == 2 * len(probe_module.SEEDS) + 2
    assert second["frechet"]["ceiling"] != first["frechet"]["ceiling"]


def test_an_absent_class_is_named_not_forgotten(verified: VerifiedPlan) -> None:
    images, labels = digits()
    kept = np.flatnonzero(labels != 3)[:300]
    put(verified, images[kept], labels[kept])
    report = evaluate(verified)
    assert report["samples"]["absent_classes"] == ["3"]
    assert report["accuracy"]["chance"] == 0.1
    assert any("3" in note for note in report["notes"])


def test_too_few_samples_leave_the_distance_blank(verified: VerifiedPlan) -> None:
    images, labels = digits()
    put(verified, images[:84], labels[:84])
    report = evaluate(verified)
    assert report["frechet"]["synthetic"] is None and report["frechet"]["relative"] is None
    assert report["precision"]["synthetic"] is not None
    assert any("at least 85 images" in note for note in report["notes"])


def test_without_samples_says_what_to_type(verified: VerifiedPlan) -> None:
    with pytest.raises(MissingError) as caught:
        evaluate(verified, model="nothing")
    assert "dpsynth sample" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["prior/../../released/samples-prior", "../x", "/x", ".", "", "a b", "A", "a\n"]
)
def test_a_model_is_a_plain_name_that_leads_nowhere(verified: VerifiedPlan, name: str) -> None:
    images, labels = digits()
    released = verified.run.released
    for folder in ("samples", "samples-prior", "samples-"):
        write_samples(released / folder, images[:100], labels[:100], CLASSES)
    before = set(verified.run.root.rglob("*"))
    with pytest.raises(UsageError, match="--model"):
        evaluate(verified, model=name)
    with pytest.raises(UsageError, match="--model"):
        evaluate_in_public(verified, "absent", model=name, public_reference=True)
    assert set(verified.run.root.rglob("*")) == before


def test_an_empty_side_is_a_data_error(verified: VerifiedPlan, planned: Path) -> None:
    images, labels = digits()
    put(verified, images[:10], labels[:10])
    save_private(planned, images[:0], labels[:0])
    with pytest.raises(DataError):
        evaluate(verified)


def test_progress_total_tells_no_true_count(
    verified: VerifiedPlan, planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = digits()
    put(verified, images[:100], labels[:100])
    totals: list[Any] = []
    original = module.progress
    monkeypatch.setattr(
        module, "progress", lambda text, total=None: (totals.append(total), original(text))[1]
    )
    evaluate(verified)
    whole = totals.copy()
    save_private(planned, images[:900], labels[:900])
    evaluate(verified)
    assert len(whole) >= 4 and totals[len(whole) :] == whole
