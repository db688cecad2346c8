"""Statistics: strict wire form, and a search for neighbours that beat the sensitivity."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.queries import ClassMeans
from dpsynth.accounting.statistics import (
    CellMoments,
    CellSums,
    ClassMoments,
    ClippedGradientSum,
    PaperClassSums,
    PaperSecondMoment,
    sensitivity,
    statistic_from_json,
)
from dpsynth.errors import ReplayError

MOMENTS = ClassMoments(0.6, 0.64, 0.48, "class", classes=3, dim=4)
CELL_SUMS = CellSums(0.6, 0.8, classes=3, cells=5, dim=4)
CELL_MOMENTS = CellMoments(0.2, 0.5, 0.8, classes=3, cells=5, dim=4)
MEANS = ClassMeans(0.6, 0.8, classes=3, dim=4)
ALL = [
    MOMENTS,
    MEANS,
    CELL_SUMS,
    CELL_MOMENTS,
    PaperClassSums(3, 4),
    PaperSecondMoment(100, 4),
    ClippedGradientSum(1.5),
]


class TestWire:
    @pytest.mark.parametrize("statistic", ALL, ids=lambda s: s.kind)
    def test_it_survives_json(self, statistic):
        assert statistic_from_json(json.loads(json.dumps(statistic.to_json()))) == statistic

    @pytest.mark.parametrize("statistic", ALL, ids=lambda s: s.kind)
    def test_any_missing_added_or_damaged_key_is_refused(self, statistic):
        spec = statistic.to_json()
        for key in spec:
            with pytest.raises(ReplayError):
                statistic_from_json({k: v for k, v in spec.items() if k != key})
            for bad in (0, 0.0, -1, math.nan, math.inf, True, None, "1", [1], {}, 10**400):
                with pytest.raises(ReplayError):
                    statistic_from_json({**spec, key: bad})
        with pytest.raises(ReplayError, match="keys"):
            statistic_from_json({**spec, "sensitivity": 0.001})

    @pytest.mark.parametrize("bad", [None, [], "clip", 3, {}, {"kind": "free"}, {"kind": []}])
    def test_what_is_no_statistic_is_refused(self, bad):
        with pytest.raises(ReplayError):
            statistic_from_json(bad)

    def test_a_wrong_value_in_code_is_a_value_error(self):
        with pytest.raises(ValueError, match="clip"):
            ClippedGradientSum(math.nan)
        with pytest.raises(ValueError, match="covariance"):
            ClassMoments(1.0, 1.0, 1.0, "full", 2, 2)

    def test_a_stranger_has_no_sensitivity(self):
        with pytest.raises(ValueError, match="no statistic"):
            sensitivity("sum")


def svec(matrix, factor=2**0.5):
    """Upper triangle (d(d+1)/2,), off-diagonal entries times sqrt(2)."""
    rows, columns = np.triu_indices(len(matrix))
    return matrix[rows, columns] * np.where(rows == columns, 1.0, factor)


def clipped(z):
    """z inside the ball of radius 1 (codes in units of R)."""
    norm = np.linalg.norm(z)
    return z / norm if norm > 1 else z


def class_moments(statistic, z, y):
    """What one record adds to the released vector."""
    d, classes = statistic.dim, statistic.classes
    counts, sums = np.zeros(classes), np.zeros((classes, d))
    blocks = classes if statistic.covariance == "class" else 1
    seconds = np.zeros((blocks, d * (d + 1) // 2))
    counts[y] = statistic.count
    sums[y] = statistic.sum * z
    seconds[y % blocks] = statistic.second * svec(np.outer(z, z))
    return np.concatenate([counts, sums.ravel(), seconds.ravel()])


def class_means(statistic, z, y):
    """What one record adds where means alone are released; classes of 1: all are one group."""
    counts, sums = np.zeros(statistic.classes), np.zeros((statistic.classes, statistic.dim))
    group = y % statistic.classes
    counts[group], sums[group] = statistic.count, statistic.sum * z
    return np.concatenate([counts, sums.ravel()])


# Centres (3, 5, 4) in the ball, two of them equal; the radius of residuals.
CENTRES = np.random.default_rng(1).uniform(-0.4, 0.4, (3, 5, 4))
CENTRES[:, 4] = CENTRES[:, 1]
RHO = 0.3


def cell_of(z, y, centres=CENTRES):
    """The nearest centre of the record's class, the lowest index where several are."""
    return int(np.argmin(((z - centres[y]) ** 2).sum(axis=1)))


