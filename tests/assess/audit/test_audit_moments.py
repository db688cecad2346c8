"""Attacks on released moments: by the real mechanism of the class round, on sums of digits."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import special
from sklearn.datasets import load_digits

from dpsynth.accounting.statistics import ClassMoments
from dpsynth.assess.audit import roc
from dpsynth.assess.audit.controls import RepeatedNoise, SilentNoise
from dpsynth.assess.audit.detector import bit_scores
from dpsynth.assess.audit.moments import contrast_scores, moment_scores, seen_noise
from dpsynth.assess.audit.worlds import Statistic
from dpsynth.errors import UsageError
from dpsynth.private.blocks import Blocks, blocks_of
from dpsynth.private.lattice import CODE_MAX, RunningSums, quantise_rows
from dpsynth.private.noise import NoiseSource

DIM, CLASSES, CANARIES = 12, 10, 100
WEIGHTS = (0.05, 0.6, 0.798436)


class _Slot:
    """The two facts that a block's scale follows from."""

    def __init__(self, std, covariance):
        self.noise_std = std
        self.statistic = ClassMoments(*WEIGHTS, covariance, classes=CLASSES, dim=DIM)


def _records():
    found = load_digits()
    codes = found.data @ np.linalg.svd(found.data, full_matrices=False)[2][:DIM].T
    return codes / 30.0, found.target.astype(np.int64)


def _canaries(seed):
    """Orthogonal directions within a class, on the ball, as the audit plants them."""
    rng = np.random.default_rng(seed)
    each = CANARIES // CLASSES
    rows = [np.linalg.qr(rng.normal(size=(DIM, DIM)))[0][:each] for _ in range(CLASSES)]
    return np.concatenate(rows) * 0.999, np.arange(CANARIES) // (CANARIES // CLASSES)


def _sums(codes, labels, pooled):
    running = RunningSums(CLASSES, DIM, pooled=pooled)
    running.add(quantise_rows(codes, 1.0)[0], labels)
    return running.total()


def _released(std, *, noise=None, seed=0, covariance="shared", factor=1, turn=0):
    """Blocks of one class round with canaries planted, and their bits."""
    pooled = covariance == "shared"
    records, canaries = _records(), _canaries(seed)
    included = np.random.default_rng(seed + 1000).random(CANARIES) < 0.5
    known = _sums(*records, pooled)
    planted = RunningSums(CLASSES, DIM, pooled=pooled)
    whole = quantise_rows(canaries[0], 1.0)[0] * np.int32(factor)
    planted.add(whole[included], canaries[1][included])
    blocks = blocks_of([_Slot(std, covariance)], 1.0)
    noisy = blocks.release(
        known + planted.total(), noise or NoiseSource.unsafe(seed, f"{std}{covariance}{turn}")
    )
    return _statistics(noisy, known, blocks, whole / CODE_MAX, canaries[1]), included


def _statistics(noisy, known, blocks: Blocks, codes, labels):
    """As an adversary lays them out who wrote his own code: loops, and no index arithmetic."""
    row, column = np.triu_indices(DIM, 1)
    second = np.zeros_like(labels) if len(known.seconds) == 1 else labels
    axes = np.arange(DIM)
    off, diagonal = blocks.second[1].real_std, blocks.second[0].real_std
    exact = [np.asarray(part, np.float64) for part in (known.counts, known.sums, known.seconds)]
    units = [1.0, blocks.sums.unit, blocks.second[0].unit]
    counts, sums, seconds = (part * unit for part, unit in zip(exact, units, strict=True))
    table = [
        ("counts", noisy.counts, counts, blocks.counts.real_std, labels, np.ones((len(codes), 1))),
        ("sums", noisy.sums, sums, blocks.sums.real_std, labels, codes),
        (
            "diagonal",
            noisy.seconds[:, axes, axes],
            seconds[:, axes, axes],
            diagonal,
            second,
            codes**2,
        ),
        (
            "off-diagonal",
            noisy.seconds[:, row, column],
            seconds[:, row, column],
            off,
            second,
            codes[:, row] * codes[:, column],
        ),
    ]
    return tuple(
        Statistic(
            "moments",
            part,
            seen.reshape(-1),
            sure.reshape(-1),
            std,
            np.array([[g * values.shape[1] + j for j in range(values.shape[1])] for g in groups]),
            values,
        )
        for part, seen, sure, std, groups, values in table
    )


