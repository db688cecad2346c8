"""A charged evaluation from the samples to the hand-out, and what happens when it goes wrong."""

import json
import shutil
import sys
from typing import ClassVar

import numpy as np
import pytest
from evaluationkit import CLASSES, HELD, PLAN, TRAIN, copied, planned, records

import dpsynth.private.confusion as stage
from dpsynth.artifacts.confusion import NAME, load_confusion
from dpsynth.artifacts.samples import content_digest, read_samples
from dpsynth.artifacts.spending import Spender, close_run
from dpsynth.errors import BudgetError, DpsynthError, MissingError, PlanError, UsageError
from dpsynth.models import lenet
from dpsynth.planning.replay import replay
from dpsynth.planning.steps import status
from dpsynth.planning.verify import make_run
from dpsynth.private.confusion import release_evaluation
from dpsynth.private.dpsgd import train
from dpsynth.released.handout import hand_out
from dpsynth.released.probe import trained_probe
from dpsynth.released.sampling import sample


class Opened:
    """What the audit hook saw: for each look at held-out records, the last line's mechanism."""

    run = None
    seen: ClassVar[list[str]] = []


def watch(event, given):
    if event == "open" and Opened.run and str(given[0]).endswith("test.npz"):
        last = json.loads((Opened.run.transcript).read_text().splitlines()[-1])
        Opened.seen.append(f"{last['kind']} {last.get('mechanism', '')}")


sys.addaudithook(watch)  # cannot be taken away; it looks at nothing while `Opened.run` is None


