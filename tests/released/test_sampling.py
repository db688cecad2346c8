"""Sampling: every route, balanced labels, fresh draws, resumption, and the contact sheet."""

import numpy as np
import pytest
import torch

from dpsynth.artifacts.files import read_json, write_json
from dpsynth.artifacts.samples import PLAIN, SamplesWriter, read_samples, read_summary
from dpsynth.errors import MissingError, ReplayError, UsageError
from dpsynth.models.finish import gradient_energy
from dpsynth.planning.sampling import Jitter
from dpsynth.planning.steps import status
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.pretrain import pretrain
from dpsynth.public.representation import load_representation
from dpsynth.released import sampling as module
from dpsynth.released.distill import distill
from dpsynth.released.finishing import Finish, finish_of
from dpsynth.released.sampling import MODELS, sample

CLASSES = ["zero", "one", "two"]


@pytest.fixture
def whole(with_model: VerifiedPlan) -> VerifiedPlan:
    distill(with_model)
    return with_model


@pytest.mark.parametrize("model", [name for name in MODELS if name != PLAIN])
def test_every_model_can_be_sampled(whole: VerifiedPlan, model: str) -> None:
    facts = sample(whole, 20, model)
    folder = whole.run.released / ("samples" if model == "model" else f"samples-{model}")
    assert facts["samples"] == str(folder)
    images, labels = read_samples(folder, CLASSES, (8, 8, 1))
    assert images.shape == (20, 8, 8, 1)
    assert np.bincount(labels, minlength=3).tolist() == [7, 7, 6]
    assert images.std() > 5
    name = "contact-sheet.png" if model == "model" else f"contact-sheet-{model}.png"
    assert (whole.run.released / name).exists()
    assert (whole.run.released / "manifest.json").exists()


def test_plan_count_and_fresh_draws(whole: VerifiedPlan) -> None:
    sample(whole)
    first, _ = read_samples(whole.run.released / "samples", CLASSES)
    assert len(first) == 30
    sample(whole)  # the same again: nothing to do
    again, _ = read_samples(whole.run.released / "samples", CLASSES)
    assert np.array_equal(first, again)
    sample(whole, 31)
    sample(whole, 30)
    other, _ = read_samples(whole.run.released / "samples", CLASSES)
    assert not np.array_equal(first, other)


