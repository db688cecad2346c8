"""Gaussians of released means and a public covariance: finite, positive definite, and right."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.artifacts.moments import ReleasedMoments
from dpsynth.errors import UsageError
from dpsynth.planning.release import Moments
from dpsynth.public.within import Spread
from dpsynth.released.estimate import estimate, estimate_means

DIM, CLASSES, RADIUS = 3, 4, 5.0
PLAN = Moments(covariance="public")
WITHIN, TOTAL = np.diag([2.0, 1.0, 0.5]), np.diag([4.0, 3.0, 1.0])
SPREAD = Spread(WITHIN, TOTAL)


def released(counts, sums, noise=0.0):
    counts, sums = np.array(counts, float), np.array(sums, float)
    seconds = np.zeros((0, DIM, DIM))
    return ReleasedMoments(counts, sums, seconds, noise, noise, 0.0, RADIUS, "public")


def test_by_class_means_are_the_released_ones_and_the_spread_is_inside_classes():
    means = np.arange(12.0).reshape(4, 3) / 10
    made = estimate_means(released([100] * 4, means * 100), PLAN, SPREAD, CLASSES)
    np.testing.assert_allclose(made.means, means, atol=1e-12)
    np.testing.assert_allclose(made.covariances, np.repeat(WITHIN[None], 4, axis=0), atol=1e-12)
    np.testing.assert_allclose(made.weights, 0.25)


def test_for_all_records_every_class_has_the_one_mean_and_the_total_spread():
    made = estimate_means(released([400], [[200.0, 0, 40]]), PLAN, SPREAD, CLASSES)
    np.testing.assert_allclose(made.means, np.tile([0.5, 0, 0.1], (4, 1)))
    np.testing.assert_allclose(made.covariances, np.repeat(TOTAL[None], 4, axis=0), atol=1e-12)
    np.testing.assert_allclose(made.weights, 0.25)


def test_a_plan_of_one_class_takes_the_spread_inside_it():
    made = estimate_means(released([400], [[4.0, 0, 0]]), PLAN, Spread(WITHIN), 1)
    np.testing.assert_allclose(made.covariances[0], WITHIN, atol=1e-12)


def test_noise_shrinks_class_means_to_the_mean_of_all():
    sums = np.array([[50.0, 0, 0], [-50, 0, 0], [0, 0, 0], [0, 0, 0]])
    sure = estimate_means(released([100] * 4, sums, 0.0), PLAN, SPREAD, CLASSES)
    noisy = estimate_means(released([100] * 4, sums, 25.0), PLAN, SPREAD, CLASSES)
    assert np.linalg.norm(noisy.means[0]) < np.linalg.norm(sure.means[0])


NUMBER = st.floats(-1e12, 1e12)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, CLASSES]),
    st.lists(NUMBER, min_size=CLASSES * (1 + DIM), max_size=CLASSES * (1 + DIM)),
    st.floats(0, 1e9),
    st.booleans(),
)
def test_any_noise_gives_finite_positive_gaussians_in_the_ball(groups, values, noise, flat):
    numbers = np.array(values).reshape(CLASSES, 1 + DIM)[:groups]
    spread = Spread(np.zeros((DIM, DIM)), np.zeros((DIM, DIM))) if flat else SPREAD
    made = estimate_means(released(numbers[:, 0], numbers[:, 1:], noise), PLAN, spread, CLASSES)
    assert made.means.shape == (CLASSES, DIM)
    assert np.isfinite(made.means).all()
    assert (np.linalg.norm(made.means, axis=1) <= RADIUS * (1 + 1e-9)).all()
    assert np.linalg.eigvalsh(made.covariances).min() >= PLAN.floor * (1 - 1e-9)
    assert made.weights.sum() == pytest.approx(1)
    assert (made.weights > 0).all()


def test_a_release_of_another_kind_or_of_other_groups_is_refused():
    with pytest.raises(UsageError, match="public codes"):
        estimate(released([4] * 4, np.zeros((4, 3))), PLAN)
    for groups in (2, 3, 5):
        with pytest.raises(UsageError, match="no release of means"):
            estimate_means(released([4] * groups, np.zeros((groups, 3))), PLAN, SPREAD, CLASSES)
    with pytest.raises(UsageError, match="missing"):
        estimate_means(released([4], np.zeros((1, 3))), PLAN, Spread(WITHIN), CLASSES)
