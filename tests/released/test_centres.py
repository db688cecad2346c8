"""Cells from released values: finite for any noise, in the ball, never more than declared."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpsynth.artifacts.cells import ReleasedCells
from dpsynth.artifacts.moments import ReleasedMoments
from dpsynth.planning.release import Moments
from dpsynth.released.centres import (
    cells_by_class,
    first_centres,
    into_ball,
    moved_centres,
    residual_radius,
)
from dpsynth.released.estimate import ClassGaussians, estimate

CLASSES, MOST, DIM, RADIUS = 3, 4, 2, 3.0


def gaussians(scale=1.0, weights=(0.5, 0.3, 0.2)):
    means = np.array([[0.0, 0.0], [1.0, 0.5], [-2.0, 1.0]])
    covariances = np.repeat(scale**2 * np.eye(DIM)[None], CLASSES, axis=0)
    return ClassGaussians(np.array(weights), means, covariances)


def round_of(counts, sums, *, sum_std=0.0, radius=1.0, centres=None, used=None):
    shape = (CLASSES, MOST)
    return ReleasedCells(
        centres=np.zeros((*shape, DIM)) if centres is None else centres,
        used=np.ones(shape, bool) if used is None else used,
        counts=np.broadcast_to(counts, shape).astype(float),
        sums=np.broadcast_to(sums, (*shape, DIM)).astype(float),
        seconds=None,
        count_std=1.0,
        sum_std=sum_std,
        second_std=0.0,
        radius=radius,
        clip=RADIUS,
    )


finite = st.floats(-1e12, 1e12)


@given(
    hnp.arrays(float, CLASSES, elements=finite),
    st.floats(0, 1e9),
    st.integers(1, 256),
    st.integers(1, 10**9),
)
@settings(max_examples=200, deadline=None)
def test_a_class_has_one_cell_or_more_and_never_more_than_declared(
    counts, count_std, most, capacity
):
    cells = cells_by_class(counts, count_std, most=most, capacity=capacity)
    assert cells.dtype == np.int64
    assert ((cells >= 1) & (cells <= most)).all()
    order = np.argsort(counts)
    assert (np.diff(cells[order]) >= 0).all(), "a larger class has fewer cells"


def test_tiny_and_absent_classes_have_one_cell_and_usual_ones_all():
    counts = np.array([100.0, 50.0, 10.0, 0.0, -30.0])
    assert cells_by_class(counts, 0.0, most=4, capacity=500).tolist() == [4, 4, 1, 1, 1]
    # Counts that noise drowns give no reason to split a class.
    assert cells_by_class(counts, 40.0, most=4, capacity=500).tolist() == [1, 1, 1, 1, 1]


def test_first_centres_are_k_means_of_the_released_gaussians():
    cells = np.array([4, 2, 1])
    centres, used = first_centres(gaussians(), cells, RADIUS, 7, most=MOST)
    assert centres.shape == (CLASSES, MOST, DIM)
    assert used.sum(axis=1).tolist() == cells.tolist()
    assert not centres[~used].any()
    assert (np.linalg.norm(centres, axis=-1) <= RADIUS * (1 + 1e-12)).all()
    # One cell is the mean of the clipped draws; two lie on both sides of the mean.
    assert np.linalg.norm(centres[2, 0] - [-2, 1]) < 0.3
    assert np.linalg.norm(centres[1, :2].mean(axis=0) - [1, 0.5]) < 0.1
    assert np.linalg.norm(centres[1, 0] - centres[1, 1]) > 1.2
    again, _ = first_centres(gaussians(), cells, RADIUS, 7, most=MOST)
    np.testing.assert_array_equal(centres, again)


@pytest.mark.parametrize("seed", [0, -3, 2**40 + 1])
def test_any_public_seed_will_do(seed):
    centres, _ = first_centres(gaussians(), np.array([1, 1, 2]), RADIUS, seed, most=2)
    assert np.isfinite(centres).all()


def test_a_cell_moves_to_its_mean_when_there_is_no_noise():
    made = round_of(10.0, np.array([4.0, -2.0]))
    np.testing.assert_allclose(moved_centres(made, 1.0), np.broadcast_to([0.4, -0.2], (3, 4, 2)))


def test_a_move_is_shrunk_by_its_noise_and_left_out_where_noise_explains_it():
    """kept = 1 - d (s/n)^2 / |S/n|^2 with d = 2, s = 1, n = 10, |S/n| = 0.3."""
    made = round_of(10.0, np.array([3.0, 0.0]), sum_std=1.0)
    expected = 0.3 * (1 - 2 * 0.01 / 0.09)
    np.testing.assert_allclose(moved_centres(made, 1.0)[..., 0], expected)
    assert not moved_centres(round_of(10.0, np.array([1.0, 0.0]), sum_std=1.0), 1.0).any()


def test_small_and_unused_cells_stay_where_they_are():
    centres = np.full((CLASSES, MOST, DIM), 0.5)
    used = np.arange(MOST) < np.array([[4], [2], [1]])
    centres[~used] = 0.0
    counts = np.full((CLASSES, MOST), 50.0)
    counts[0] = [50.0, 19.9, 0.0, -5.0]
    made = round_of(counts, np.array([10.0, 0.0]), centres=centres, used=used)
    moved = moved_centres(made, 20.0)
    np.testing.assert_array_equal(moved[0, 1:], centres[0, 1:])
    assert not moved[~used].any()
    np.testing.assert_allclose(moved[0, 0], [0.7, 0.5])


@given(
    hnp.arrays(float, (CLASSES, MOST), elements=finite),
    hnp.arrays(float, (CLASSES, MOST, DIM), elements=finite),
    st.floats(0, 1e9),
    st.floats(-5, 100),
)
@settings(max_examples=200, deadline=None)
def test_moved_centres_are_finite_and_in_the_ball_for_any_noise(counts, sums, sum_std, least):
    made = round_of(counts, sums, sum_std=sum_std)
    moved = moved_centres(made, least)
    assert np.isfinite(moved).all()
    assert (np.linalg.norm(moved, axis=-1) <= min(RADIUS, made.radius) * (1 + 1e-12)).all()


def test_the_residual_radius_is_a_quantile_of_distances():
    """One cell at a standard Gaussian's mean: |z| in the plane is Rayleigh, sqrt(-2 ln 0.1)."""
    wide = ClassGaussians(np.ones(1), np.zeros((1, DIM)), np.eye(DIM)[None])
    found = residual_radius(wide, np.zeros((1, 1, DIM)), np.ones((1, 1), bool), 50.0, 0)
    assert found == pytest.approx(np.sqrt(-2 * np.log(0.1)), rel=0.03)
    halves = residual_radius(
        wide, np.zeros((1, 1, DIM)), np.ones((1, 1), bool), 50.0, 0, quantile=0.5
    )
    assert halves == pytest.approx(np.sqrt(-2 * np.log(0.5)), rel=0.03)


