"""Attacks on samples, and exposure: against scikit-learn, brute force and planted copies."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

from dpsynth.assess.audit import roc
from dpsynth.assess.audit.exposure import exposure
from dpsynth.assess.audit.neighbours import copied, nearest, neighbour_scores
from dpsynth.errors import UsageError


@pytest.fixture(scope="module")
def digits():
    images = load_digits().images * 15.9375  # 16 grey levels on 0 to 255
    return images.astype(np.uint8)[..., None]


def test_distances_are_those_of_another_library(digits, monkeypatch):
    monkeypatch.setattr("dpsynth.assess.audit.neighbours._BLOCK", 3000)
    images, others = digits[:40], digits[500:900]
    flat = [part.reshape(len(part), -1) / 255 for part in (images, others)]
    found, _ = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(flat[1]).kneighbors(flat[0])
    assert np.allclose(nearest(images, others), found[:, 0] / 8, atol=1e-9)
    own, _ = NearestNeighbors(n_neighbors=2, algorithm="brute").fit(flat[1]).kneighbors(flat[1])
    assert np.allclose(nearest(others, others, apart=True), own[:, 1] / 8, atol=1e-6)


def test_records_copied_into_the_output_are_seen(digits):
    included = np.random.default_rng(0).random(200) < 0.5
    samples = np.concatenate([digits[600:900], digits[:200][included]])
    scores = neighbour_scores(digits[:200], samples)
    assert roc.auc(scores, included) == 1.0
    assert (copied(digits[:200], samples) == included).all()
    # One alone stands out by its score too.
    alone = np.concatenate([digits[600:900], digits[7:8]])
    assert neighbour_scores(digits[:200], alone).argmax() == 7
    assert np.flatnonzero(copied(digits[:200], alone)).tolist() == [7]


def test_a_copy_survives_a_change_of_a_grey_level_and_no_more(digits):
    near = np.where(digits[:5] > 0, digits[:5] - 1, 1).astype(np.uint8)
    assert copied(digits[:5], near).all()
    far = np.roll(digits[:5], 1, axis=2)
    assert not copied(digits[:5], far).any()


def test_samples_that_know_nothing_of_the_records_give_chance(digits):
    included = np.random.default_rng(1).random(800) < 0.5
    for reference in (None, digits[1500:]):
        scores = neighbour_scores(digits[:800], digits[800:1500], reference)
        low, high = roc.auc_interval(scores, included, 0.999)
        assert low <= 0.5 <= high


def test_the_relative_distance_takes_away_what_is_lonely_by_itself(digits):
    """Members blurred by half of what lies between records of their kind: near, or far apart."""
    rng = np.random.default_rng(2)
    records = digits[:400].astype(float)
    records[::2] += rng.uniform(-128, 128, size=(200, 8, 8, 1))
    records = records.clip(0, 255).astype(np.uint8)
    included = rng.random(400) < 0.5
    blur = np.tile([60.0, 20.0], 200)[included][:, None, None, None]
    blurred = records[included] + blur * rng.normal(size=(int(included.sum()), 8, 8, 1))
    samples = np.concatenate([digits[600:900], blurred.clip(0, 255).astype(np.uint8)])
    relative = roc.auc(neighbour_scores(records, samples), included)
    absolute = roc.auc(-nearest(records, samples), included)
    assert relative > absolute + 0.02
    assert relative > 0.9


def test_images_of_other_shapes_or_none_are_refused(digits):
    with pytest.raises(UsageError, match="one shape"):
        nearest(digits, digits[:, :4])
    with pytest.raises(UsageError, match="or more to choose"):
        nearest(digits, digits[:0])
    with pytest.raises(UsageError, match="2 or more"):
        nearest(digits[:1], digits[:1], apart=True)
    # A single candidate has no reference, and is still scored.
    assert np.isfinite(neighbour_scores(digits[:1], digits[5:9])).all()


def test_exposure_is_its_definition():
    rng = np.random.default_rng(3)
    planted, candidates = rng.normal(size=20) + 1, rng.normal(size=127)
    found = exposure(planted, candidates)
    for score, bits in zip(planted, found.bits, strict=True):
        rank = 1 + sum(other >= score for other in candidates)
        assert bits == pytest.approx(np.log2(128) - np.log2(rank))
    assert found.most == 7.0
    assert found.extracted == sum(score > candidates.max() for score in planted)
    assert found.to_json()["canaries"] == 20


def test_exposure_by_chance_is_what_is_expected():
    rng = np.random.default_rng(4)
    found = [exposure(rng.normal(size=50), rng.normal(size=100)) for _ in range(300)]
    one = found[0]
    means = np.array([each.mean for each in found])
    assert means.mean() == pytest.approx(one.expected, abs=0.05)
    # Ranks among the same candidates go together: their mean spreads more than independent ones.
    assert one.spread <= means.std() < 3 * one.spread
    extracted = np.mean([each.extracted for each in found])
    assert extracted == pytest.approx(one.by_chance, abs=0.15)


def test_ties_rank_last_and_equal_scores_expose_nothing():
    found = exposure(np.ones(5), np.ones(63))
    assert found.bits.tolist() == [0.0] * 5
    assert found.extracted == 0
    with pytest.raises(UsageError, match="candidates beside"):
        exposure(np.ones(3), np.ones(0))
    with pytest.raises(UsageError, match="not a number"):
        exposure(np.array([np.nan]), np.ones(3))
