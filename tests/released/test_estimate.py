"""Gaussians from noisy moments: always finite, always positive, exact without noise."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpsynth.artifacts.moments import ReleasedMoments, load_moments, save_moments
from dpsynth.artifacts.tensors import save_tensors
from dpsynth.errors import MissingError, UsageError
from dpsynth.planning.release import Moments
from dpsynth.released.estimate import estimate

Y, D = 3, 4
numbers = st.floats(-1e9, 1e9)


def moments(counts, sums, seconds, covariance="class", std=0.0):
    return ReleasedMoments(
        np.asarray(counts, float), np.asarray(sums), np.asarray(seconds), std, std, std, 10.0,
        covariance,
    )  # fmt: skip


def sample(n=4000, covariance="class", seed=0):
    """Moments of real draws without noise, and the empirical truth."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, Y, n)
    roots = rng.normal(size=(Y, D, D)) / 3 + np.eye(D)
    centres = rng.normal(size=(Y, D))
    codes = centres[labels] + np.einsum("nij,nj->ni", roots[labels], rng.normal(size=(n, D)))
    own = [codes[labels == y] for y in range(Y)]
    seconds = np.stack([z.T @ z for z in own])
    if covariance == "shared":
        seconds = seconds.sum(0, keepdims=True)
    made = moments([len(z) for z in own], [z.sum(0) for z in own], seconds, covariance)
    return made, own


def check(found):
    for value in (found.weights, found.means, found.covariances):
        assert np.isfinite(value).all()
    assert found.weights.sum() == pytest.approx(1)
    assert (found.weights > 0).all()
    assert (np.linalg.norm(found.means, axis=1) <= 10 * (1 + 1e-9)).all()
    np.testing.assert_array_equal(found.covariances, found.covariances.transpose(0, 2, 1))
    values = np.linalg.eigvalsh(found.covariances)
    scale = np.abs(values).max(axis=1, keepdims=True)
    assert (values >= 1e-2 - 1e-12 * scale).all()


def test_without_noise_it_is_the_empirical_gaussian():
    made, own = sample()
    found = estimate(made, Moments(floor=1e-9))
    for y, z in enumerate(own):
        np.testing.assert_allclose(found.means[y], z.mean(0))
        np.testing.assert_allclose(found.covariances[y], np.cov(z.T, bias=True), atol=1e-9)
    np.testing.assert_allclose(found.weights, [len(z) / 4000 for z in own])


def test_shared_covariance_is_the_within_class_one():
    made, own = sample(covariance="shared")
    found = estimate(made, Moments(covariance="shared", floor=1e-9))
    within = sum(len(z) * np.cov(z.T, bias=True) for z in own) / 4000
    for y in range(Y):
        np.testing.assert_allclose(found.covariances[y], within, atol=1e-9)


@given(
    counts=hnp.arrays(float, Y, elements=numbers),
    sums=hnp.arrays(float, (Y, D), elements=numbers),
    seconds=hnp.arrays(float, (Y, D, D), elements=numbers),
    covariance=st.sampled_from(["class", "shared"]),
    rank=st.sampled_from([None, 1, 2, 100]),
    std=st.floats(0, 1e6),
)
@settings(max_examples=150, deadline=None)
def test_any_noise_gives_finite_positive_gaussians(counts, sums, seconds, *, covariance, rank, std):
    seconds = seconds + seconds.transpose(0, 2, 1)
    made = moments(counts, sums, seconds if covariance == "class" else seconds[:1], covariance, std)
    check(estimate(made, Moments(covariance=covariance, rank=rank)))


def test_nothing_but_noise_around_zero_records():
    check(estimate(moments(np.zeros(Y), np.zeros((Y, D)), np.zeros((Y, D, D))), Moments()))


def test_an_absent_class_falls_back_to_the_whole():
    made, _ = sample()
    counts = made.counts.copy()
    counts[1] = -3.0
    made = dataclasses.replace(made, counts=counts)
    found = estimate(made, Moments())
    check(found)
    total = counts.sum()
    np.testing.assert_allclose(found.means[1], made.sums.sum(0) / total)
    assert found.weights[1] < 1e-3


def test_the_threshold_for_small_classes_is_the_plans():
    made, own = sample()
    least = float(max(len(z) for z in own)) + 1
    found = estimate(made, Moments(least_count=least))
    assert np.ptp(found.means, axis=0) == pytest.approx(np.zeros(D))
    assert np.ptp(found.covariances, axis=0) == pytest.approx(np.zeros((D, D)))


