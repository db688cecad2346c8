"""The release space: PCA of public codes, per-record bits, lifting, and the room's file."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from public_helpers import small_plan, stand_in, write_public

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.errors import BudgetError, MissingError, PlanError, UsageError
from dpsynth.planning.workload import released_dim
from dpsynth.public import projection as module
from dpsynth.public.pretrain import pretrain
from dpsynth.public.projection import (
    LEAST_RESIDUAL,
    PROJECTION,
    Projection,
    fit_projection,
    load_release_space,
    read_projection,
    save_projection,
)
from dpsynth.public.representation import load_representation

DIM, P = 12, 5


def public_codes(count: int = 400, dim: int = DIM, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    mixing = draw.normal(size=(dim, dim)) * np.linspace(2.0, 0.2, dim)[:, None]
    return torch.from_numpy(draw.normal(size=(count, dim)) @ mixing + 0.3).float()


@pytest.fixture(scope="module")
def fitted() -> Projection:
    return fit_projection(public_codes(), P)


@pytest.fixture(scope="module", params=["pixels", "pca", "autoencoder"])
def done(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    code = 64 if request.param == "pixels" else 10
    plan = small_plan(
        request.param,
        code,
        path=write_public(folder / "public.npz"),
        stages={"moments": {"projection": 4}},
    )
    verified = stand_in(plan, folder / "run")
    return verified, pretrain(verified)


def test_the_basis_is_the_leading_svd_of_public_codes(fitted):
    codes = public_codes().double().numpy()
    centred = codes - codes.mean(axis=0)
    _, singular, right = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(fitted.basis @ fitted.basis.T, np.eye(P), atol=1e-12)
    np.testing.assert_allclose(np.abs(np.sum(fitted.basis * right[:P], axis=1)), 1.0, atol=1e-9)
    np.testing.assert_allclose(fitted.centre, codes.mean(axis=0), atol=1e-12)
    variances = singular**2 / len(codes)
    assert fitted.residual == pytest.approx(variances[P:].mean(), rel=1e-9)
    off = centred - centred @ fitted.basis.T @ fitted.basis
    assert fitted.residual == pytest.approx(np.square(off).mean() * DIM / (DIM - P), rel=1e-9)
    assert fitted.bound >= 8 * np.abs(centred).max()


def test_codes_without_anything_off_the_basis_have_some_variance_there():
    flat = public_codes()
    flat[:, 3:] = 0
    assert fit_projection(flat, P).residual == LEAST_RESIDUAL


def test_more_directions_than_there_are_are_refused():
    with pytest.raises(PlanError, match="at most 11"):
        fit_projection(public_codes(), DIM)
    with pytest.raises(PlanError, match="at most 3"):
        fit_projection(public_codes(4), 4)


def test_the_plan_has_fewer_than_its_code():
    plan = small_plan("pca", 6, stages={"moments": {"projection": 5}})
    assert released_dim(plan) == 5
    assert released_dim(small_plan("pca", 6)) == 6
    with pytest.raises(ValueError, match="projection is 6, and a code has 6"):
        small_plan("pca", 6, stages={"moments": {"projection": 6}})


@pytest.mark.parametrize("size", [1, 2, 7, 64, 400])
def test_a_records_feature_is_the_same_bits_in_any_company(fitted, size):
    codes = public_codes().double().numpy()
    alone = np.concatenate([fitted.project_rows(row[None]) for row in codes])
    parts = [fitted.project_rows(codes[i : i + size]) for i in range(0, len(codes), size)]
    assert np.concatenate(parts).tobytes() == alone.tobytes()
    order = np.random.default_rng(size).permutation(len(codes))
    strided = np.asfortranarray(codes[order])
    assert fitted.project_rows(strided).tobytes() == alone[order].tobytes()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=DIM, max_size=DIM))
def test_a_feature_is_the_exact_sum_of_whole_products(fitted, values):
    """Against rational arithmetic, and near P (z - m) inside the bound."""
    code = np.array([values])
    basis, worth = fitted._whole_basis
    moved = np.clip(code[0] - fitted.centre, -fitted.bound, fitted.bound)
    whole = np.rint(moved * (2.0**24 / fitted.bound))
    exact = [
        float(sum(Fraction(a) * Fraction(b) for a, b in zip(whole, column, strict=True))) * worth
        for column in basis.T
    ]
    found = fitted.project_rows(code)[0]
    assert found.tolist() == exact
    np.testing.assert_allclose(found, fitted.basis @ moved, atol=fitted.bound * 2.0**-24 * DIM)


def test_a_code_that_is_no_number_gives_none_and_harms_no_other(fitted):
    codes = public_codes(3).double().numpy()
    clean = fitted.project_rows(codes)
    codes[1, 2] = np.inf
    found = fitted.project_rows(codes)
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[[0, 2]], clean[[0, 2]])


def test_lifting_inverts_projecting_on_the_basis(fitted):
    features = torch.randn(20, P, generator=torch.Generator().manual_seed(0)).double()
    lifted = fitted.lift(features)
    torch.testing.assert_close(fitted.project(lifted), features, rtol=0, atol=1e-10)
    np.testing.assert_allclose(fitted.project_rows(lifted.numpy()), features, atol=1e-4)
    codes = public_codes(50)
    nearest = fitted.lift(fitted.project(codes))
    apart = codes.double() - nearest
    torch.testing.assert_close(
        apart @ torch.from_numpy(fitted.basis).T, torch.zeros(50, P).double()
    )
    rest = np.eye(DIM) - fitted.basis.T @ fitted.basis
    root = fitted.fill(torch.eye(DIM).double()).numpy()  # linear: what it makes of a basis
    np.testing.assert_allclose(root.T @ root, fitted.residual * rest, atol=1e-12)


def test_lifted_moments_are_those_of_lifted_draws(done):
    verified, _ = done
    space = load_release_space(verified.run, verified.plan)
    draw = np.random.default_rng(0)
    root = draw.normal(size=(4, 4))
    covariance, mean = root @ root.T, draw.normal(size=4)
    projection = space.projection
    dense = space.lift_covariance(covariance)
    basis, dim = projection.basis, len(projection.centre)
    expected = basis.T @ covariance @ basis
    expected += projection.residual * (np.eye(dim) - basis.T @ basis)
    np.testing.assert_allclose(dense, expected, atol=1e-9)
    np.testing.assert_allclose(basis @ dense @ basis.T, covariance, atol=1e-9)
    values = np.linalg.eigvalsh(dense)
    assert values.min() >= min(projection.residual, np.linalg.eigvalsh(covariance).min()) - 1e-9
    np.testing.assert_allclose(space.lift_means(mean), projection.centre + mean @ basis)
    assert space.lift_covariance(np.stack([covariance] * 3)).shape == (3, dim, dim)


def test_a_space_without_projection_leaves_all_as_it_is(tmp_path):
    plan = small_plan("pca", path=write_public(tmp_path / "public.npz"))
    verified = stand_in(plan, tmp_path / "run")
    facts = pretrain(verified)
    assert not (verified.run.public / PROJECTION).exists()
    assert "projection_sha256" not in facts and "release_radius" not in facts
    space = load_release_space(verified.run, plan)
    means = np.ones((2, 6))
    assert space.projection is None and space.dim == 6 and space.radius == facts["radius"]
    assert space.lift_means(means) is means and space.lift_covariance(means) is means


def test_the_calibration_names_the_projection_and_its_radius(done):
    verified, facts = done
    path = verified.run.public / PROJECTION
    assert facts["projection_sha256"] == sha256_file(path)
    space = load_release_space(verified.run, verified.plan)
    assert (space.dim, space.radius) == (4, facts["release_radius"])
    assert 0 < facts["release_radius"] <= facts["radius"] * 1.001
    assert (verified.run.public / "radius.png").read_bytes().startswith(b"\x89PNG")
    assert load_representation(verified.run, verified.plan).dim == facts["dim"]  # DP-SGD: all d


def test_records_are_encoded_then_projected_one_by_one(done):
    verified, _ = done
    space = load_release_space(verified.run, verified.plan)
    inner = load_representation(verified.run, verified.plan)
    images = np.random.default_rng(1).integers(0, 256, (9, 8, 8, 1), dtype=np.uint8)
    many = space.representation.encode_exact_many(images)
    assert many.shape == (9, 4) and not space.representation.elementwise
    one = np.stack([space.representation.encode_exact(image) for image in images])
    assert many.tobytes() == one.tobytes()
    projection = space.projection
    expected = (inner.encode_exact_many(images) - projection.centre) @ projection.basis.T
    np.testing.assert_allclose(many, expected, atol=1e-4)
    np.testing.assert_allclose(space.representation.encode(images), expected, atol=1e-3)
    decoded = space.representation.decode_pixels(torch.from_numpy(many))
    straight = inner.decode_pixels(projection.lift(torch.from_numpy(many)))
    torch.testing.assert_close(decoded.double(), straight.double())


def test_a_second_pretraining_keeps_the_projection(done, monkeypatch):
    verified, facts = done
    before = (verified.run.public / PROJECTION).stat().st_mtime_ns
    assert pretrain(verified) == facts
    (verified.run.public / "reconstructions.png").unlink()  # now every stage is asked
    assert pretrain(verified) == facts
    assert (verified.run.public / PROJECTION).stat().st_mtime_ns == before


def test_another_or_no_projection_is_refused(tmp_path):
    path = write_public(tmp_path / "public.npz")
    plan = small_plan("pca", path=path, stages={"moments": {"projection": 4}})
    verified = stand_in(plan, tmp_path / "run")
    pretrain(verified)
    file = verified.run.public / PROJECTION
    kept = file.read_bytes()
    projection = read_projection(file, plan)
    save_projection(file, dataclasses.replace(projection, residual=0.5), "another")
    with pytest.raises(UsageError, match=r"not the file that calibration\.json names"):
        load_release_space(verified.run, plan)
    file.unlink()
    with pytest.raises(MissingError, match="missing from public/"):
        load_release_space(verified.run, plan)
    verified.run.transcript.write_text("{}\n")
    with pytest.raises(BudgetError, match="would change"):
        pretrain(verified)
    verified.run.transcript.unlink()
    file.write_bytes(kept)
    assert load_release_space(verified.run, plan).dim == 4
    wider = small_plan("pca", path=path, stages={"moments": {"projection": 3}})
    with pytest.raises(UsageError, match="does not fit"):
        read_projection(file, wider)


@pytest.mark.parametrize(
    "change", [{"residual": 0.0}, {"residual": float("nan")}, {"bound": 3.0}, {"bound": 0.0}]
)
def test_numbers_that_make_no_sense_are_refused(tmp_path, fitted, change):
    plan = small_plan("pca", DIM, stages={"moments": {"projection": P}})
    save_projection(tmp_path / PROJECTION, dataclasses.replace(fitted, **change), "r")
    with pytest.raises(UsageError, match="does not fit"):
        read_projection(tmp_path / PROJECTION, plan)


def test_what_is_written_is_read(tmp_path, fitted):
    plan = small_plan("pca", DIM, stages={"moments": {"projection": P}})
    save_projection(tmp_path / PROJECTION, fitted, "r")
    found = read_projection(tmp_path / PROJECTION, plan)
    assert np.array_equal(found.basis, fitted.basis) and np.array_equal(found.centre, fitted.centre)
    assert (found.residual, found.bound) == (fitted.residual, fitted.bound)
    assert module.HASH_KEY == "projection_sha256"


def test_within_covariance_is_that_of_features(tmp_path):
    path = write_public(tmp_path / "public.npz")
    moments = {"projection": 4, "cells": {"most": 2}}
    plan = small_plan("pca", 10, path=path, stages={"moments": moments})
    verified = stand_in(plan, tmp_path / "run")
    pretrain(verified)
    from dpsynth.public.within import load_within

    within = load_within(verified.run, plan)
    assert within.shape == (4, 4) and np.linalg.eigvalsh(within).min() > 0
    assert read_json(verified.run.calibration)["within_sha256"]
