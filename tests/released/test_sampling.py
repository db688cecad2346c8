"""Sampling: every route, balanced labels, fresh draws, resumption, and the contact sheet."""

import numpy as np
import pytest

from dpsynth.artifacts.samples import read_samples, read_summary
from dpsynth.errors import MissingError, UsageError
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released import sampling as module
from dpsynth.released.distill import distill
from dpsynth.released.sampling import MODELS, sample

CLASSES = ["zero", "one", "two"]


@pytest.fixture
def whole(with_model: VerifiedPlan) -> VerifiedPlan:
    distill(with_model)
    return with_model


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_sampled(whole: VerifiedPlan, model: str) -> None:
    facts = sample(whole, 20, model)
    folder = whole.run.released / ("samples" if model == "distilled" else f"samples-{model}")
    assert facts["samples"] == str(folder)
    images, labels = read_samples(folder, CLASSES, (8, 8, 1))
    assert images.shape == (20, 8, 8, 1)
    assert np.bincount(labels, minlength=3).tolist() == [7, 7, 6]
    assert images.std() > 5
    name = "contact-sheet.png" if model == "distilled" else f"contact-sheet-{model}.png"
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
    monkeypatch.setattr(module, "SHARD", 10)
    folder = whole.run.released / "samples-release"

    class StoppedError(Exception):
        pass

    calls = []

    def failing(images: np.ndarray, labels: np.ndarray) -> None:
        raise StoppedError

    real = module.SamplesWriter.add

    def counted(self: module.SamplesWriter, images: np.ndarray, labels: np.ndarray) -> None:
        calls.append(len(images))
        if len(calls) == 2:
            failing(images, labels)
        real(self, images, labels)

    monkeypatch.setattr(module.SamplesWriter, "add", counted)
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
    with pytest.raises(UsageError, match="at least 1"):
        sample(tiny, 0)
    (tiny.run.released / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(MissingError) as error:
        sample(tiny, 5, "model")
    assert "dpsynth train" in error.value.hint


def test_generators_are_fresh() -> None:
    assert module.fresh_generator().initial_seed() != module.fresh_generator().initial_seed()