def test_rank_is_cut_after_the_noise():
    made, _ = sample()
    found = estimate(made, Moments(rank=2))
    values = np.linalg.eigvalsh(found.covariances)
    np.testing.assert_allclose(values[:, :2], 1e-2)
    assert (values[:, 2:] > 0.1).all()


def test_heavy_noise_shrinks_classes_to_the_pooled_gaussian():
    made, _ = sample()
    noisy = dataclasses.replace(made, sum_std=1e5, second_std=1e5)
    found = estimate(noisy, Moments())
    assert np.ptp(found.means, axis=0) == pytest.approx(np.zeros(D))
    assert np.ptp(found.covariances, axis=0) == pytest.approx(np.zeros((D, D)))


def test_shrinkage_helps_under_noise():
    """Frobenius error of class covariances, with the noise known and with it ignored."""
    rng = np.random.default_rng(3)
    made, _ = sample(n=600)
    truth = estimate(made, Moments()).covariances
    std, errors = 60.0, {"known": 0.0, "ignored": 0.0}
    for _ in range(20):
        noise = rng.normal(size=made.seconds.shape) * std / np.sqrt(2)
        seconds = made.seconds + (noise + noise.transpose(0, 2, 1)) / np.sqrt(2)
        for name, told in (("known", std), ("ignored", 0.0)):
            noisy = dataclasses.replace(made, seconds=seconds, second_std=told)
            errors[name] += np.square(estimate(noisy, Moments()).covariances - truth).sum()
    assert errors["known"] < errors["ignored"]


def test_moments_survive_the_file(tmp_path):
    made, _ = sample()
    save_moments(tmp_path / "moments.safetensors", made)
    loaded = load_moments(tmp_path / "moments.safetensors")
    for field in dataclasses.fields(made):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(made, field.name))


def test_broken_moments_are_clear_errors(tmp_path):
    path = tmp_path / "moments.safetensors"
    with pytest.raises(MissingError):
        load_moments(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(UsageError):
        load_moments(path)
    save_tensors(path, {"counts": np.ones(2)}, {"room": "released", "format": "other"})
    with pytest.raises(UsageError):
        load_moments(path)
    made, _ = sample()
    with pytest.raises(UsageError):
        save_moments(path, dataclasses.replace(made, radius=float("nan")))
    with pytest.raises(UsageError):
        save_moments(path, dataclasses.replace(made, sums=made.sums[:2]))
    save_tensors(path, {"counts": np.ones(2)}, {"room": "curator", "format": "dpsynth-moments-1"})
    with pytest.raises(UsageError, match="not for release"):
        load_moments(path)


def _released_by(covariances: np.ndarray, records: int, std: float, rng) -> ReleasedMoments:
    """Exact moments of zero-mean Gaussians, `records` a class, plus the declared noise."""
    classes, dim, _ = covariances.shape
    noise = rng.normal(size=covariances.shape) * std
    noise = (noise + noise.transpose(0, 2, 1)) / 2  # diagonal std, elsewhere std / sqrt(2)
    return ReleasedMoments(
        counts=np.full(classes, float(records)),
        sums=np.zeros((classes, dim)),
        seconds=records * covariances + noise,
        count_std=1.0,
        sum_std=1.0,
        second_std=std,
        radius=100.0,
        covariance="class",
    )


def test_shrinkage_beats_the_plain_and_the_pooled_estimate_at_any_noise() -> None:
    rng = np.random.default_rng(0)
    dim, classes, records = 20, 10, 1000
    spectrum = np.geomspace(2.0, 0.02, dim)
    data = rng.normal(size=(classes, 60, dim)) * np.sqrt(spectrum)
    truth = np.einsum("yni,ynj->yij", data, data) / 60
    for std in (20.0, 100.0, 400.0):
        moments = _released_by(truth, records, std, rng)
        found = estimate(moments, Moments(floor=1e-6)).covariances
        plain = moments.seconds / records
        pooled = np.broadcast_to(plain.mean(axis=0), plain.shape)

        def error(guess: np.ndarray) -> float:
            # In the metric that sampling sees: relative to the spread of each direction.
            weight = 1 / np.sqrt(np.outer(spectrum, spectrum))
            return float(np.square((guess - truth) * weight).mean())

        assert error(found) < 0.9 * error(plain)
        assert error(found) < error(pooled)


def test_buried_eigenvalues_keep_the_trace() -> None:
    from dpsynth.released.estimate import without_buried

    matrix = np.diag([5.0, 0.3, 0.2, -0.1])
    denoised = without_buried(matrix, 0.2)
    assert np.trace(denoised) == pytest.approx(np.trace(matrix))
    assert np.linalg.eigvalsh(denoised) == pytest.approx([0.4 / 3] * 3 + [5.0])