@pytest.fixture(scope="module", autouse=True)
def few_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lenet, "LEAST_STEPS", 2)
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that trained and sampled, and is still open."""
    verified = planned(tmp_path_factory.mktemp("begun"), training=TRAIN)
    with pytest.raises(MissingError, match="train stage comes first"):
        release_evaluation(verified)
    train(verified)
    with pytest.raises(MissingError, match="samples come first"):
        release_evaluation(verified)
    sample(verified)
    state = status(verified.run)
    assert not state.state.closed
    assert state.next_command.startswith("dpsynth release-evaluation")
    return verified


def exact(verified):
    """Counts by another way: all at once, of the arrays themselves."""
    with np.load(verified.run.root.parent / "test.npz") as held:
        images, labels = held["images"][..., None], held["labels"]
    answers = lenet.predict(trained_probe(verified).net, images)
    found = np.zeros((len(CLASSES), len(CLASSES)))
    np.add.at(found, (labels, answers), 1)
    return found


@pytest.fixture(scope="module")
def released(begun, tmp_path_factory):
    verified = copied(begun, tmp_path_factory.mktemp("released"))
    Opened.run, Opened.seen = verified.run, []
    try:
        found = release_evaluation(verified)
    finally:
        Opened.run = None
    return verified, found, list(Opened.seen)


def test_held_out_records_are_opened_once_the_charge_is_on_disk(released):
    assert released[2]
    assert set(released[2]) == {"charge confusion"}


def test_the_matrix_is_the_truth_and_its_noise(released):
    verified, found, _ = released
    matrix, truth = load_confusion(verified.run.released / NAME), exact(verified)
    off = (matrix.cells - truth).reshape(-1)
    assert np.abs(off).max() < 6 * matrix.cell_std
    assert off.std() == pytest.approx(matrix.cell_std, rel=0.35)
    assert len({*off.tolist()}) == off.size
    assert abs(matrix.total - HELD) < 6 * matrix.total_std
    slot = verified.lock.slots[-1]
    assert matrix.cell_std == pytest.approx(slot.noise_std / slot.statistic.cell)
    share = np.trace(truth) / HELD
    assert found["accuracy"]["low"] - 0.1 < share < found["accuracy"]["high"] + 0.1


def test_what_is_said_is_what_is_released(released):
    verified, found, _ = released
    folder = verified.run.released
    written = json.loads((folder / "evaluation.json").read_text())
    assert found == {"released": NAME, "slots": ["confusion"], **written}
    assert found["samples"] == {"count": 110, "sha256": content_digest(folder / "samples")}
    assert found["per_class"][-1]["recall"]["value"] is None  # a class that nobody is of
    card = (folder / "card.md").read_text()
    assert "trained on `samples/` alone (110 images)" in card
    for name in (NAME, "evaluation.json", "confusion.png"):
        assert f"- `{name}`:" in card
        assert name in json.loads((folder / "manifest.json").read_text())["files"]


def test_the_run_is_closed_and_replays(released):
    verified = released[0]
    report = replay(verified.run.released)
    assert report.runs[0].closed
    assert report.epsilon <= 9.0
    assert report.runs[0].rows[-1].mechanism == "evaluation: confusion-matrix"
    assert [step.done for step in status(verified.run).steps if step.name != "evaluate"]
    with pytest.raises(BudgetError, match="released already"):
        release_evaluation(verified)


def test_samples_drawn_anew_are_not_passed_off_as_the_evaluated_ones(released, tmp_path):
    verified = copied(released[0], tmp_path)
    sample(verified, count=20)
    assert "not those in here" in (verified.run.released / "card.md").read_text()
    assert replay(verified.run.released).ok


def test_noise_is_fresh_for_each_run(begun, released, tmp_path):
    verified = copied(begun, tmp_path)
    release_evaluation(verified)
    first, second = (
        load_confusion(one.run.released / NAME).cells for one in (released[0], verified)
    )
    assert not (first == second).any()


@pytest.mark.parametrize("where", ["exact_matrix", "save_confusion", "settle"])
def test_a_crash_costs_the_charge_and_nothing_else(begun, tmp_path, monkeypatch, where):
    verified = copied(begun, tmp_path)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((Spender, where) if where == "settle" else (stage, where)), crash)
        with pytest.raises(KeyboardInterrupt):
            release_evaluation(verified)
    assert (verified.run.released / NAME).is_file() is (where == "settle")
    with pytest.raises(BudgetError, match="no slot of confusion is left"):
        release_evaluation(verified)
    after = status(verified.run)
    assert after.next_command.startswith("dpsynth close")
    close_run(verified.run, verified.lock)
    assert not (verified.run.released / NAME).exists()
    hand_out(verified.run)
    assert "Charged evaluation" not in (verified.run.released / "card.md").read_text()
    report = replay(verified.run.released)
    assert (report.runs[0].charges, report.runs[0].forfeited) == (4, 1)
    with pytest.raises(BudgetError):
        release_evaluation(verified)


def test_a_crash_before_the_last_line_is_mended_by_closing(begun, tmp_path, monkeypatch):
    verified = copied(begun, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Spender, "close", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            release_evaluation(verified)
    assert status(verified.run).next_command.startswith("dpsynth close")
    close_run(verified.run, verified.lock)
    hand_out(verified.run)
    assert (verified.run.released / "evaluation.json").is_file()
    assert replay(verified.run.released).ok


def empty(images, labels):
    return {"images": images[:0], "labels": labels[:0]}


def undeclared(images, labels):
    return {"images": images, "labels": labels + 90}


@pytest.mark.parametrize("change", [empty, undeclared])
def test_a_side_without_usable_records_is_released_like_any_other(begun, tmp_path, change):
    verified = copied(begun, tmp_path)
    with np.load(tmp_path / "test.npz") as held:
        arrays = change(held["images"], held["labels"])
    np.savez(tmp_path / "test.npz", **arrays)
    found = release_evaluation(verified)
    matrix = load_confusion(verified.run.released / NAME)
    assert np.abs(matrix.cells).max() < 6 * matrix.cell_std
    assert np.abs(matrix.cells).min() > 0
    assert abs(found["records"]["value"]) < 6 * found["records"]["error"]


def test_files_that_are_gone_cost_nothing(begun, tmp_path):
    verified = copied(begun, tmp_path)
    (tmp_path / "test.npz").unlink()
    with pytest.raises(MissingError, match="nothing was charged") as found:
        release_evaluation(verified)
    assert str(tmp_path / "test.npz") not in found.value.message + found.value.hint
    assert len(status(verified.run).state.charged) == 3


def test_a_probe_that_did_not_learn_costs_nothing(begun, tmp_path, monkeypatch):
    import torch

    verified = copied(begun, tmp_path)

    def diverged(*_, **__):
        net = lenet.LeNet(len(CLASSES))
        with torch.no_grad():
            net.head.weight.fill_(torch.nan)
        return net

    monkeypatch.setattr("dpsynth.released.probe.train_probe", diverged)
    with pytest.raises(UsageError, match="not finite"):
        release_evaluation(verified)
    assert len(status(verified.run).state.charged) == 3


def test_damaged_samples_cost_nothing(begun, tmp_path):
    verified = copied(begun, tmp_path)
    image = next((verified.run.released / "samples" / "images").glob("*.png"))
    image.write_bytes(b"no picture")
    with pytest.raises(DpsynthError):
        release_evaluation(verified)
    assert len(status(verified.run).state.charged) == 3


def test_units_of_several_images_are_bounded_from_plan_to_card(tmp_path):
    unit = ", unit: {column: owner, most: 3}"
    verified = planned(tmp_path, held_out="{{by: hash, fraction: 0.4}}", unit=unit)
    sample(verified)
    release_evaluation(verified)
    matrix = load_confusion(verified.run.released / NAME)
    # About 40 owners of three counted images each, whose sum counts for one image or little more.
    assert matrix.total + 5 * matrix.total_std > 10
    assert matrix.total - 5 * matrix.total_std < 100
    assert "Sampling errors take images for independent" in (
        (verified.run.released / "card.md").read_text()
    )
    assert replay(verified.run.released).ok


def test_a_plan_without_the_stage_says_so(tmp_path):
    images, labels = records()
    np.savez(tmp_path / "train.npz", images=images[:50], labels=labels[:50])
    text = PLAN.format(
        folder=tmp_path, classes=json.dumps(CLASSES), unit="", train="",
        held_out="{by: hash, fraction: 0.2}",
    )  # fmt: skip
    (tmp_path / "plan.yaml").write_text(text.replace("  evaluation: {weight: 1.0}\n", ""))
    with pytest.raises(PlanError, match="no evaluation stage"):
        release_evaluation(make_run(tmp_path / "plan.yaml", tmp_path / "run"))


def test_the_digest_of_samples_is_of_all_they_hold(released, tmp_path):
    folder = tmp_path / "samples"
    shutil.copytree(released[0].run.released / "samples", folder)
    before = content_digest(folder)
    assert before == released[1]["samples"]["sha256"]
    images = sorted((folder / "images").glob("*.png"))
    images[0].write_bytes(images[1].read_bytes())
    assert content_digest(folder) != before
    assert len(read_samples(folder, CLASSES)[0]) == 110
