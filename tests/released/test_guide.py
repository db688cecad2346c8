"""The sampling port: the tilted start, the flow from t0, the controls, and what is written."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from dpsynth.artifacts.files import read_json, write_json
from dpsynth.artifacts.samples import read_samples, read_summary
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.field import AnalyticField
from dpsynth.models.flow import euler
from dpsynth.models.lifted import LiftedField
from dpsynth.models.seeding import generator
from dpsynth.planning.steps import status
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.projection import Projection, load_release_space
from dpsynth.released import gaussians as module
from dpsynth.released.estimate import ClassMixtures
from dpsynth.released.gaussians import ReleasedMixture, load_mixture
from dpsynth.released.guidance import Guide, TiltedStart, control_means, plan_start
from dpsynth.released.guide import guide
from dpsynth.released.sampling import last_model, own_model, sample

CLASSES = ["zero", "one", "two"]
COUNT = 40_000


def mixtures(cells: int, dim: int = 3) -> ClassMixtures:
    draw = np.random.default_rng(cells)
    root = draw.normal(size=(2, cells, dim, dim)) / 2
    shares = draw.uniform(0.5, 1.0, size=(2, cells))
    return ClassMixtures(
        np.array([0.3, 0.7]),
        shares / shares.sum(axis=1, keepdims=True),
        2 * draw.normal(size=(2, cells, dim)),
        root @ root.transpose(0, 1, 3, 2) + 0.1 * np.eye(dim),
    )


def projection(dim: int = 5) -> Projection:
    """Three directions of five, a centre and some variance off the basis."""
    draw = np.random.default_rng(7)
    basis = np.linalg.qr(draw.normal(size=(dim, 3)))[0].T
    return Projection(np.ascontiguousarray(basis), draw.normal(size=dim), 0.4, 64.0)


def class_moments(made: ClassMixtures) -> tuple[np.ndarray, np.ndarray]:
    """Means (Y, d) and covariances (Y, d, d) of whole classes."""
    means = np.einsum("yk,ykd->yd", made.shares, made.means)
    offsets = made.means - means[:, None]
    within = np.einsum("yk,ykde->yde", made.shares, made.covariances)
    return means, within + np.einsum("yk,ykd,yke->yde", made.shares, offsets, offsets)


def close(codes: Tensor, mean: np.ndarray, covariance: np.ndarray) -> None:
    codes = codes.double()
    scale = float(np.abs(covariance).max())
    np.testing.assert_allclose(codes.mean(0), mean, atol=0.03 * (1 + scale**0.5))
    np.testing.assert_allclose(codes.T.cov(), covariance, atol=0.05 * scale)


@pytest.mark.parametrize("cells", [1, 3])
@pytest.mark.parametrize("lifted", [False, True])
@pytest.mark.parametrize("t0", [0.2, 0.7])
def test_the_start_has_the_tilted_mean_and_covariance(cells: int, lifted: bool, t0: float) -> None:
    """N(t0 mu, t0^2 Sigma + (1 - t0)^2 I); with cells the mixture's whole moments."""
    made, space = mixtures(cells), projection() if lifted else None
    means, covariances = class_moments(made)
    if space is not None:
        off = np.eye(5) - space.basis.T @ space.basis
        means = means @ space.basis + space.centre
        covariances = space.basis.T @ covariances @ space.basis + space.residual * off
    start = TiltedStart(ReleasedMixture(made, space), t0)
    for y in range(2):
        drawn = start(torch.full((COUNT,), y), generator(y))
        expected = t0**2 * covariances[y] + (1 - t0) ** 2 * np.eye(len(means[y]))
        close(drawn, t0 * means[y], expected)


def test_a_projection_lifts_the_whole_mixture_exactly() -> None:
    made, space = mixtures(2), projection()
    off = space.residual * (np.eye(5) - space.basis.T @ space.basis)
    dense = dataclasses.replace(
        made,
        means=made.means @ space.basis + space.centre,
        covariances=space.basis.T @ made.covariances @ space.basis + off,
    )
    lifted, plain = ReleasedMixture(made, space), ReleasedMixture(dense)
    assert isinstance(lifted.field, LiftedField) and isinstance(plain.field, AnalyticField)
    assert (lifted.dim, lifted.classes) == (plain.dim, plain.classes) == (5, 2)
    torch.testing.assert_close(lifted.class_means, plain.class_means)
    x, labels = 2 * torch.randn(300, 5, generator=generator(0)), torch.arange(300) % 3
    t = torch.linspace(0, 1, 300)
    torch.testing.assert_close(
        lifted.field(x, t, labels), plain.field(x, t, labels), rtol=1e-4, atol=1e-4
    )


