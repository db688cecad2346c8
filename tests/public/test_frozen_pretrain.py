"""What `pretrain` makes of a frozen prior: own samples, codes about their mean, prompts."""

import json
import shutil

import numpy as np
import pytest
import torch
from frozenkit import frozen_plan, tiny_sd3
from public_helpers import stand_in

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.samples import read_samples
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.errors import BudgetError, MissingError, PlanError, UsageError
from dpsynth.models.frozen.velocity import FrozenVelocity
from dpsynth.models.seeding import generator
from dpsynth.models.velocity import build_for, load_for, save_velocity
from dpsynth.public import frozen_stage
from dpsynth.public.pretrain import pretrain
from dpsynth.public.projection import fit_projection, load_release_space
from dpsynth.public.representation import load_representation
from dpsynth.public.sources import read_public
from dpsynth.released.estimate import ClassMixtures
from dpsynth.released.gaussians import ReleasedMixture
from dpsynth.released.guidance import TiltedStart, own_means
from dpsynth.released.varying import own_generator

pytest.importorskip("diffusers")
LORA = {"rate": 0.5, "steps": 4, "parameters": "lora", "lora": {"rank": 2}, "times": "logit-normal",
        "buckets": 1, "multiplicity": 1}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_sd3(tmp_path_factory.mktemp("frozen") / "sd3")


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    plan = frozen_plan(checkpoint)
    verified = stand_in(plan, tmp_path_factory.mktemp("frozen") / "run")
    return verified, pretrain(verified)


def test_the_room(made):
    verified, facts = made
    room = verified.run.public
    names = {path.name for path in room.iterdir()}
    assert names == {
        "own-samples", "own-samples.json", "geometry.safetensors", "prior.safetensors",
        "projection.safetensors", "within.safetensors", "calibration.json", "radius.png",
        "reconstructions.png",
    }  # fmt: skip
    assert facts["dim"] == 64 and 0 < facts["release_radius"] <= facts["radius"]
    assert "tau" not in facts and len(facts["weights_sha256"]) == 64
    assert facts["prior_sha256"] == sha256_file(room / "prior.safetensors")
    assert [source["kind"] for source in facts["sources"]] == ["prior"]


def test_own_samples_are_drawn_for_the_conditions_in_turn(made):
    verified, _ = made
    images, labels = read_samples(verified.run.public / "own-samples", ["cat", "dog"])
    assert images.shape == (12, 16, 16, 3) and labels.tolist() == [0, 1] * 6
    assert (read_public(verified.plan, verified.run).images == images).all()
    with pytest.raises(MissingError, match="own samples are not there"):
        read_public(verified.plan)


def test_codes_are_latents_about_their_mean(made):
    verified, _ = made
    space = load_representation(verified.run, verified.plan)
    images = read_public(verified.plan, verified.run).images
    codes = space.encode(images)
    assert space.scale == 1.0
    torch.testing.assert_close(codes.mean(0), torch.zeros(64), atol=1e-5, rtol=0)
    raw = space.codec.encode_many(images)
    torch.testing.assert_close(codes, (raw.double() - torch.from_numpy(space.mean)).float())
    assert space.encode_exact_many(images)[3] == pytest.approx(codes[3].numpy(), abs=1e-4)


def test_nothing_is_made_twice_and_no_encoder_runs_again(made, monkeypatch):
    verified, facts = made

    def never(*_):
        raise AssertionError("text encoders were loaded")

    monkeypatch.setattr(frozen_stage, "encode_prompts", never)
    assert pretrain(verified) == facts
    model, metadata = load_for(verified.run.public / "prior.safetensors", verified.plan)
    assert isinstance(model, FrozenVelocity) and model.classes == 2
    assert metadata["room"] == "public"
    (verified.run.public / "geometry.safetensors").unlink()
    assert pretrain(verified) == facts  # the prompts are those of the prior's file


def test_an_interrupted_drawing_goes_on(made, monkeypatch, tmp_path):
    verified, facts = made
    again = stand_in(verified.plan, tmp_path / "run")
    monkeypatch.setattr(frozen_stage, "_SHARD", 5)
    draw, calls = frozen_stage.FrozenStage._draw_shard, []

    def once(*given):
        if calls:
            raise KeyboardInterrupt
        calls.append(given)
        return draw(*given)

    monkeypatch.setattr(frozen_stage.FrozenStage, "_draw_shard", once)
    with pytest.raises(KeyboardInterrupt):
        pretrain(again)
    monkeypatch.setattr(frozen_stage.FrozenStage, "_draw_shard", draw)
    pretrain(again)
    other = stand_in(verified.plan, tmp_path / "other")
    pretrain(other)
    assert facts["sources"] != read_json(again.run.calibration)["sources"]  # of another shard size
    assert read_json(again.run.calibration) == read_json(other.run.calibration)