def cell_moments(statistic, z, y, centres=CENTRES):
    """What one record adds to a cell round: one block, that of its class-cell."""
    d, k = statistic.dim, cell_of(z, y, centres)
    u = clipped((z - centres[y, k]) / RHO)
    counts, sums = np.zeros(centres.shape[:2]), np.zeros(centres.shape)
    seconds = np.zeros((*centres.shape[:2], d * (d + 1) // 2))
    counts[y, k], sums[y, k] = statistic.count, statistic.sum * u
    if isinstance(statistic, CellMoments):
        seconds[y, k] = statistic.second * svec(np.outer(u, u))
    return np.concatenate([counts.ravel(), sums.ravel(), seconds.ravel()])


def paper_sums(statistic, z, y):
    counts, sums = np.zeros(statistic.classes), np.zeros((statistic.classes, statistic.dim))
    counts[y], sums[y] = 1, z / 2
    return np.concatenate([counts, sums.ravel()])


def paper_second(statistic, z, y):
    return svec(np.outer(z, z)) / statistic.capacity


def gradient(statistic, z, y):
    norm = np.linalg.norm(z)
    return z * min(1.0, statistic.clip / norm) if norm > 0 else z


def corners(dim):
    """Records at the extremes: zero, axes, diagonals, the boundary, denormals, huge ones."""
    yield np.zeros(dim)
    yield np.full(dim, 5e-324)
    yield np.full(dim, 1e-160)
    yield np.full(dim, 1e150)
    for axis in np.eye(dim):
        yield from (axis, -axis, axis * (1 + 1e-15), axis * 1e10)
    for sign in (1, -1):
        yield sign * np.ones(dim) / math.sqrt(dim)


def worst(move, dim, classes, rng):
    """Largest ||move(z, y)|| found over corners, random records and hill climbing."""
    tried = [(z, y) for z in corners(dim) for y in range(classes)]
    best = max(((float(np.linalg.norm(move(z, y))), y, z) for z, y in tried), key=lambda t: t[0])
    for _ in range(200):
        z, y = rng.standard_normal(dim) * 10 ** rng.uniform(-2, 2), int(rng.integers(classes))
        norm = float(np.linalg.norm(move(z, y)))
        best = max(best, (norm, y, z), key=lambda found: found[0])
    norm, y, z = best
    scale = 0.3
    for _ in range(400):  # random-direction ascent
        tried = z + scale * max(1.0, float(np.linalg.norm(z))) * rng.standard_normal(dim)
        found = float(np.linalg.norm(move(tried, y)))
        norm, z, scale = (found, tried, scale * 1.3) if found > norm else (norm, z, scale * 0.98)
    return norm


CASES = [
    (MOMENTS, class_moments, 1.0),
    (ClassMoments(0.2, 0.9, 0.4, "shared", 3, 4), class_moments, 1.0),
    (MEANS, class_means, 1.0),
    (ClassMeans(0.2, 0.9, classes=1, dim=4), class_means, 1.0),
    (CELL_SUMS, cell_moments, 1.0),
    (CELL_MOMENTS, cell_moments, 1.0),
    (PaperClassSums(3, 4), paper_sums, math.sqrt(1.25) / 2),
    (PaperSecondMoment(100, 4), paper_second, 0.5),
    (ClippedGradientSum(1.5), gradient, 1.0),
]


@pytest.mark.parametrize(("statistic", "contribution", "share"), CASES)
def test_no_neighbour_beats_the_sensitivity_and_the_worst_is_found(statistic, contribution, share):
    rng = np.random.default_rng(7)
    scope = clipped if contribution is not gradient else (lambda z: z)
    found = worst(lambda z, y: contribution(statistic, scope(z), y), 4, 3, rng)
    limit = sensitivity(statistic)
    assert found <= limit * (1 + 1e-12)
    assert found >= share * limit * (1 - 1e-6)  # add-or-remove reaches this share of it


@pytest.mark.parametrize(
    ("statistic", "contribution"),
    [(c[0], c[1]) for c in CASES if c[1] in (paper_sums, paper_second)],
)
def test_the_papers_constants_cover_replacement_too(statistic, contribution):
    rng = np.random.default_rng(8)

    def replaced(zz, y):
        one, two = clipped(zz[:4]), clipped(zz[4:])
        return contribution(statistic, one, y) - contribution(statistic, two, (y + 1) % 3)

    assert worst(replaced, 8, 3, rng) <= sensitivity(statistic) * (1 + 1e-12)


def test_the_search_catches_a_wrong_sensitivity():
    """The control: an off-diagonal counted in full (factor 2) does beat the claim."""
    rng = np.random.default_rng(9)

    def wrong(z, y):
        return svec(np.outer(clipped(z), clipped(z)), factor=2.0)

    assert worst(wrong, 4, 1, rng) > 1.1


def on_borders(rng, n):
    """Records halfway between two centres of their class, a hair off, and on a centre."""
    for _ in range(n):
        y, (i, j) = int(rng.integers(3)), rng.choice(5, size=2, replace=False)
        middle = (CENTRES[y, i] + CENTRES[y, j]) / 2
        yield from ((middle, y), (middle * (1 + 1e-15), y), (CENTRES[y, i], y))
        along = rng.standard_normal(4)
        normal = CENTRES[y, i] - CENTRES[y, j]
        if normal.any():
            along -= normal * (along @ normal) / (normal @ normal)
        yield clipped(middle + along), y


@pytest.mark.parametrize("statistic", [CELL_SUMS, CELL_MOMENTS], ids=lambda s: s.kind)
def test_a_record_on_a_cells_border_moves_one_block(statistic):
    rng = np.random.default_rng(11)
    records = list(on_borders(rng, 25))
    total = sum(cell_moments(statistic, z, y) for z, y in records)
    for gone in range(len(records)):
        rest = sum(cell_moments(statistic, z, y) for z, y in records[:gone] + records[gone + 1 :])
        moved = total - rest
        assert np.linalg.norm(moved) <= sensitivity(statistic) + 1e-12
        assert np.count_nonzero(np.abs(moved[:15]) > 1e-9) == 1  # one class-cell's count


def test_the_number_of_cells_does_not_enter_the_sensitivity():
    for cells in (1, 2, 300):
        assert sensitivity(CellSums(0.6, 0.8, classes=9, cells=cells, dim=4)) == 1.0
        assert sensitivity(CellMoments(0.6, 0.64, 0.48, 9, cells, 4)) == 1.0


def test_centres_of_the_same_round_would_beat_the_claim():
    """The control: centres computed from the records themselves let one record move others."""
    records = [(np.array([x, 0.0, 0.0, 0.0]), 0) for x in (-0.5, -0.1, -0.1, -0.1, 0.9)]

    def round_of(known):
        centres = np.zeros((1, 2, 4))
        centres[0, 0], centres[0, 1] = known[0][0], np.mean([z for z, _ in known[1:]], axis=0)
        return sum(cell_moments(CELL_SUMS, z, y, centres) for z, y in known)

    assert np.linalg.norm(round_of(records) - round_of(records[:-1])) > 1.1 * sensitivity(CELL_SUMS)


def test_neighbouring_datasets_differ_by_one_contribution():
    rng = np.random.default_rng(10)
    records = [(clipped(rng.standard_normal(4)), int(rng.integers(3))) for _ in range(50)]
    total = sum(class_moments(MOMENTS, z, y) for z, y in records)
    without = sum(class_moments(MOMENTS, z, y) for z, y in records[1:])
    moved = np.linalg.norm(total - without)
    assert moved <= sensitivity(MOMENTS) + 1e-12


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4))
def test_svec_keeps_the_frobenius_norm(values):
    matrix = np.outer(values, values)
    assert np.linalg.norm(svec(matrix)) == pytest.approx(np.linalg.norm(matrix), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_moments_sensitivity_is_the_norm_of_its_weights(a, b, c):
    statistic = ClassMoments(a, b, c, "class", 2, 3)
    assert sensitivity(statistic) == pytest.approx(math.sqrt(a * a + b * b + c * c), rel=1e-12)
