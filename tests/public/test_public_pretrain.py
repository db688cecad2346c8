import json

import numpy as np
import pytest
import torch
from public_helpers import small_plan, stand_in, write_public

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.errors import BudgetError, MissingError, UsageError
from dpsynth.models.autoencoder import as_bytes, pixels
from dpsynth.models.finish import gradient_energy, sharpen
from dpsynth.models.seeding import generator
from dpsynth.models.velocity import load_velocity
from dpsynth.public import augment as augment_module
from dpsynth.public import pretrain as module
from dpsynth.public.augment import augment, morphological_gradient, seen, to_strokes
from dpsynth.public.job import Job
from dpsynth.public.pretrain import pretrain
from dpsynth.public.prior import fit_prior
from dpsynth.public.recipes import calibration_recipe, geometry_recipe, prior_recipe
from dpsynth.public.representation import load_representation
from dpsynth.public.sharpening import class_draws
from dpsynth.public.sources import read_public
from dpsynth.public.within import load_within, save_within, within_covariance


@pytest.fixture(scope="module", params=["pca", "autoencoder"])
def done(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    plan = small_plan(request.param, path=write_public(folder / "public.npz"))
    verified = stand_in(plan, folder / "run")
    return verified, pretrain(verified)


def test_all_files_are_there_and_named_by_hash(done):
    verified, facts = done
    room = verified.run.public
    assert {path.name for path in room.iterdir()} == {
        "geometry.safetensors",
        "prior.safetensors",
        "calibration.json",
        "tau.png",
        "radius.png",
        "reconstructions.png",
    }
    assert read_json(verified.run.calibration) == facts
    assert facts["geometry_sha256"] == sha256_file(room / "geometry.safetensors")
    assert facts["prior_sha256"] == sha256_file(room / "prior.safetensors")
    assert 0.0 < facts["tau"] < 1.0
    assert facts["dim"] == 6
    assert facts["sources"][0]["count"] == 200


def test_no_path_reaches_the_public_room(done):
    verified, facts = done
    assert str(verified.plan.public[0].path) not in json.dumps(facts)
    for path in verified.run.public.iterdir():
        assert b"private.npz" not in path.read_bytes()
        assert b"public.npz" not in path.read_bytes()


def test_what_was_written_loads(done):
    verified, facts = done
    space = load_representation(verified.run, verified.plan)
    assert space.radius == facts["radius"]
    model, _ = load_velocity(
        verified.run.public / "prior.safetensors", verified.plan.velocity, 6, 3
    )
    velocity = model(torch.zeros(4, 6), torch.full((4,), 0.5), torch.tensor([0, 1, 2, 3]))
    assert velocity.shape == (4, 6)


def test_a_second_run_keeps_every_file(done, monkeypatch):
    verified, facts = done
    names = ("geometry.safetensors", "prior.safetensors", "calibration.json")
    before = {name: (verified.run.public / name).stat().st_mtime_ns for name in names}
    for name in ("fit_autoencoder", "fit_pca", "fit_prior"):
        monkeypatch.setattr(module, name, None)  # a call would raise
    assert pretrain(verified) == facts
    assert before == {name: (verified.run.public / name).stat().st_mtime_ns for name in names}


def test_the_same_plan_gives_the_same_bytes(tmp_path):
    path = write_public(tmp_path / "public.npz")
    plan = small_plan("autoencoder", path=path)
    hashes = set()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("one", "two"):
        torch.manual_seed(len(name) + len(hashes))  # the global seed must not matter
        hashes.add(json.dumps(pretrain(stand_in(plan, tmp_path / name)), sort_keys=True))
    torch.set_num_threads(before)
    assert len(hashes) == 1


def test_damaged_and_missing_files_are_made_again(tmp_path):
    plan = small_plan("pca", path=write_public(tmp_path / "public.npz"))
    verified = stand_in(plan, tmp_path / "run")
    facts = pretrain(verified)
    (verified.run.public / "geometry.safetensors").write_bytes(b"damaged")
    (verified.run.public / "prior.safetensors").unlink()
    verified.run.calibration.write_bytes(b"{")
    assert pretrain(verified) == facts


def test_changed_public_data_are_seen(tmp_path):
    path = write_public(tmp_path / "public.npz")
    verified = stand_in(small_plan("pca", path=path), tmp_path / "run")
    first = pretrain(verified)
    write_public(path, seed=1)
    assert pretrain(verified)["geometry_sha256"] != first["geometry_sha256"]


def test_nothing_changes_after_a_spend(tmp_path):
    path = write_public(tmp_path / "public.npz")
    verified = stand_in(small_plan("pca", path=path), tmp_path / "run")
    facts = pretrain(verified)
    verified.run.transcript.write_text("{}\n")
    assert pretrain(verified) == facts
    write_public(path, seed=1)
    with pytest.raises(BudgetError, match="would change"):
        pretrain(verified)
    assert read_json(verified.run.calibration) == facts


def test_a_plan_without_moments_is_calibrated_too(tmp_path):
    path = write_public(tmp_path / "public.npz")
    plan = small_plan(
        "pca",
        path=path,
        stages={"train": {"rate": 0.1, "steps": 10}},
        sampling={"method": "flow"},
    )
    assert 0.0 < pretrain(stand_in(plan, tmp_path / "run"))["tau"] < 1.0


def test_the_prior_learns_the_public_classes():
    """Two public classes at +3 and -3: conditioned noise-end velocities point to them."""
    draw = generator(0)
    labels = torch.arange(600) % 2
    centres = torch.tensor([3.0, -3.0])[labels][:, None]
    codes = centres + 0.1 * torch.randn(600, 2, generator=draw)
    settings = small_plan().prior.model_copy(update={"steps": 400, "batch": 128, "ema": 0.9})
    model = fit_prior(codes, labels + 2, small_plan().velocity, settings, 2, seed=0)
    x, t = torch.zeros(2, 2), torch.full((2,), 0.2)
    with torch.no_grad():
        velocity = model(x, t, torch.tensor([0, 1]))
    assert velocity[0].mean() > 1.5  # public class 2 became private class 0
    assert velocity[1].mean() < -1.5


def test_outline_of_a_square():
    image = torch.zeros(1, 1, 9, 9)
    image[..., 2:7, 2:7] = 1.0
    outline = morphological_gradient(image)[0, 0]
    assert outline[4, 4] == 0.0
    assert outline[2, 4] == outline[1, 4] == 1.0
    assert outline[0, 4] == 0.0


@pytest.mark.parametrize("shape", [(5, 1, 8, 8), (5, 3, 28, 20)])
def test_augmentation_keeps_range_and_shape_and_is_seeded(shape):
    images = torch.rand(shape, generator=generator(0))
    for strokes in (True, False):
        first = augment(images, strokes=strokes, source=generator(1))
        assert first.shape == images.shape
        assert 0.0 <= float(first.min()) <= float(first.max()) <= 1.0
        assert torch.equal(first, augment(images, strokes=strokes, source=generator(1)))
    blank = to_strokes(torch.zeros(shape), generator(2))
    assert torch.isfinite(blank).all()
    assert float(blank.max()) < 0.05


def test_pixels_round_trip():
    data = np.arange(256, dtype=np.uint8).reshape(1, 8, 32, 1).repeat(3, axis=3)
    assert np.array_equal(as_bytes(pixels(torch.from_numpy(data))), data)


# Of the version before there were `deform` and `sharpen`.
OLD_RECIPES = {
    "pca": "29c6a927a9532745125905f6c6f22454729b9bb703e27fa039a29e0972ca413c",
    "autoencoder": "87a2a38e78c337d71273a6e247f1562deec19c10823c2fbc4ebc6702ffce4df7",
}
OLD_PRIOR = "1377c90d6f62c1edd139192a5be2bab153392c3826038198cd84659f7e7577fa"
OLD_CALIBRATION = "99ff34f0209bcf590748608ed8498724febde8a6d1632dece16c583124949e44"


@pytest.mark.parametrize("kind", OLD_RECIPES)
def test_recipes_of_older_plans_are_what_they_were(kind, tmp_path):
    plan = small_plan(kind, path=write_public(tmp_path / "public.npz"))
    job = Job(plan, None, read_public(plan))
    assert geometry_recipe(job) == OLD_RECIPES[kind]
    assert prior_recipe(job, "g") == OLD_PRIOR
    assert calibration_recipe(job, "g", "p") == OLD_CALIBRATION


def with_autoencoder(path, **options):
    settings = {"width": 4, "epochs": 2, "batch": 32, **options}
    return small_plan(
        path=path, representation={"kind": "autoencoder", "code": 6, "autoencoder": settings}
    )


def test_new_keys_enter_the_recipes_that_they_change(tmp_path):
    path = write_public(tmp_path / "public.npz")
    bent = with_autoencoder(path, deform=1.0)
    job = Job(bent, None, read_public(bent))
    assert geometry_recipe(job) != OLD_RECIPES["autoencoder"]
    sharp = small_plan(path=path, sampling={"sharpen": "public"})
    job = Job(sharp, None, read_public(sharp))
    assert geometry_recipe(job) == OLD_RECIPES["pca"]
    assert calibration_recipe(job, "g", "p") != OLD_CALIBRATION
    fixed = small_plan(path=path, sampling={"sharpen": 0.5})
    job = Job(fixed, None, read_public(fixed))
    assert calibration_recipe(job, "g", "p") == OLD_CALIBRATION


def test_deformation_stands_in_the_place_of_the_affine_map(monkeypatch):
    images = torch.rand(400, 1, 16, 16, generator=generator(0))
    old = small_plan().representation.autoencoder
    bent = with_autoencoder("x", deform=1.0, strokes=False)
    first = seen(images, old, generator(1))
    assert torch.equal(first, augment(images, strokes=True, source=generator(1)))
    monkeypatch.setattr(augment_module, "augment", None)  # a call would raise
    settings = bent.representation.autoencoder
    found = seen(images, settings, generator(1))
    assert torch.equal(found, seen(images, settings, generator(1)))
    untouched = (found == images).all(dim=(1, 2, 3)).float().mean()
    assert 0.12 < float(untouched) < 0.28


def test_natural_images_become_strokes_before_they_are_deformed(monkeypatch):
    images = torch.rand(600, 1, 16, 16, generator=generator(0))
    drawn = torch.arange(600) % 3 == 0
    settings = with_autoencoder("x", deform=1.0).representation.autoencoder
    monkeypatch.setattr(augment_module, "deform", lambda images, strength, source: images)
    same = (seen(images, settings, generator(1), drawn) == images).all(dim=(1, 2, 3))
    assert same[drawn].all()
    assert 0.23 < float(same[~drawn].float().mean()) < 0.37  # 1 - STROKE_SHARE
    assert (seen(images, settings, generator(1), torch.ones(600).bool()) == images).all()
    some = seen(images, settings, generator(1))  # nothing said: no image is drawn
    assert not (some[drawn] == images[drawn]).all()
    tiny = images[..., :8, :8]
    assert torch.equal(seen(tiny, settings, generator(1), drawn), tiny)


def test_the_autoencoder_learns_from_deformed_images(tmp_path):
    path = write_public(tmp_path / "public.npz")
    straight, bent = (with_autoencoder(path, deform=amount) for amount in (0.0, 1.0))
    hashes = [
        pretrain(stand_in(plan, tmp_path / name))["geometry_sha256"]
        for name, plan in (("straight", straight), ("bent", bent))
    ]
    assert hashes[0] != hashes[1]


def own_draws(space, data, labels, seed):
    """Decoded draws of each class's Gaussian, drawn by another route than the library's."""
    codes, rng = space.encode(data).double().numpy(), np.random.default_rng(seed)
    drawn = np.empty_like(codes)
    for y in np.unique(labels):
        own = codes[labels == y]
        spread = np.cov(own.T, bias=True)
        drawn[labels == y] = rng.multivariate_normal(own.mean(0), spread, size=len(own))
    return space.decode_pixels(torch.from_numpy(drawn)).float()


def energies(space, data, labels, gain, times=40):
    """Gradient energy of many sets of sharpened draws, and that of the images."""
    found = [
        gradient_energy(sharpen(own_draws(space, data, labels, n), gain)) for n in range(times)
    ]
    return np.array(found), gradient_energy(pixels(torch.from_numpy(data)))


def test_the_public_gain_restores_the_energy_of_public_images(tmp_path, done):
    """Energy of decoded draws, softer than reconstructions: the library's own and drawn anew."""
    kind = done[0].plan.representation.kind
    assert "sharpen_gain" not in done[1]
    path = write_public(tmp_path / "public.npz")
    plan = small_plan(kind, path=path, sampling={"sharpen": "public"})
    verified = stand_in(plan, tmp_path / "run")
    facts = pretrain(verified)
    gain = facts["sharpen_gain"]
    assert 0.0 < gain <= 4.0
    data, labels = np.load(path)["images"][..., None], np.load(path)["labels"]
    space = load_representation(verified.run, verified.plan)
    source = generator(plan.public_seed + 4)
    order = torch.randperm(len(data), generator=source)
    codes = space.encode(data[order])
    drawn = class_draws(codes, torch.from_numpy(labels)[order], source)
    decoded = space.decode_pixels(drawn).float()
    wanted = gradient_energy(pixels(torch.from_numpy(data)))
    found = gradient_energy(sharpen(decoded, gain))
    assert (kind, gain) == ("autoencoder", 4.0) or found == pytest.approx(wanted, rel=1e-3)
    assert abs(found - wanted) < abs(gradient_energy(decoded) - wanted)
    if gain < 4.0:
        others, _ = energies(space, data, labels, gain)
        # The library's set is one of such sets: the images' energy is where those scatter.
        assert abs(others.mean() - wanted) < 4 * others.std()
    assert pretrain(verified) == facts


def test_the_gain_is_the_smallest_that_a_source_supports(tmp_path):
    """Fine noise loses more in the code space than wide bars: alone it asks for a larger gain."""
    bars = write_public(tmp_path / "bars.npz")
    noise = np.random.default_rng(1).integers(0, 256, (200, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", images=noise, labels=np.arange(200) % 2)
    paths = (bars, tmp_path / "noise.npz")
    public = [{"kind": "npz", "path": str(path)} for path in paths]
    plan = small_plan(code=20, public=public, sampling={"sharpen": "public"})
    verified = stand_in(plan, tmp_path / "run")
    facts = pretrain(verified)
    gain, gains = facts["sharpen_gain"], facts["sharpen_gains"]
    assert gain == gains[0] < 0.9 * gains[1]
    space = load_representation(verified.run, verified.plan)
    source = generator(plan.public_seed + 4)
    for path, own in zip(paths, gains, strict=True):
        data = np.load(path)["images"][..., None]
        order = torch.randperm(len(data), generator=source)
        labels = torch.from_numpy(np.load(path)["labels"])[order]
        decoded = space.decode_pixels(class_draws(space.encode(data[order]), labels, source))
        wanted = gradient_energy(pixels(torch.from_numpy(data)))
        assert gradient_energy(sharpen(decoded.float(), gain)) < 1.001 * wanted
        found = gradient_energy(sharpen(decoded.float(), own))
        assert own == 4.0 or found == pytest.approx(wanted, rel=1e-3)


def test_class_draws_have_the_moments_of_their_class():
    """Of few codes, so that a divisor of n - 1 or a resampling of the codes would show."""
    codes = torch.tensor([[0.0, 0.0], [5.0, 5.0], [2.0, 0.0], [9.0, 5.0], [1.0, 3.0], [7.0, -1.0]])
    labels = torch.tensor([3, 0, 3, 0, 3, 0])  # labels count sources on: some have no image here
    before, draw, times = codes.clone(), generator(5), 6000
    drawn = torch.stack([class_draws(codes, labels, draw) for _ in range(times)])
    assert torch.equal(codes, before)
    assert (drawn.shape[1:], drawn.dtype) == (codes.shape, codes.dtype)
    for label in (0, 3):
        own, found = codes[labels == label].double(), drawn[:, labels == label].double()
        exact = torch.cov(own.T, correction=0)
        scale = exact.diag().sqrt()
        mean = own.mean(0)
        off = found - mean
        assert (off.mean((0, 1)) / scale).abs().max() < 4 / (3 * times) ** 0.5
        spread = torch.einsum("tni,tnj->ij", off, off) / (3 * times)
        assert ((spread - exact) / torch.outer(scale, scale)).abs().max() < 4 * (2 / times) ** 0.5
        whitened = off / scale
        assert float(whitened.pow(4).mean()) == pytest.approx(3.0, abs=0.3)  # normal
        between = torch.einsum("tni,tmi->nm", whitened, whitened) / (2 * times)
        assert (between - torch.eye(3)).abs().max() < 0.08  # one draw tells nothing of another


def test_class_draws_of_single_images_and_of_the_same_seed():
    codes = torch.randn(5, 3, generator=generator(0))
    labels = torch.tensor([4, 1, 1, 7, 1])
    drawn = class_draws(codes, labels, generator(1))
    assert torch.equal(drawn[[0, 3]], codes[[0, 3]])  # no spread about its own mean
    assert not torch.isclose(drawn[labels == 1], codes[labels == 1]).any()
    assert torch.equal(drawn, class_draws(codes, labels, generator(1)))
    assert not torch.equal(drawn, class_draws(codes, labels, generator(2)))


def with_cells(path, **changes):
    return small_plan(path=path, stages={"moments": {"cells": {}}}, **changes)


def test_plans_with_cells_keep_how_public_codes_spread(tmp_path, done):
    assert "within_sha256" not in done[1]
    assert load_within(done[0].run, done[0].plan) is None
    path = write_public(tmp_path / "public.npz")
    verified = stand_in(with_cells(path), tmp_path / "run")
    facts = pretrain(verified)
    file = verified.run.public / "within.safetensors"
    assert facts["within_sha256"] == sha256_file(file)
    data = np.load(path)
    codes = load_representation(verified.run, verified.plan).encode(data["images"][..., None])
    z = codes.double().numpy()
    scatter = sum(
        np.cov(z[data["labels"] == y].T, bias=True) * (data["labels"] == y).sum() for y in range(4)
    )
    found = load_within(verified.run, verified.plan)
    np.testing.assert_allclose(found, scatter / (200 - 4), atol=1e-9)
    assert found.dtype == np.float64
    assert pretrain(verified) == facts


def test_a_lost_or_foreign_spread_is_seen(tmp_path):
    path = write_public(tmp_path / "public.npz")
    verified = stand_in(with_cells(path), tmp_path / "run")
    facts = pretrain(verified)
    file = verified.run.public / "within.safetensors"
    file.unlink()
    with pytest.raises(MissingError, match="within"):
        load_within(verified.run, verified.plan)
    assert pretrain(verified) == facts
    save_within(file, np.eye(6), "another")
    with pytest.raises(UsageError, match="not the file"):
        load_within(verified.run, verified.plan)
    verified.run.transcript.write_text("{}\n")
    with pytest.raises(BudgetError, match="would change"):
        pretrain(verified)
    with pytest.raises(UsageError, match="of 5 numbers"):
        forged = {**facts, "within_sha256": sha256_file(file)}
        verified.run.calibration.write_text(json.dumps(forged))
        load_within(verified.run, with_cells(path, code=5))


def test_a_lost_spread_comes_back_after_charges_if_it_is_the_same(tmp_path):
    path = write_public(tmp_path / "public.npz")
    verified = stand_in(with_cells(path), tmp_path / "run")
    facts = pretrain(verified)
    file, calibration = verified.run.public / "within.safetensors", verified.run.calibration
    whole, named = file.read_bytes(), calibration.read_bytes()
    verified.run.transcript.write_text("{}\n")
    file.unlink()
    assert pretrain(verified) == facts
    assert (file.read_bytes(), calibration.read_bytes()) == (whole, named)
    for other in ({**facts, "within_sha256": "0" * 64}, {**facts, "within_sha256": None}, None):
        file.unlink()
        calibration.write_text("damaged" if other is None else json.dumps(other))
        with pytest.raises(BudgetError, match=r"within\.safetensors would change"):
            pretrain(verified)
        assert not file.exists()
        file.write_bytes(whole)


def test_spread_of_few_and_absent_classes_is_finite():
    codes = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 5.0]])
    pooled = within_covariance(codes, torch.tensor([0, 0, 3]))
    np.testing.assert_allclose(pooled, [[2.0, 0.0], [0.0, 0.0]])
    assert np.isfinite(within_covariance(codes[:1], torch.tensor([0]))).all()


def test_the_normalised_net_in_half_precision_pretrains_alike_twice(tmp_path):
    """Fewer steps than a plan takes; the same bytes twice, and codes that tell images apart."""
    path = write_public(tmp_path / "public.npz")
    options = {"norm": True, "hidden": 16, "loss": "squares", "precision": "bfloat16"}
    public = [{"kind": "npz", "path": str(path)}, {"kind": "glyphs", "count": 100}]
    plan = with_autoencoder(path, deform=0.6, learning_rate=1e-2, **options)
    plan = plan.model_copy(update={"public": small_plan(public=public).public})
    hashes = [pretrain(stand_in(plan, tmp_path / name))["geometry_sha256"] for name in "ab"]
    assert hashes[0] == hashes[1]