def test_changed_weights(checkpoint, made, tmp_path):
    verified, _ = made
    moved = shutil.copytree(checkpoint, tmp_path / "moved")
    plan = frozen_plan(moved)
    load_representation(verified.run, plan)  # elsewhere, and the same
    tiny_sd3(moved, seed=1)
    path = verified.run.public / "prior.safetensors"
    with pytest.raises(PlanError, match="not those that this run was calibrated with"):
        load_representation(verified.run, plan)
    with pytest.raises(PlanError, match="not those that this run was calibrated with"):
        load_for(path, plan)
    verified.run.transcript.write_text("")
    try:
        with pytest.raises(BudgetError, match="own-samples would change"):
            pretrain(stand_in_at(verified, plan))
    finally:
        verified.run.transcript.unlink()


def stand_in_at(verified, plan):
    return stand_in(plan, verified.run.root)


def test_factors_start_in_the_prior_s_file_and_move_with_the_model(checkpoint, tmp_path):
    plan = frozen_plan(checkpoint, stages={"train": LORA}, sampling={"method": "flow", "steps": 2})
    verified = stand_in(plan, tmp_path / "run")
    pretrain(verified)
    path = verified.run.public / "prior.safetensors"
    arrays, _ = load_tensors(path)
    model, _ = load_for(path, plan)
    own = {name for name, p in model.named_parameters() if p.requires_grad}
    assert own and own <= set(arrays)
    assert set(arrays) - own == {"mean", "prompt.embeds", "prompt.pooled"}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in own:
                p.add_(0.1)
    save_velocity(model, tmp_path / "model.safetensors", plan.velocity, room="released", low="0")
    again, metadata = load_for(tmp_path / "model.safetensors", plan)
    assert metadata["low"] == "0" and json.loads(metadata["frozen"])["family"] == "sd3"
    x, t = torch.randn(2, 64, generator=generator(0)), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        first, second = (one(x, t, torch.tensor([0, 2])) for one in (model, again))
    torch.testing.assert_close(first, second)
    with pytest.raises(UsageError, match="does not fit"):
        load_for(path, frozen_plan(checkpoint))  # of a plan without factors
    with pytest.raises(PlanError, match="frozen"):
        build_for(plan)


def test_a_guided_start_has_the_declared_mean_and_covariance(made):
    verified, _ = made
    space = load_release_space(verified.run, verified.plan)
    draw = np.random.default_rng(0)
    means = draw.normal(size=(2, 1, 4))
    root = draw.normal(size=(4, 4)) / 2
    covariances = np.tile(root @ root.T, (2, 1, 1, 1))
    mixture = ReleasedMixture(
        ClassMixtures(np.ones(2) / 2, np.ones((2, 1)), means, covariances), space.projection
    )
    t0, count = 0.3, 40_000
    start = TiltedStart(mixture, t0)(torch.zeros(count, dtype=torch.long), generator(1)).double()
    wanted = t0 * space.lift_means(means[0, 0])
    covariance = t0**2 * space.lift_covariance(covariances[0, 0]) + (1 - t0) ** 2 * np.eye(64)
    error = np.sqrt(np.diag(covariance) / count)
    assert (np.abs(start.mean(0).numpy() - wanted) < 5 * error).all()
    found = np.cov(start.numpy().T)
    size = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)) / count)
    assert (np.abs(found - covariance) < 8 * size).all()


def test_the_public_control_is_the_mean_of_own_samples(made):
    verified, _ = made
    space = load_representation(verified.run, verified.plan)
    images = read_public(verified.plan, verified.run).images
    found = own_means(verified.run, verified.plan)
    torch.testing.assert_close(found[1], space.encode(images[1::2]).mean(0), atol=1e-5, rtol=1e-4)


def test_a_frozen_prior_varies_members(made):
    verified, _ = made
    members, _ = own_generator(verified.run, verified.plan)
    labels, source = np.array([0, 1, 1]), generator(5)
    drawn = members.draw(labels, source)
    assert drawn.shape == (3, 64) and members.images(drawn).shape == (3, 16, 16, 3)
    near, far = (members.vary(drawn, labels, s, generator(6)) for s in (0.05, 0.9))
    assert np.abs(near - drawn).mean() < np.abs(far - drawn).mean()


def test_few_codes_give_the_same_basis_as_many_numbers():
    codes = torch.randn(20, 50, generator=generator(0), dtype=torch.float64)
    few = fit_projection(codes, 6)
    centred = (codes - codes.mean(0)).numpy()
    _, singular, right = np.linalg.svd(centred, full_matrices=False)
    assert np.abs(few.basis @ right[:6].T) == pytest.approx(np.eye(6), abs=1e-9)
    assert few.basis @ few.basis.T == pytest.approx(np.eye(6), abs=1e-12)
    assert few.residual == pytest.approx((singular[6:] ** 2).sum() / 20 / 44)
    assert few.centre == pytest.approx(codes.mean(0).numpy())
