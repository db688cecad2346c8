"""Distillation: the student comes close to the released field, resumes, and leaves no half file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.errors import MissingError
from dpsynth.models.seeding import generator
from dpsynth.models.velocity import load_velocity
from dpsynth.planning.training import Distillation
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released import distill as module
from dpsynth.released.distill import distill, distilled_path, teach
from dpsynth.released.gaussians import ReleasedMixture, load_mixture

CODE, CLASSES = 4, 3


def mean_gap(model: torch.nn.Module, mixture: ReleasedMixture, low: float, high: float) -> float:
    """Mean squared distance to the field over its own inputs, as a share of the field's square."""
    x, t, labels = module._inputs(mixture, 4000, generator(9))
    inside = (t >= low) & (t < high)
    at = x[inside], t[inside], labels[inside]
    with torch.no_grad():
        field = mixture.field(*at)
        return float((model(*at) - field).square().mean() / field.square().mean())


def prior_of(tiny: VerifiedPlan) -> torch.nn.Module:
    path = tiny.run.public / "prior.safetensors"
    return load_velocity(path, tiny.plan.velocity, CODE, CLASSES)[0]


def test_release_is_read_back(tiny: VerifiedPlan, truth: tuple[np.ndarray, np.ndarray]) -> None:
    mixture, _ = load_mixture(tiny.run, tiny.plan)
    means, covariances = truth
    drawn = mixture.draw(torch.full((50_000,), 2), generator(0)).double()
    torch.testing.assert_close(drawn.mean(0), torch.from_numpy(means[2]), rtol=0, atol=0.1)
    torch.testing.assert_close(drawn.T.cov(), torch.from_numpy(covariances[2]), rtol=0, atol=0.1)


def test_student_learns_both_branches_for_all_t(tiny: VerifiedPlan) -> None:
    facts = distill(tiny)
    mixture, _ = load_mixture(tiny.run, tiny.plan)
    path = distilled_path(tiny.run)
    student, metadata = load_velocity(path, tiny.plan.velocity, CODE, CLASSES)
    assert facts["sha256"] == sha256_file(path)
    assert metadata["room"] == "released"
    assert float(metadata["horizon"]) == 1.0
    assert mean_gap(student, mixture, 0, 1) < 0.05
    assert mean_gap(prior_of(tiny), mixture, 0, 1) > 0.3


def test_a_second_call_does_nothing_until_the_release_changes(
    tiny: VerifiedPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = distill(tiny)
    monkeypatch.setattr(module, "teach", lambda *_, **__: pytest.fail("taught again"))
    assert distill(tiny) == first
    _, metadata = load_tensors(distilled_path(tiny.run))
    assert metadata["moments_sha256"] == sha256_file(tiny.run.released / "moments.safetensors")
    monkeypatch.setattr(module, "load_mixture", lambda *_: (load_mixture(*_)[0], "other"))
    with pytest.raises(pytest.fail.Exception, match="taught again"):
        distill(tiny)


def test_above_the_horizon_the_prior_is_replayed(tiny: VerifiedPlan) -> None:
    mixture, _ = load_mixture(tiny.run, tiny.plan)
    settings = Distillation(steps=1, horizon=0.4)
    x, t, labels = module._inputs(mixture, 500, generator(1))
    prior = prior_of(tiny)
    target = module._target(mixture, prior, 0.4, (x, t, labels))
    low = t <= 0.4
    torch.testing.assert_close(target[low], mixture.field(x, t, labels)[low])
    with torch.no_grad():
        torch.testing.assert_close(target[~low], prior(x, t, labels)[~low])
    assert not target.requires_grad
    tau = read_json(tiny.run.calibration)["tau"]
    assert module.horizon_of(settings, tau) == 0.4
    assert module.horizon_of(Distillation(horizon=0.9, cap=0.5), tau) == 0.5
    assert 0 < module.horizon_of(Distillation(horizon="knee"), tau) <= 1


def test_private_training_begins_where_teaching_ends(tiny: VerifiedPlan) -> None:
    tau = read_json(tiny.run.calibration)["tau"]
    assert module.trains_from(Distillation(horizon=0.4), tau) == 0.4
    assert module.trains_from(Distillation(horizon=1.0), tau) == min(tau, 0.9)


def test_teaching_is_a_function_of_its_inputs(tiny: VerifiedPlan) -> None:
    mixture, _ = load_mixture(tiny.run, tiny.plan)
    settings = Distillation(steps=5, batch=16)
    weights = [
        teach(
            prior_of(tiny), prior_of(tiny), mixture, settings, horizon=1.0, source=generator(0)
        ).state_dict()
        for _ in range(2)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_missing_inputs_say_what_to_type(tiny: VerifiedPlan, tmp_path: Path) -> None:
    moved = tiny.run.released / "moments.safetensors"
    kept = moved.rename(tmp_path / "kept")
    try:
        with pytest.raises(MissingError) as error:
            distill(tiny)
        assert "release-moments" in error.value.hint
    finally:
        kept.rename(moved)
