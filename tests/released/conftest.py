"""A small run whose release is written by hand: no private record is read here."""

import textwrap
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dpsynth.artifacts.moments import ReleasedMoments, save_moments
from dpsynth.artifacts.spending import calibration_hash, spending
from dpsynth.models.seeding import seeded_initialisation
from dpsynth.models.velocity import build_velocity, save_velocity
from dpsynth.planning.verify import VerifiedPlan, make_run
from dpsynth.public.pretrain import pretrain

CODE = 4
CLASSES = ("zero", "one", "two")
PLAN = textwrap.dedent(
    """
    name: tiny
    budget: {epsilon: 3.0, delta: 1e-5}
    private:
      source: {kind: digits}
      public: true
      capacity: 1800
      image: {height: 8, width: 8, channels: 1}
      classes: [zero, one, two]
      held_out: {by: hash, fraction: 0.2}
    public:
      - {kind: letters, count: 200}
    representation: {kind: pca, code: 4, clip_quantile: 0.9}
    stages:
      moments: {covariance: class}
    velocity: {width: 32, depth: 1}
    prior: {steps: 20, batch: 32}
    distillation: {steps: 150, batch: 128, horizon: 1.0, learning_rate: 3e-3}
    sampling: {method: flow, count: 30, steps: 10, guidance: 1.5}
    """
)


def true_gaussians() -> tuple[np.ndarray, np.ndarray]:
    """Means (Y, d) and covariances (Y, d, d) that the hand-made release describes."""
    rng = np.random.default_rng(0)
    means = 1.5 * rng.normal(size=(len(CLASSES), CODE))
    roots = rng.normal(size=(len(CLASSES), CODE, CODE)) / 3
    return means, roots @ roots.transpose(0, 2, 1) + 0.1 * np.eye(CODE)


def release(verified: VerifiedPlan) -> None:
    """Write moments of 500 records a class, charged, settled and closed like a real release."""
    means, covariances = true_gaussians()
    count = 500.0
    seconds = count * (covariances + np.einsum("yi,yj->yij", means, means))
    moments = ReleasedMoments(
        counts=np.full(len(CLASSES), count),
        sums=count * means,
        seconds=seconds,
        count_std=1.0,
        sum_std=1.0,
        second_std=1.0,
        radius=10.0,
        covariance="class",
    )
    path = verified.run.released / "moments.safetensors"
    with spending(
        verified.run,
        verified.lock,
        calibration_hash=calibration_hash(verified.run),
        noise_source=verified.noise_source,
    ) as spender:
        slot = spender.release_slot("moments")
        spender.charge(slot)
        save_moments(path, moments)
        spender.settle(slot, path)
        for chunk in verified.lock.stage_slots("train"):
            spender.charge(chunk)
            checkpoint = verified.run.curator / chunk.name
            checkpoint.write_bytes(b"some weights")
            spender.settle(chunk, checkpoint)
        spender.close()


@pytest.fixture(scope="session")
def truth() -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances behind the release."""
    return true_gaussians()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifiedPlan]:
    """A pretrained run with its release."""
    folder = tmp_path_factory.mktemp("released")
    (folder / "plan.yaml").write_text(PLAN)
    verified = make_run(folder / "plan.yaml", folder / "run")
    pretrain(verified)
    release(verified)
    yield verified


@pytest.fixture(scope="session")
def with_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifiedPlan]:
    """A run whose release and training are paid for; its model is `released/model.safetensors`."""
    folder = tmp_path_factory.mktemp("trained")
    stages = "moments: {covariance: class}"
    plan = PLAN.replace("name: tiny", "name: trained")
    plan = plan.replace(stages, f"{stages}\n  train: {{rate: 0.01, steps: 4, chunk: 2}}")
    (folder / "plan.yaml").write_text(plan)
    verified = make_run(folder / "plan.yaml", folder / "run")
    pretrain(verified)
    release(verified)
    settings = verified.plan.velocity
    with seeded_initialisation(1):
        model = build_velocity(settings, CODE, len(CLASSES))
        torch.nn.init.normal_(model.leave.weight, std=0.1)  # type: ignore[arg-type, union-attr]
    save_velocity(model, verified.run.released / "model.safetensors", settings, room="released")
    yield verified


@pytest.fixture(scope="session")
def augmenting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifiedPlan]:
    """A pretrained run with its release, whose plan sharpens and augments what it samples."""
    folder = tmp_path_factory.mktemp("augmenting")
    sampling = "sampling: {method: release, count: 30, sharpen: public, augment: {rotation: 9}}"
    plan = PLAN.replace("name: tiny", "name: moved").split("sampling:")[0] + sampling
    (folder / "plan.yaml").write_text(plan)
    verified = make_run(folder / "plan.yaml", folder / "run")
    pretrain(verified)
    release(verified)
    yield verified


@pytest.fixture(scope="session")
def guiding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifiedPlan]:
    """A pretrained run with its release in a projection, whose plan guides the prior."""
    folder = tmp_path_factory.mktemp("guiding")
    plan = PLAN.replace("name: tiny", "name: guiding").replace("code: 4", "code: 9")
    plan = plan.replace("{covariance: class}", f"{{covariance: class, projection: {CODE}}}")
    plan = plan.split("distillation:")[0]
    plan += "sampling: {method: guide, count: 30, steps: 10, guidance: 1.5}"
    (folder / "plan.yaml").write_text(plan)
    verified = make_run(folder / "plan.yaml", folder / "run")
    pretrain(verified)
    release(verified)
    yield verified
