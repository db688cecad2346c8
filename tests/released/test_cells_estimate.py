"""Mixtures from noisy class and cell moments: right without noise, sane with any of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.artifacts.cells import ReleasedCells
from dpsynth.artifacts.moments import ReleasedMoments
from dpsynth.planning.release import Cells, Moments
from dpsynth.released.cells import estimate_cells

RADIUS, DIM = 4.0, 3
SETTINGS = Moments(cells=Cells(), floor=1e-3)


def symmetric(rng, shape, std):
    drawn = rng.normal(size=(*shape, DIM, DIM)) * std
    lower = np.tril(drawn, -1) / np.sqrt(2)
    return lower + np.swapaxes(lower, -1, -2) + drawn * np.eye(DIM)


def two_modes(rng, count=4000):
    """Codes of two classes, each of two modes along another axis."""
    codes, labels = [], []
    for y, axis in enumerate((0, 1)):
        for side in (-1.0, 1.0):
            centre = np.zeros(DIM)
            centre[axis] = 1.5 * side
            codes.append(centre + rng.normal(size=(count, DIM)) * [0.3, 0.5, 0.2 * (2 + side)])
            labels.append(np.full(count, y))
    return np.concatenate(codes), np.concatenate(labels)


def released(codes, labels, std, rng, *, classes=2):
    """Class and cell moments with noise `std` in every block; cells are the sides of an axis."""
    most, axis = 2, np.minimum(np.arange(classes), DIM - 1)
    side = (codes[np.arange(len(codes)), axis[labels]] > 0).astype(int)
    centres = np.zeros((classes, most, DIM))
    for y in range(classes):
        centres[y, 0, axis[y]], centres[y, 1, axis[y]] = -1.2, 1.2
    counts, sums = np.zeros((classes, most)), np.zeros((classes, most, DIM))
    seconds = np.zeros((classes, most, DIM, DIM))
    for y in range(classes):
        for k in range(most):
            own = codes[(labels == y) & (side == k)] - centres[y, k]
            counts[y, k], sums[y, k], seconds[y, k] = len(own), own.sum(0), own.T @ own
    whole = [codes[labels == y] for y in range(classes)]
    moments = ReleasedMoments(
        np.array([float(len(w)) for w in whole]) + std * rng.normal(size=classes),
        np.stack([w.sum(0) for w in whole]) + std * rng.normal(size=(classes, DIM)),
        np.stack([w.T @ w for w in whole]) + symmetric(rng, (classes,), std),
        std,
        std,
        std,
        RADIUS,
        "class",
    )
    cells = ReleasedCells(
        centres,
        np.ones((classes, most), bool),
        counts + std * rng.normal(size=counts.shape),
        sums + std * rng.normal(size=sums.shape),
        seconds + symmetric(rng, counts.shape, std),
        std,
        std,
        std,
        2.0,
        RADIUS,
    )
    return moments, cells


def test_without_noise_every_cell_is_its_own_mean_and_covariance():
    rng = np.random.default_rng(0)
    codes, labels = two_modes(rng)
    found = estimate_cells(*released(codes, labels, 1e-6, rng), SETTINGS)
    assert found.shares == pytest.approx(np.full((2, 2), 0.5), abs=0.01)
    for y, axis in enumerate((0, 1)):
        for k in (0, 1):
            own = codes[(labels == y) & ((codes[:, axis] > 0) == (k == 1))]
            assert found.means[y, k] == pytest.approx(own.mean(0), abs=1e-3)
            assert found.covariances[y, k] == pytest.approx(np.cov(own.T), abs=0.03)


def test_moderate_noise_is_shrunk_to_less_error_than_the_raw_covariances_have():
    rng = np.random.default_rng(1)
    codes, labels = two_modes(rng, 1500)
    moments, cells = released(codes, labels, 250.0, rng)
    found = estimate_cells(moments, cells, SETTINGS)
    raw, error = 0.0, 0.0
    for y, axis in enumerate((0, 1)):
        for k in (0, 1):
            truth = np.cov(codes[(labels == y) & ((codes[:, axis] > 0) == (k == 1))].T)
            offset = cells.sums[y, k] / cells.counts[y, k]
            noisy = cells.seconds[y, k] / cells.counts[y, k] - np.outer(offset, offset)
            raw += np.square(noisy - truth).sum()
            error += np.square(found.covariances[y, k] - truth).sum()
    assert error < 0.7 * raw


def test_a_public_shape_that_fits_is_used():
    """With cells so noisy that they say little, the right template brings the truth nearer."""
    rng = np.random.default_rng(2)
    codes, labels = two_modes(rng, 400)
    truth = [
        np.cov(codes[(labels == y) & ((codes[:, axis] > 0) == side)].T)
        for y, axis in enumerate((0, 1))
        for side in (False, True)
    ]
    moments, cells = released(codes, labels, 120.0, rng)

    def error(templates):
        found = estimate_cells(moments, cells, SETTINGS, templates)
        return np.square(found.covariances.reshape(-1, DIM, DIM) - np.stack(truth)).sum()

    assert error(lambda means: [0.5 * np.stack(truth)]) < 0.8 * error(None)


def test_absent_and_tiny_classes_fall_back_to_their_class_gaussian():
    rng = np.random.default_rng(3)
    codes, labels = two_modes(rng, 300)
    moments, cells = released(codes, labels, 20.0, rng, classes=3)
    found = estimate_cells(moments, cells, SETTINGS)
    assert found.shares[2].tolist() == [1.0, 0.0]
    assert np.isfinite(found.means).all()
    assert np.linalg.eigvalsh(found.covariances).min() > 0


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    std=st.sampled_from([1e-9, 1.0, 50.0, 1e4, 1e9]),
    count=st.sampled_from([0, 1, 30, 500]),
)
def test_any_noise_and_any_size_give_a_finite_positive_mixture(seed, std, count):
    rng = np.random.default_rng(seed)
    codes, labels = two_modes(rng, count)
    moments, cells = released(codes, labels, std, rng, classes=3)
    found = estimate_cells(moments, cells, SETTINGS, lambda means: [], np.eye(DIM))
    assert np.isfinite(found.means).all() and np.isfinite(found.covariances).all()
    assert np.linalg.norm(found.means, axis=-1).max() <= RADIUS * (1 + 1e-9)
    assert np.linalg.eigvalsh(found.covariances).min() > 0
    assert found.shares.min() >= 0
    assert found.shares.sum(axis=1) == pytest.approx(np.ones(3))