@pytest.mark.parametrize("covariance", ["shared", "class"])
def test_the_real_mechanism_gives_the_auc_of_its_own_noise(covariance):
    """One record moves the release by 1 in whitened units: mu = 1 / noise."""
    found = [_released(1.0, seed=seed, covariance=covariance) for seed in range(12)]
    scores = np.concatenate([moment_scores(blocks) for blocks, _ in found])
    included = np.concatenate([bits for _, bits in found])
    low, high = roc.auc_interval(scores, included, 0.999)
    # A little is lost to canaries that share a class, and nothing can be gained.
    assert low - 0.03 <= special.ndtr(1 / np.sqrt(2)) <= high + 0.03
    ratios = [seen_noise(blocks) for blocks, _ in found]
    assert all(abs(noise.variance - 1) < 5 * noise.deviation for noise in ratios)


def test_a_release_without_noise_shows_every_canary():
    blocks, included = _released(4.0, noise=SilentNoise())
    assert roc.auc(moment_scores(blocks), included) == 1.0
    assert seen_noise(blocks).short


def test_an_honest_release_with_much_noise_shows_next_to_nothing():
    blocks, included = _released(40.0)
    low, high = roc.auc_interval(moment_scores(blocks), included, 0.999)
    assert low <= 0.5 <= high
    low, high = roc.auc_interval(contrast_scores(blocks), included, 0.999)
    assert low <= 0.5 <= high


def test_noise_that_was_used_twice_falls_out_of_differences():
    blocks, included = _released(40.0, noise=RepeatedNoise.unsafe(3), covariance="class")
    assert roc.auc(contrast_scores(blocks), included) > 0.99
    # Taken at its word the noise hides the canaries: that attack alone would not do.
    assert roc.auc(moment_scores(blocks), included) < 0.8


def test_noise_of_a_second_round_that_repeats_the_first_falls_out():
    noise = RepeatedNoise.unsafe(3)
    first, included = _released(40.0, noise=noise, covariance="class")
    again, same = _released(40.0, noise=noise, covariance="class")
    assert (included == same).all()
    assert roc.auc(contrast_scores(first + again), included) > 0.99


def test_contributions_that_nothing_clipped_show():
    blocks, included = _released(4.0, factor=8)
    assert roc.auc(moment_scores(blocks), included) > 0.97
    # Also where the adversary supposes that they were clipped.
    supposed = tuple(
        replace(block, values=block.values / factor)
        for block, factor in zip(blocks, (1, 8, 64, 64), strict=True)
    )
    assert roc.auc(moment_scores(supposed), included) > 0.97


def test_sparse_blocks_say_the_same_as_dense_rows():
    from dpsynth.assess.audit.detector import Sighting

    blocks, _ = _released(1.0, covariance="class")
    total = None
    for block in blocks:
        rows = np.zeros((CANARIES, len(block.noisy)))
        for i in range(CANARIES):
            for place, value in zip(block.places[i], block.parts[i], strict=True):
                rows[i, place] += value
        one = Sighting.of(rows, (block.noisy - block.known) / block.std)
        total = one if total is None else total + one
    assert np.allclose(bit_scores(total), moment_scores(blocks), rtol=1e-6, atol=1e-6)


def test_more_rounds_say_more():
    found = {1: [], 3: []}
    truth = []
    for seed in range(6):
        first, included = _released(2.0, seed=seed)
        more = sum((_released(2.0, seed=seed, turn=turn)[0] for turn in (1, 2)), first)
        found[1].append(moment_scores(first))
        found[3].append(moment_scores(more))
        truth.append(included)
    aucs = {k: roc.auc(np.concatenate(v), np.concatenate(truth)) for k, v in found.items()}
    assert aucs[3] > aucs[1] + 0.03
    assert abs(aucs[3] - special.ndtr(np.sqrt(3) / 2 / np.sqrt(2))) < 0.06


def test_too_few_blocks_are_refused():
    blocks, _ = _released(1.0)
    with pytest.raises(UsageError, match="two blocks"):
        contrast_scores(blocks[:1])
    with pytest.raises(UsageError, match="no moments"):
        moment_scores(())