def test_large_roots_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, labels = ReleasedMixture(mixtures(1)), torch.arange(100) % 2
    gathered = mixture.draw(labels, generator(0))
    monkeypatch.setattr(module, "_GATHERED", 0)
    torch.testing.assert_close(mixture.draw(labels, generator(0)), gathered)


@pytest.mark.parametrize("lifted", [False, True])
@pytest.mark.parametrize("t0", [0.1, 0.5])
def test_the_exact_flow_from_t0_ends_at_the_release(lifted: bool, t0: float) -> None:
    made, space = mixtures(1), projection() if lifted else None
    mixture = ReleasedMixture(made, space)
    labels = torch.arange(COUNT) % 2
    start = TiltedStart(mixture, t0)(labels, generator(0))
    ended = euler(mixture.field, start, labels, null=2, steps=150, start_time=t0)
    drawn = mixture.draw(labels, generator(1))
    for y in range(2):
        found, expected = (some[labels == y].double() for some in (ended, drawn))
        close(found, expected.mean(0).numpy(), expected.T.cov().numpy())


def test_the_steps_from_t0_are_equal_and_end_at_one() -> None:
    times = []

    def watched(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        times.append(float(t[0]))
        return torch.ones_like(x)

    start, labels = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    ended = euler(watched, start, labels, null=1, steps=4, start_time=0.2)
    np.testing.assert_allclose(times, [0.2, 0.4, 0.6, 0.8])
    torch.testing.assert_close(ended, torch.full_like(start, 0.8))
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="start time"):
            euler(watched, start, labels, null=1, steps=4, start_time=wrong)


@pytest.mark.parametrize("mean", ["zero", "random", "public"])
def test_controls_move_the_means_and_keep_the_covariance(guiding: VerifiedPlan, mean: str) -> None:
    mixture = ReleasedMixture(mixtures(3))
    prior = AnalyticField(torch.ones(2), torch.full((2, 3), 1.5), 0.2 * torch.eye(3)[None].double())
    means = control_means(mean, mixture, prior, guiding.plan)
    assert means is not None
    again = control_means(mean, mixture, prior, guiding.plan)
    assert torch.equal(means, again)
    if mean == "zero":
        assert (means == 0).all()
    elif mean == "random":
        torch.testing.assert_close(means.norm(dim=1), mixture.class_means.norm(dim=1))
        assert not torch.allclose(means, mixture.class_means, atol=0.1)
    else:
        torch.testing.assert_close(means, torch.full((2, 3), 1.5), rtol=0, atol=0.1)
    _, covariances = class_moments(mixtures(3))
    drawn = TiltedStart(mixture, 0.5, means)(torch.full((COUNT,), 1), generator(0))
    close(drawn, 0.5 * means[1].numpy(), 0.25 * covariances[1] + 0.25 * np.eye(3))


def test_the_released_means_are_no_control(guiding: VerifiedPlan) -> None:
    mixture = ReleasedMixture(mixtures(1))
    assert control_means("released", mixture, mixture.field, guiding.plan) is None


def test_a_runs_mixture_is_lifted_by_its_projection(
    guiding: VerifiedPlan, truth: tuple[np.ndarray, np.ndarray]
) -> None:
    mixture, _ = load_mixture(guiding.run, guiding.plan)
    space = load_release_space(guiding.run, guiding.plan)
    assert (mixture.dim, space.dim) == (9, 4)
    np.testing.assert_allclose(mixture.class_means, space.lift_means(truth[0]), atol=0.05)
    codes = mixture.draw(torch.zeros(COUNT, dtype=torch.int64), generator(0))
    close(codes, space.lift_means(truth[0][0]), space.lift_covariance(truth[1][0]))