def test_an_unused_cell_shortens_no_residual_and_an_absent_class_widens_none():
    centres = np.zeros((CLASSES, 2, DIM))
    centres[:, 0] = gaussians().means
    centres[:, 1] = [9.0, 9.0]
    used = np.array([[True, False]] * CLASSES)
    near = residual_radius(gaussians(0.1), centres, used, RADIUS, 1)
    assert near < 0.4
    centres[2, 0] = [2.0, -1.0]  # the third class lies far from its centre
    assert residual_radius(gaussians(0.1), centres, used, RADIUS, 1) > 1
    absent = gaussians(0.1, weights=(0.6, 0.4, 1e-9))
    assert residual_radius(absent, centres, used, RADIUS, 1) < 0.4


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e6])
def test_the_residual_radius_is_positive_and_at_most_twice_the_clip(scale):
    centres, used = first_centres(gaussians(scale), np.array([1, 2, 4]), RADIUS, 3, most=MOST)
    found = residual_radius(gaussians(scale), centres, used, RADIUS, 3)
    assert 0 < found <= 2 * RADIUS
    assert np.isfinite(centres).all()


@given(st.integers(0, 10**6), st.floats(-3, 5))
@settings(max_examples=15, deadline=None)
def test_noise_alone_gives_finite_cells(seed, power):
    """Whatever the release holds, an empty data set's noise too, cells come out of it."""
    rng, std = np.random.default_rng(seed), 10.0**power
    seconds = rng.normal(size=(CLASSES, DIM, DIM)) * std
    moments = ReleasedMoments(
        counts=rng.normal(size=CLASSES) * std,
        sums=rng.normal(size=(CLASSES, DIM)) * std,
        seconds=seconds + seconds.transpose(0, 2, 1),
        count_std=std,
        sum_std=std,
        second_std=std,
        radius=RADIUS,
        covariance="class",
    )
    found = estimate(moments, Moments())
    cells = cells_by_class(moments.counts, std, most=MOST, capacity=300)
    centres, used = first_centres(found, cells, RADIUS, seed, most=MOST)
    rho = residual_radius(found, centres, used, RADIUS, seed)
    assert np.isfinite(centres).all()
    assert (np.linalg.norm(centres, axis=-1) <= RADIUS * (1 + 1e-12)).all()
    assert 0 < rho <= 2 * RADIUS


def test_points_outside_the_ball_come_to_its_rim():
    found = into_ball(np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]), 1.0)
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]])
