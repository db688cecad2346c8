import numpy as np
import pytest
import torch
from public_helpers import small_plan

from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import MissingError, PlanError, UsageError
from dpsynth.models.autoencoder import build_autoencoder, pixels
from dpsynth.models.seeding import seeded_initialisation
from dpsynth.public.geometry import PixelCodec, fit_pca
from dpsynth.public.representation import (
    AutoencoderCodec,
    load_geometry,
    load_representation,
    save_geometry,
    standardised,
)
from dpsynth.public.wavelet import wavelet_codec

KINDS = ["pca", "autoencoder", "normed", "pixels", "wavelet"]


def images(count, seed=0, shape=(8, 8, 1)):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def representation(kind, count=60):
    data = images(count)
    if kind == "pca":
        plan = small_plan(kind)
        return plan, standardised(fit_pca([data], plan.representation.code), data, radius=2.0)
    if kind == "pixels":
        return small_plan(kind, code=64), standardised(PixelCodec((8, 8, 1)), data, radius=2.0)
    if kind == "wavelet":
        plan = small_plan(representation={"kind": kind, "wavelet": "db2", "levels": 1})
        codec = wavelet_codec(plan.representation, plan.private.image)
        return plan, standardised(codec, data, radius=2.0)
    plan = small_plan("autoencoder") if kind == "autoencoder" else normed_plan()
    with seeded_initialisation(0):
        model = build_autoencoder(plan.representation, plan.private.image)
    if kind == "normed":
        with torch.no_grad():
            for part in torch.from_numpy(data).split(20):  # averages of their own
                model(pixels(part))
    return plan, standardised(AutoencoderCodec(model.eval()), data, radius=2.0)


def normed_plan():
    options = {"width": 4, "batch": 32, "hidden": 20, "norm": True, "loss": "squares"}
    settings = {"kind": "autoencoder", "code": 6, "autoencoder": options}
    return small_plan(representation=settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_records_code_is_the_same_bits_in_any_company(kind, threads):
    _, space = representation(kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        records = images(40, seed=1)
        alone = np.stack([space.encode_exact(record) for record in records])
        assert torch.get_num_threads() == threads
        order = np.random.default_rng(2).permutation(40)
        shuffled = np.empty_like(alone)
        for index in order:
            space.encode(images(int(index) + 1, seed=3))  # other work in between
            shuffled[index] = space.encode_exact(records[index])
        assert np.array_equal(alone, shuffled)
        assert np.array_equal(alone, space.encode_exact_many(records))
        company = np.concatenate([images(7, seed=4), records[10:20], images(3, seed=5)])
        assert np.array_equal(alone[10:20], space.encode_exact_many(company)[7:17])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_layout_does_not_change_a_code(kind):
    _, space = representation(kind)
    record = images(1, seed=6)[0]
    expected = space.encode_exact(record)
    for offset in range(1, 9):
        buffer = np.zeros(record.size + 16, dtype=np.uint8)
        shifted = buffer[offset : offset + record.size].reshape(record.shape)
        shifted[:] = record
        assert np.array_equal(space.encode_exact(shifted), expected)
    assert np.array_equal(space.encode_exact(np.asfortranarray(record)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_and_batched_codes_agree(kind):
    _, space = representation(kind)
    records = images(30, seed=7)
    exact = space.encode_exact_many(records)
    assert exact.dtype == np.float64
    np.testing.assert_allclose(space.encode(records).numpy(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_public_codes_are_centred_with_unit_variance(kind):
    _, space = representation(kind)
    codes = space.encode(images(60)).double()
    assert codes.mean(0).abs().max() < 1e-4
    assert abs(float(codes.square().mean()) - 1.0) < 1e-3


def test_pca_agrees_with_a_plain_svd_and_inverts():
    data = images(50, shape=(3, 4, 1))
    codec = fit_pca([data], 12)
    flat = data.reshape(50, -1) / 255.0
    _, _, rows = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    np.testing.assert_allclose(np.abs(np.sum(codec.basis * rows, axis=1)), 1.0, atol=1e-9)
    np.testing.assert_allclose(codec.basis @ codec.basis.T, np.eye(12), atol=1e-12)
    space = standardised(codec, data)
    assert np.array_equal(space.decode(space.encode(data)), data)


def test_pca_refuses_more_directions_than_there_are():
    with pytest.raises(PlanError, match="at most 12 directions"):
        fit_pca([images(50, shape=(3, 4, 1))], 13)


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind, tmp_path):
    plan, space = representation(kind)
    run = RunDir.create(tmp_path / "run")
    geometry = run.public / "geometry.safetensors"
    with pytest.raises(MissingError) as missing:
        load_representation(run, plan)
    assert "dpsynth pretrain" in missing.value.hint
    save_geometry(geometry, space, {"recipe": "x"})
    write_json(run.calibration, {"radius": 3.5, "geometry_sha256": sha256_file(geometry)})
    back = load_representation(run, plan)
    assert (back.dim, back.radius, back.shape) == (space.dim, 3.5, space.shape)
    records = images(5, seed=8)
    assert np.array_equal(back.encode_exact_many(records), space.encode_exact_many(records))
    codes = torch.randn(4, space.dim)
    decoded = back.decode(codes)
    assert decoded.dtype == np.uint8
    assert decoded.shape == (4, *space.shape)
    assert np.array_equal(decoded, space.decode(codes))


def test_a_loaded_net_is_the_saved_one_to_the_bit(tmp_path):
    plan, space = representation("normed")
    before = {name: value.clone() for name, value in space.codec.model.state_dict().items()}
    path = tmp_path / "geometry.safetensors"
    save_geometry(path, space, {})
    back = load_geometry(path, plan)[0].codec.model
    assert not back.training
    after = back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    back.encode(torch.rand(9, 1, 8, 8))  # encoding leaves the averages alone
    assert all(torch.equal(before[name], value) for name, value in back.state_dict().items())
    with pytest.raises(UsageError, match="does not fit"):
        load_geometry(path, small_plan("autoencoder"))


def test_another_geometry_than_calibrated_is_refused(tmp_path):
    plan, space = representation("pca")
    run = RunDir.create(tmp_path / "run")
    save_geometry(run.public / "geometry.safetensors", space, {})
    write_json(run.calibration, {"radius": 3.5, "geometry_sha256": "0" * 64})
    with pytest.raises(UsageError, match="not the file"):
        load_representation(run, plan)


def test_a_geometry_of_another_plan_is_refused(tmp_path):
    _, space = representation("pca")
    path = tmp_path / "geometry.safetensors"
    save_geometry(path, space, {})
    with pytest.raises(UsageError, match="does not fit"):
        load_geometry(path, small_plan("autoencoder"))
    with pytest.raises(UsageError, match="does not fit"):
        load_geometry(path, small_plan("pca", code=5))


def test_wrong_shapes_are_refused():
    _, space = representation("pca")
    with pytest.raises(UsageError, match="expected"):
        space.encode_exact(images(1, shape=(8, 9, 1))[0])
    with pytest.raises(UsageError, match="expected codes"):
        space.decode(torch.zeros(2, space.dim + 1))


def test_decode_clips_to_bytes():
    _, space = representation("pca")
    extreme = space.decode(1e4 * torch.randn(20, space.dim))
    assert {int(extreme.min()), int(extreme.max())} == {0, 255}