def test_the_plans_own_samples_are_guided(guiding: VerifiedPlan) -> None:
    run, plan = guiding.run, guiding.plan
    assert own_model(plan) == last_model(plan) == "prior"
    t0 = read_json(run.calibration)["start"]["t0"]
    facts = guide(guiding)
    assert facts["samples"] == str(run.released / "samples")
    images, labels = read_samples(run.released / "samples", CLASSES, (8, 8, 1))
    assert images.shape == (30, 8, 8, 1) and np.bincount(labels).tolist() == [10, 10, 10]
    summary = read_summary(run.released / "samples")
    assert summary is not None
    origin = summary["origin"]
    assert (origin["port"], origin["start"], origin["model"]) == ("guide", t0, "prior")
    assert origin["moments_sha256"] == load_mixture(run, plan)[1]
    before = (run.released / "samples/metadata.csv").stat().st_mtime_ns
    sample(guiding)  # the same samples: nothing to do
    guide(guiding, chosen=Guide(t0))
    assert (run.released / "samples/metadata.csv").stat().st_mtime_ns == before
    step = status(run).step("sample")
    assert step is not None and step.done
    card = (run.released / "card.md").read_text()
    assert f"started at t0 {t0:g} from the released moments" in card
    assert "public/projection.safetensors" in card
    assert (run.released / "public/projection.safetensors").is_file()


def test_another_start_or_mean_goes_elsewhere(guiding: VerifiedPlan) -> None:
    released = guiding.run.released
    facts = guide(guiding, 12, Guide(0.37))
    assert facts["samples"] == str(released / "samples-guided")
    assert (released / "contact-sheet-guided.png").is_file()
    facts = guide(guiding, 12, Guide(0.37, "random"))
    assert facts["samples"] == str(released / "samples-guided-random-mean")
    summary = read_summary(released / "samples-guided-random-mean")
    assert summary is not None and summary["origin"]["mean"] == "random"
    card = (released / "card.md").read_text()
    assert "a control, with random means" in card and "t0 0.37" in card


def test_every_model_of_any_plan_can_be_guided(with_model: VerifiedPlan) -> None:
    run, released = with_model.run, with_model.run.released
    with pytest.raises(MissingError, match="not guide") as error:
        guide(with_model, 9)
    assert "--start" in error.value.hint
    facts = guide(with_model, 9, Guide(0.3))
    assert facts["samples"] == str(released / "samples-guided")
    guide(with_model, 9, Guide(0.3), model="prior")
    hashes = {}
    for name in ("samples-guided", "samples-guided-prior"):
        summary = read_summary(released / name)
        assert summary is not None and summary["count"] == 9
        hashes[name] = summary["origin"]["model_sha256"]
    assert len(set(hashes.values())) == 2
    sample(with_model, 9)
    plain = read_summary(run.released / "samples")
    assert plain is not None and "port" not in plain["origin"]


def test_wrong_requests(guiding: VerifiedPlan, with_model: VerifiedPlan) -> None:
    with pytest.raises(UsageError, match="no model 'field' to guide"):
        guide(guiding, model="field")
    with pytest.raises(UsageError, match="no mean"):
        guide(guiding, chosen=Guide(mean="other"))  # type: ignore[arg-type]
    for wrong in (0.0, 1.0, -3.0, float("nan")):
        with pytest.raises(UsageError, match="t0"):
            guide(guiding, chosen=Guide(wrong))
    with pytest.raises(UsageError, match="at least 1"):
        guide(guiding, 0, Guide(0.3))
    with pytest.raises(MissingError):
        guide(guiding, 5, Guide(0.3), model="distilled")
    stages = with_model.plan.stages.model_copy(update={"moments": None})
    bare = with_model.plan.model_copy(update={"stages": stages})
    with pytest.raises(UsageError, match="no moments stage"):
        guide(SimpleNamespace(plan=bare, run=with_model.run), chosen=Guide(0.3))  # type: ignore[arg-type]


def test_a_calibration_without_a_start_is_said_to_be(guiding: VerifiedPlan) -> None:
    calibration = guiding.run.calibration
    whole, facts = calibration.read_bytes(), read_json(calibration)
    del facts["start"]
    try:
        write_json(calibration, facts)
        with pytest.raises(MissingError, match="no start of guidance"):
            plan_start(guiding.run, guiding.plan)
    finally:
        calibration.write_bytes(whole)
    fixed = guiding.plan.sampling.model_copy(update={"start": 0.25})
    plan = guiding.plan.model_copy(update={"sampling": fixed})
    assert plan_start(guiding.run, plan) == Guide().at(guiding.run, plan) == 0.25


def test_images_leave_no_trace_of_the_plan_folder(guiding: VerifiedPlan) -> None:
    folder = str(Path(guiding.run.root).parent)
    for path in guiding.run.public.iterdir():
        assert folder.encode() not in path.read_bytes()