def test_resumes_after_the_last_whole_shard(
    whole: VerifiedPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsynth.released.drawn.SHARD", 10)
    folder = whole.run.released / "samples-release"

    class StoppedError(Exception):
        pass

    calls = []

    def failing(images: np.ndarray, labels: np.ndarray) -> None:
        raise StoppedError

    real = SamplesWriter.add

    def counted(self: SamplesWriter, images: np.ndarray, labels: np.ndarray, *more: object) -> None:
        calls.append(len(images))
        if len(calls) == 2:
            failing(images, labels)
        real(self, images, labels, *more)

    monkeypatch.setattr(SamplesWriter, "add", counted)
    with pytest.raises(StoppedError):
        sample(whole, 25, "release")
    assert read_summary(folder) is None
    sample(whole, 25, "release")
    assert calls == [10, 10, 10, 5]
    images, labels = read_samples(folder, CLASSES)
    assert len(images) == 25
    assert labels.tolist() == [i % 3 for i in range(25)]


def test_wrong_requests(tiny: VerifiedPlan) -> None:
    with pytest.raises(UsageError, match="no model 'other'"):
        sample(tiny, 5, "other")
    with pytest.raises(UsageError, match="plain as they are"):
        sample(tiny, 5, PLAIN)
    with pytest.raises(UsageError, match="at least 1"):
        sample(tiny, 0)
    (tiny.run.released / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(MissingError) as error:
        sample(tiny, 5, "model")
    assert "dpsynth train" in error.value.hint


def test_generators_are_fresh() -> None:
    assert module.fresh_generator().initial_seed() != module.fresh_generator().initial_seed()


def sampled(verified: VerifiedPlan) -> bool:
    step = status(verified.run).step("sample")
    assert step is not None
    return step.done


def test_an_augmenting_plan_has_its_samples_plain_too(augmenting: VerifiedPlan) -> None:
    run = augmenting.run
    gain = read_json(run.calibration)["sharpen_gain"]
    assert gain > 0
    sample(augmenting, 30, "release")  # the plan's own by its name: alone
    assert not (run.released / "samples-plain").exists()
    assert not sampled(augmenting)
    facts = sample(augmenting)
    assert sampled(augmenting)
    assert facts["samples"] == str(run.released / "samples")
    assert facts["plain"]["samples"] == str(run.released / "samples-plain")
    assert (run.released / "contact-sheet-plain.png").is_file()
    moved, plain = (read_summary(run.released / name) for name in ("samples", "samples-plain"))
    assert moved is not None and plain is not None
    expected = {"rotation": 9.0, "scale": 0.05, "shift": 0.03}
    assert moved["origin"]["augment"] == expected
    assert moved["origin"]["sharpen"] == plain["origin"]["sharpen"] == gain
    assert "augment" not in plain["origin"] and plain["origin"]["model"] == "release"
    assert (moved["count"], plain["count"]) == (30, 30)
    card = (run.released / "card.md").read_text()
    assert card.count(f"sharpened by an unsharp mask of gain {gain:.3g}") == 2
    assert card.count("augmented: each image turned by up to 9 degrees") == 1
    assert "contact-sheet-plain.png" in card
    before = (run.released / "samples-plain/metadata.csv").stat().st_mtime_ns
    sample(augmenting)  # the same again: nothing to do
    assert (run.released / "samples-plain/metadata.csv").stat().st_mtime_ns == before


def test_finishing_sharpens_then_moves_and_rounds_once(augmenting: VerifiedPlan) -> None:
    space = load_representation(augmenting.run, augmenting.plan)
    codes = 0.5 * torch.randn(20, space.dim, generator=torch.Generator().manual_seed(0))

    def images(finish: Finish) -> np.ndarray:
        draw = module._pictures(space, lambda labels, source: codes[labels], finish)
        return draw(torch.arange(20), torch.Generator().manual_seed(1)).images

    untouched = images(Finish(0.0, None))
    assert np.array_equal(untouched, space.decode(codes))
    sharp = images(Finish(1.0, None))
    energy = [
        gradient_energy(torch.from_numpy(data).double().permute(0, 3, 1, 2))
        for data in (untouched, sharp)
    ]
    assert energy[1] > 1.1 * energy[0]
    still = images(Finish(1.0, Jitter(rotation=0.0, scale=0.0, shift=0.0)))
    assert np.abs(still.astype(int) - sharp.astype(int)).max() <= 1
    moved = images(Finish(1.0, Jitter()))
    assert moved.dtype == np.uint8 and moved.shape == sharp.shape
    assert not np.array_equal(moved, sharp)


def test_which_gain_a_plan_takes(augmenting: VerifiedPlan, tiny: VerifiedPlan) -> None:
    run, plan = augmenting.run, augmenting.plan
    assert finish_of(tiny.run, tiny.plan, augmented=True) == Finish(0.0, None)
    assert finish_of(tiny.run, tiny.plan, augmented=True).facts() == {}
    fixed = plan.model_copy(
        update={"sampling": plan.sampling.model_copy(update={"sharpen": 0.4, "augment": None})}
    )
    assert finish_of(run, fixed, augmented=True) == Finish(0.4, None)
    found = finish_of(run, plan, augmented=True)
    assert found == Finish(read_json(run.calibration)["sharpen_gain"], plan.sampling.augment)
    assert finish_of(run, plan, augmented=False).augment is None


def test_a_calibration_without_a_gain_is_said_to_be(
    augmenting: VerifiedPlan,
) -> None:
    calibration = augmenting.run.calibration
    whole = calibration.read_bytes()
    facts = read_json(calibration)
    del facts["sharpen_gain"]
    try:
        write_json(calibration, facts)
        with pytest.raises(MissingError, match="no sharpening gain"):
            finish_of(augmenting.run, augmenting.plan, augmented=True)
    finally:
        calibration.write_bytes(whole)


def test_a_calibration_that_changed_after_the_charge_is_refused(whole: VerifiedPlan) -> None:
    kept = whole.run.calibration.read_bytes()
    facts = read_json(whole.run.calibration)
    write_json(whole.run.calibration, facts | {"radius": facts["radius"] * 1.5})
    for step in (lambda: sample(whole, 20, "release"), lambda: distill(whole)):
        with pytest.raises(ReplayError, match="not the one that the charges name"):
            step()
    whole.run.calibration.write_bytes(kept)


def test_public_files_that_were_damaged_come_back_from_the_hand_out(whole: VerifiedPlan) -> None:
    sample(whole, 20, "release")
    room = whole.run.public
    before = {path.name: path.read_bytes() for path in room.iterdir()}
    write_json(whole.run.calibration, {"radius": 1.0})
    (room / "geometry.safetensors").unlink()
    pretrain(whole)
    assert {path.name: path.read_bytes() for path in room.iterdir()} == before
    sample(whole, 21, "release")
